"""`billfish bench --backend cuda`: beside cuBLAS, tinygemm, humming and gemlite, all in CUDA graphs.

x is float16; --activations fp8 and q8 round it in the call that is timed. Where it stays float16, a note says so.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from benchmarks.products.engines import PEAK_SIZE, Engine, GpuLimits
from benchmarks.products.limits import ATTEMPTS, MEBIBYTE
from benchmarks.products.peers import Case, Peer, Prepared, copies_for, select
from benchmarks.products.peers.cuda import CUDA_PEERS, Captured
from billfish.backends import BACKENDS, Problem
from billfish.backends.cuda.device_weights import DeviceWeights
from billfish.backends.cuda.driver import Buffer, KernelLaunch, device
from billfish.backends.cuda.plans import Gemm, why_as_it_is
from billfish.core.errors import BackendUnavailable

READ_BYTES = 32 * MEBIBYTE  # at once, as a product reads its weights


class CudaEngine(Engine):
    """Products on a GPU. Weights are rotated past the L2 cache for every M, not only for few rows."""

    name = "cuda"
    activations = "exact"

    def require(self) -> None:
        self.device = device()
        CUDA_PEERS[0].load()
        self.torch: Any = CUDA_PEERS[0].torch  # type: ignore[attr-defined]

    def about(self) -> dict[str, object]:
        return {"gpu": self.device.name, "arch": self.device.arch, "multiprocessors": self.device.multiprocessors}

    def cold_bytes(self) -> int:
        return int(2.2 * self.torch.cuda.get_device_properties(0).L2_cache_size)

    def limits(self, cold_bytes: int) -> GpuLimits:
        torch = self.torch
        buffers = [Buffer(READ_BYTES, 0) for _ in range(copies_for(READ_BYTES, cold_bytes))]
        sink = torch.zeros(1, dtype=torch.int32, device="cuda")
        launch = KernelLaunch("read.cu", "read_all", (), (4 * self.device.multiprocessors, 1), 512, 0, 1, True)

        def read(x: Any, buffer: Buffer) -> Any:
            stream = torch.cuda.current_stream().cuda_stream
            launch(0, stream, buffer.pointer, READ_BYTES // 16, sink.data_ptr())
            return sink

        square = torch.randn((PEAK_SIZE, PEAK_SIZE), device="cuda").half()
        read_seconds = self._best(Captured(torch, torch.float16, buffers, read))
        peak_seconds = self._best(Captured(torch, torch.float16, [square], lambda x, w: w @ w))
        peak = 2 * PEAK_SIZE**3 / peak_seconds
        return GpuLimits(READ_BYTES / read_seconds, peak, peak)

    def _best(self, prepared: Captured) -> float:
        run = prepared.bind(np.zeros((1, 1), np.float32))
        torch, seconds = self.torch, []
        for _ in range(1 + ATTEMPTS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3 / prepared.copies)
        return min(seconds)

    def peers(self, names: str) -> tuple[list[Peer], list[str]]:
        return select(names, CUDA_PEERS)

    def prepare(self, case: Case, cold_bytes: int) -> tuple[Prepared, int]:
        torch, (n, k) = self.torch, (case.n, case.k)
        sizes = 1, n, k, np.dtype(np.float16), "torch", "cuda", case.activations
        able, reason = BACKENDS["cuda"].can_run(Problem("matmul", case.format, case.group_size, *sizes))
        if not able:
            raise BackendUnavailable(f"[bench] cuda: {reason}")
        first = DeviceWeights.pack(case.tensor(), "cuda:0")
        self._kind = first.kind
        copies = copies_for(first.nbytes, self.cold_bytes())
        weights = [first, *(copy.deepcopy(first) for _ in range(copies - 1))]

        def multiply(x: Any, held: Any) -> Any:
            y = torch.empty((len(x), n), dtype=x.dtype, device=x.device)
            stream = torch.cuda.current_stream().cuda_stream
            gemm = Gemm(held.kind, len(x), n, k, activations=case.activations)
            work = torch.empty(held.work_bytes(gemm), dtype=torch.uint8, device=x.device)
            held.multiply(stream, gemm, x.data_ptr(), k, 0, y.data_ptr(), work.data_ptr())
            return y

        return Captured(torch, torch.float16, weights, multiply), first.nbytes

    def remark(self, case: Case, m: int) -> str:
        if case.activations == "exact":
            return ""
        gemm = Gemm(self._kind, m, case.n, case.k, activations=case.activations)
        reason = why_as_it_is(gemm, self.device)
        return reason and f"x stays float16: {reason}"
