"""PyTorch: int8 dot products with symmetric 4-bit weights where it has them, else a dense FP32 product."""

from __future__ import annotations

import numpy as np

from benchmarks.peers.base import Case, Peer, Prepared, Rotated, copies_for, load_package


class Torch(Peer):
    name = family = "torch"
    install = "torch"

    def load(self) -> None:
        self.torch = load_package("torch", self.install)

    def version(self) -> str:
        return str(self.torch.__version__)

    def has_kernel(self, case: Case) -> bool:
        """Whether `_dyn_quant_matmul_4bit` serves: it quantizes x to int8, so only where that was asked for."""
        symmetric = case.format.name in ("u4b8", "q4_0")
        return case.activations == "q8" and symmetric and case.group_size % 32 == 0 and case.k % case.group_size == 0

    def label(self, case: Case) -> str:
        return self.name if self.has_kernel(case) else f"{self.name}:f32"

    def can_run(self, case: Case) -> tuple[bool, str]:
        return True, ""

    def prepare(self, case: Case, cold_bytes: int, threads: int) -> Prepared:
        torch = self.torch
        torch.set_num_threads(threads)
        k, n, group = case.k, case.n, case.group_size
        if self.has_kernel(case):
            codes, scale = case.planes["codes"], case.planes["scale"].astype(np.float32)
            packed = torch.from_numpy(case.repeated(codes[:, 0::2] | codes[:, 1::2] << 4))
            scales = torch.from_numpy(case.repeated(scale))
            # One scale a row is FP32 to it, one a group BF16.
            scales = scales if group == k else scales.to(torch.bfloat16)
            weights = torch.ops.aten._dyn_quant_pack_4bit_weight(packed, scales, None, group, k, n)

            def multiply(x: object, w: object) -> object:
                return torch.ops.aten._dyn_quant_matmul_4bit(x, w, group, k, n)
        else:
            weights, multiply = torch.from_numpy(case.dense()), torch.nn.functional.linear
        copies = copies_for(weights.numel() * weights.element_size(), cold_bytes)
        rotation = [weights, *(weights.clone() for _ in range(copies - 1))]
        return Rotated(rotation, multiply, take=torch.from_numpy, give=lambda y: np.asarray(y.numpy(), np.float32))
