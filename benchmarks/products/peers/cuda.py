"""On an NVIDIA GPU: cuBLAS and tinygemm, which torch has in it, humming-kernels and gemlite."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.products.peers.base import Case, Floats, Peer, Prepared, copies_for, load_package
from billfish.core.errors import BackendUnavailable

CALLS = 100  # in one CUDA graph, so that what it costs to launch it does not count


class Captured(Prepared):
    """Copies of weights that are multiplied one after the other, in a CUDA graph."""

    def __init__(self, torch: Any, dtype: Any, weights: Sequence[Any], multiply: Callable[[Any, Any], Any]) -> None:
        self.torch, self.dtype, self._weights, self._multiply = torch, dtype, weights, multiply
        self.copies = max(1, CALLS // len(weights)) * len(weights)
        self._x: Any = None  # the graph has its address only
        self._y: Any = None

    def bind(self, x: Floats) -> Callable[[], object]:
        torch = self.torch
        taken = self._x = torch.from_numpy(x).cuda().to(self.dtype)
        for weight in self._weights:  # compiles, and makes room, before the capture
            self._multiply(taken, weight)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(self.copies):
                self._y = self._multiply(taken, self._weights[i % len(self._weights)])

        def run() -> None:
            graph.replay()
            torch.cuda.synchronize()

        return run

    def result(self) -> Floats:
        return np.asarray(self._y.float().cpu().numpy(), np.float32)


class CudaPeer(Peer):
    """What runs on torch tensors on a GPU."""

    family = "torch"
    install = "torch"

    def load(self) -> None:
        self.torch = load_package("torch", self.install)
        if not self.torch.cuda.is_available():
            raise BackendUnavailable("[bench] torch: this build finds no CUDA")

    def version(self) -> str:
        return str(self.torch.__version__)

    def can_run(self, case: Case) -> tuple[bool, str]:
        return True, ""


class Cublas(CudaPeer):
    name = "cublas:f16"

    def prepare(self, case: Case, cold_bytes: int, threads: int) -> Prepared:
        torch = self.torch
        dense = torch.from_numpy(case.dense()).cuda().half()
        weights = [dense, *(dense.clone() for _ in range(copies_for(dense.nbytes, cold_bytes) - 1))]
        return Captured(torch, torch.float16, weights, torch.nn.functional.linear)


class Tinygemm(CudaPeer):
    name = "tinygemm:bf16"

    def can_run(self, case: Case) -> tuple[bool, str]:
        able = case.format.name == "u4b8" and case.group_size in (32, 64, 128) and case.k % 128 == 0 and case.n % 8 == 0
        return able, "" if able else "it has u4b8 with groups of 32, 64 or 128"

    def prepare(self, case: Case, cold_bytes: int, threads: int) -> Prepared:
        torch = self.torch
        codes = torch.from_numpy(case.repeated(case.planes["codes"])).cuda()
        packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, 0::2] << 4 | codes[:, 1::2], 8)
        scale = torch.from_numpy(case.repeated(case.planes["scale"]).astype(np.float32)).cuda().T
        scales = torch.stack([scale, torch.zeros_like(scale)], dim=-1).to(torch.bfloat16).contiguous()
        weights = [(packed.clone(), scales.clone()) for _ in range(copies_for(packed.nbytes, cold_bytes))]

        def multiply(x: Any, w: Any) -> Any:
            return torch.ops.aten._weight_int4pack_mm(x, w[0], case.group_size, w[1])

        return Captured(torch, torch.bfloat16, weights, multiply)


class Package(CudaPeer):
    """A package of 4-bit kernels beside torch; `install` is its name."""

    def version(self) -> str:
        from importlib.metadata import version

        return version(self.install)

    def can_run(self, case: Case) -> tuple[bool, str]:
        able = case.format.name == "u4b8" and case.group_size in (32, 64, 128)
        return able, "" if able else "compared for u4b8 with groups of 32, 64 or 128"


class Humming(Package):
    name = family = "humming"
    install = "humming-kernels"

    def load(self) -> None:
        super().load()
        self.layer = load_package("humming.layer", self.install)

    def prepare(self, case: Case, cold_bytes: int, threads: int) -> Prepared:
        torch = self.torch
        config = {"dtype": "uint4", "group_size": case.group_size}
        layer = self.layer.HummingLayer(
            shape_n=case.n, shape_k=case.k, weight_config=config, torch_dtype=torch.float16
        ).cuda()
        layer.load_from_unquantized(torch.from_numpy(case.dense()).cuda().half())
        layer.transform()
        count = copies_for(case.n * case.k // 2, cold_bytes)
        weights = [layer, *(copy.deepcopy(layer) for _ in range(count - 1))]
        return Captured(torch, torch.float16, weights, lambda x, w: w(x))


class Gemlite(Package):
    name = family = install = "gemlite"

    def load(self) -> None:
        super().load()
        self.helper = load_package("gemlite.helper", self.install)

    def prepare(self, case: Case, cold_bytes: int, threads: int) -> Prepared:
        torch = self.torch
        codes = torch.from_numpy(case.repeated(case.planes["codes"])).cuda()
        scales = torch.from_numpy(case.repeated(case.planes["scale"])).cuda().half()
        layer = self.helper.A16Wn(device="cuda:0", dtype=torch.float16).from_weights(
            codes, scales, torch.full_like(scales, 8), 4, case.group_size
        )
        count = copies_for(case.n * case.k // 2, cold_bytes)
        weights = [layer, *(copy.deepcopy(layer) for _ in range(count - 1))]
        return Captured(torch, torch.float16, weights, lambda x, w: w(x))


CUDA_PEERS: tuple[Peer, ...] = (Cublas(), Tinygemm(), Humming(), Gemlite())
