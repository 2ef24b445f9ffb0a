"""Whose kernels are timed: what a backend needs for `billfish bench` besides its kernels."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.products.limits import ATTEMPTS, MEBIBYTE, Limits, last_level_cache
from benchmarks.products.peers import PEERS, Case, Peer, Prepared, copies_for, select
from benchmarks.products.peers.base import Floats
from benchmarks.products.peers.mlx import Mlx, Together
from billfish.backends import BACKENDS, Problem
from billfish.backends.base import Product
from billfish.backends.cpu.backend import CpuBackend
from billfish.backends.cpu.packed import PackedWeights
from billfish.backends.metal import MLX, MetalBackend, MetalProduct, MetalWeights, has_kernels, lay_out
from billfish.core.arrays import Input
from billfish.core.errors import BackendUnavailable

PEAK_SIZE = 4096  # of the dense product that measures a GPU's arithmetic


class Engine(ABC):
    """A backend, its peers and the limits of its hardware."""

    name: str
    activations: str  # unless the command line says otherwise

    def require(self) -> None:  # noqa: B027  (the CPU is always there)
        """Raises BackendUnavailable where the hardware is not there."""

    @abstractmethod
    def about(self) -> dict[str, object]:
        """What the record says of the hardware besides the machine."""

    @abstractmethod
    def cold_bytes(self) -> int:
        """So many bytes of weights, used in turn, come from memory every time."""

    @abstractmethod
    def limits(self, cold_bytes: int) -> Limits:
        """Measured."""

    @abstractmethod
    def peers(self, names: str) -> tuple[list[Peer], list[str]]:
        """As :func:`benchmarks.products.peers.select`."""

    @abstractmethod
    def prepare(self, case: Case, cold_bytes: int) -> tuple[Prepared, int]:
        """Our own contender, and the bytes of one copy of its weights."""

    def remark(self, case: Case, m: int) -> str:
        """What a reader of this time should know, of the case that was prepared last."""
        return ""


class CpuEngine(Engine):
    """The CPU engine, x in float32."""

    name = "cpu"
    activations = "q8"

    def __init__(self) -> None:
        backend = BACKENDS["cpu"]
        assert isinstance(backend, CpuBackend)
        self.backend = backend

    def about(self) -> dict[str, object]:
        return {"isa": self.backend.level}

    def cold_bytes(self) -> int:
        return max(128 * MEBIBYTE, 4 * last_level_cache())

    def limits(self, cold_bytes: int) -> Limits:
        return Limits.measure(self.backend.level, cold_bytes)

    def peers(self, names: str) -> tuple[list[Peer], list[str]]:
        return select(names, PEERS)

    def prepare(self, case: Case, cold_bytes: int) -> tuple[Prepared, int]:
        weights = self.backend.pack(case.tensor())
        copies = copies_for(weights.nbytes, cold_bytes) - 1
        rotation = [weights, *(replace(weights, data=weights.data.copy()) for _ in range(copies))]
        return InOneCall(self.backend, rotation, case.activations), weights.nbytes


class InOneCall(Prepared):
    """Copies that are multiplied in one call, as the graphs of peers are: each with its own x, into a y that exists."""

    def __init__(self, backend: CpuBackend, weights: list[PackedWeights], activations: str) -> None:
        self.copies = len(weights)
        self._backend, self._weights, self._activations = backend, weights, activations

    def bind(self, x: Floats) -> Callable[[], object]:
        products = []
        for weights in self._weights:
            n = weights.shape[0]
            self._y = np.empty((len(x), n), np.float32)
            given, out = Input("bench", "x", x.copy()), Input("bench", "y", self._y)
            products.append(Product(given, weights, n, None, out))
        return lambda: self._backend.linears(products, self._activations)

    def result(self) -> Floats:
        return self._y


@dataclass(frozen=True)
class GpuLimits(Limits):
    """Of a GPU: the arithmetic peak is that of a large float16 product of MLX or cuBLAS."""

    def arithmetic(self, activations: str) -> str:
        return "float16"

    def __str__(self) -> str:
        read, peak = self.read_bytes_per_second / 1e9, self.fma_operations_per_second / 1e9
        return f"limits: memory {read:.3g} GB/s, float16 {peak:.4g} GOP/s"


class MetalEngine(Engine):
    """The Metal engine through MLX, x in float16, beside `mx.quantized_matmul`."""

    name = "metal"
    activations = "exact"

    def __init__(self) -> None:
        backend = BACKENDS["metal"]
        assert isinstance(backend, MetalBackend)
        self.backend = backend

    def require(self) -> None:
        peer = Mlx(device="gpu")
        peer.load()
        self.mx = peer.mx
        if not self.mx.metal.is_available():
            raise BackendUnavailable("[bench] metal: MLX finds no Metal on this machine")

    def about(self) -> dict[str, object]:
        return {"gpu": str(self.mx.metal.device_info().get("device_name", "unknown"))}

    def cold_bytes(self) -> int:
        return 512 * MEBIBYTE  # system-level caches have up to 96

    def limits(self, cold_bytes: int) -> GpuLimits:
        mx = self.mx
        many = mx.ones((cold_bytes // 4,), mx.float32)
        square = mx.ones((PEAK_SIZE, PEAK_SIZE), mx.float16)
        mx.eval(many, square)
        read = cold_bytes / _best(lambda: mx.eval(mx.sum(many)))
        peak = 2 * PEAK_SIZE**3 / _best(lambda: mx.eval(square @ square))
        return GpuLimits(read, peak, peak)

    def peers(self, names: str) -> tuple[list[Peer], list[str]]:
        return select(names, (Mlx(device="gpu"),))

    def prepare(self, case: Case, cold_bytes: int) -> tuple[Prepared, int]:
        mx = self.mx
        dtype = np.dtype(np.float16)
        problem = Problem(
            "matmul", case.format, case.group_size, 1, case.n, case.k, dtype, "mlx", activations=case.activations
        )
        able, reason = has_kernels(problem)
        if not able:
            raise BackendUnavailable(f"[bench] metal: {reason}")
        weights = lay_out(case.tensor())
        copies = [self._product(weights) for _ in range(copies_for(weights.nbytes, cold_bytes))]
        mx.eval([list(copy.weights.arrays.values()) for copy in copies])
        return Together(mx, copies, lambda x, copy: copy(x)), weights.nbytes

    def _product(self, weights: MetalWeights) -> MetalProduct:
        return MetalProduct(self.backend.kernels, weights.converted(MLX.from_numpy))


def _best(run: Callable[[], Any]) -> float:
    """Seconds of the fastest of a few, after one that does not count."""
    run()
    seconds = []
    for _ in range(ATTEMPTS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
