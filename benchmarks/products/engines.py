"""Whose kernels `python -m benchmarks.products` times, and how far a result is from the product in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import ATTEMPTS, MEBIBYTE, GpuLimits, Limits, last_level_cache
from benchmarks.peers import PEERS, Case, Prepared, copies_for
from benchmarks.peers.base import Floats
from benchmarks.peers.mlx import Mlx, Together
from benchmarks.timing import best
from billfish.backends import BACKENDS, Problem
from billfish.backends.base import Product
from billfish.backends.cpu.backend import CpuBackend
from billfish.backends.cpu.packed import PackedWeights
from billfish.backends.metal import MLX, MetalBackend, MetalProduct, has_kernels, lay_out
from billfish.core.arrays import Input
from billfish.core.errors import BackendUnavailable
from billfish.ops.matmul import dequantize

PEAK_SIZE = 4096  # of the dense product that measures a GPU's arithmetic


class CpuEngine:
    """The CPU engine, x in float32: its kernels, its peers and the limits of its hardware."""

    name, activations, peers = "cpu", "q8", PEERS

    def __init__(self) -> None:
        self.backend: CpuBackend = BACKENDS["cpu"]

    def about(self) -> dict[str, object]:
        """What the record says of the hardware besides the machine."""
        return {"isa": self.backend.level}

    def cold_bytes(self) -> int:
        """So many bytes of weights, used in turn, come from memory every time."""
        return max(128 * MEBIBYTE, 4 * last_level_cache())

    def limits(self, cold_bytes: int) -> Limits:
        return Limits.measure(self.backend.level, cold_bytes)

    def prepare(self, case: Case, cold_bytes: int) -> tuple[Prepared, int]:
        """Our own contender, and the bytes of one copy of its weights."""
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
            given, out = Input("benchmark", "x", x.copy()), Input("benchmark", "y", self._y)
            products.append(Product(given, weights, n, None, out))
        return lambda: self._backend.linears(products, self._activations)

    def result(self) -> Floats:
        return self._y


class MetalEngine:
    """The same of the Metal engine through MLX, x in float16, beside `mx.quantized_matmul`."""

    name, activations, peers = "metal", "exact", (Mlx(device="gpu"),)

    def __init__(self) -> None:
        """Raises BackendUnavailable without MLX or an Apple GPU."""
        self.backend: MetalBackend = BACKENDS["metal"]
        self.peers[0].load()
        self.mx = self.peers[0].mx
        if not self.mx.metal.is_available():
            raise BackendUnavailable("--backend metal: MLX finds no Metal on this machine.")

    def about(self) -> dict[str, object]:
        return {"gpu": str(self.mx.metal.device_info().get("device_name", "unknown"))}

    def cold_bytes(self) -> int:
        return 512 * MEBIBYTE  # system-level caches have up to 96

    def limits(self, cold_bytes: int) -> GpuLimits:
        mx = self.mx
        many = mx.ones((cold_bytes // 4,), mx.float32)
        square = mx.ones((PEAK_SIZE, PEAK_SIZE), mx.float16)
        mx.eval(many, square)
        read = cold_bytes / best(lambda: mx.eval(mx.sum(many)), ATTEMPTS)
        peak = 2 * PEAK_SIZE**3 / best(lambda: mx.eval(square @ square), ATTEMPTS)
        return GpuLimits(read, peak, peak)

    def prepare(self, case: Case, cold_bytes: int) -> tuple[Prepared, int]:
        check_metal(case)
        weights = lay_out(case.tensor())
        count = copies_for(weights.nbytes, cold_bytes)
        copies = [MetalProduct(self.backend.kernels, weights.converted(MLX.from_numpy)) for _ in range(count)]
        self.mx.eval([list(copy.weights.arrays.values()) for copy in copies])
        return Together(self.mx, copies, lambda x, copy: copy(x)), weights.nbytes


def check_metal(case: Case) -> None:
    """Raises where the Metal kernels do not have the case."""
    sizes = (1, case.n, case.k, np.dtype(np.float16), "mlx")
    able, reason = has_kernels(Problem("matmul", case.format, case.group_size, *sizes, activations=case.activations))
    if not able:
        raise BackendUnavailable(f"--backend metal: {reason}")


# ---- errors -----------------------------------------------------------------------------------------------------

COLUMNS = 64  # of y that are looked at
OUTLIER = 1000.0  # one value among others of size 1. In language models they are hundreds of times as large


def with_outliers(x: Floats) -> tuple[Floats, NDArray[np.intp]]:
    """A copy of x [M, k] in which one value of each row is OUTLIER, and the columns of these values."""
    columns = np.random.default_rng(2).integers(x.shape[1], size=len(x))
    changed = x.copy()
    changed[np.arange(len(x)), columns] = OUTLIER
    return changed, columns


def errors(case: Case, x: Floats, contender: Prepared) -> tuple[float, float]:
    """Of the contender's last product, which was with x [M, k]; and of one with outliers, which is made here.

    Root mean squares of y - x W^T, divided by those of x W^T. With outliers, they are divided by those of what all
    other values give: it is these that a scale for too many values loses.
    """
    weights = dequantize(case.distinct, backend="reference")[:COLUMNS].astype(np.float64)

    def relative(x: Floats, counted: Floats) -> float:
        expected, size = (array.astype(np.float64) @ weights.T for array in (x, counted))
        difference = contender.result()[:, : expected.shape[1]] - expected
        return float(np.sqrt(np.square(difference).mean() / np.square(size).mean()))

    plain = relative(x, x)
    changed, columns = with_outliers(x)
    others = changed.copy()
    others[np.arange(len(x)), columns] = 0
    contender.bind(changed)()
    return plain, relative(changed, others)
