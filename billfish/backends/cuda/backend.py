"""The backend of the CUDA engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from billfish.backends.base import Backend, Direct, ExpertBlock, ExpertProduct, Problem, Product, delivered
from billfish.backends.cuda import experts
from billfish.backends.cuda.axes import usual_kind, why_not
from billfish.backends.cuda.compile import check_compiler
from billfish.backends.cuda.device_weights import DeviceWeights, read_brick_info
from billfish.backends.cuda.driver import device
from billfish.backends.cuda.experts import DeviceExperts, pack_gate_up
from billfish.backends.cuda.memory import as_tensor
from billfish.backends.cuda.plans import why_exact, why_not_given
from billfish.backends.cuda.products import dequantize, direct, linear_blocks, linear_cupy, linear_numpy
from billfish.core.arrays import Input
from billfish.core.errors import BackendUnavailable
from billfish.core.format import Format, Planes
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.storage import Storage
from billfish.core.tensor import QuantizedTensor


class CudaBackend(Backend):
    """NVIDIA GPUs from sm_80 on. x is float16 or bfloat16; float32 goes through the library it came from.

    batch_invariant: set it on the instance, and a row of a batch gives the same bits as that row alone. Many rows are
    then slower.
    """

    name = "cuda"
    unpacks = reads_blocks = True

    def can_run(self, problem: Problem) -> tuple[bool, str]:
        if problem.device not in ("cuda", "cpu"):
            return False, f"runs on arrays on an NVIDIA GPU or in CPU memory; x is on {problem.device}"
        if problem.activations == "q16":
            return False, "supports activations 'exact', 'fp8' and 'q8', not 'q16'"
        in_bytes = problem.activations in ("fp8", "q8")
        if in_bytes and (problem.experts or problem.dtype == np.float32):
            what = "experts" if problem.experts else "float32"
            return (
                False,
                f"activations={problem.activations!r} needs float16 or bfloat16 and one matrix, not {what}",
            )
        here = problem.device == "cpu" and problem.operation == "matmul" and problem.activations != "given"
        if here and problem.dtype == np.float32:
            return False, "supports float16 and bfloat16; float32 only for torch and CuPy arrays on the GPU"
        if problem.experts and problem.dtype == np.float32:
            return False, "supports experts in float16 and bfloat16, not float32"
        reason = why_not(problem.format, problem.group_size, problem.k)
        if reason:
            return False, reason
        if problem.activations != "exact":
            kind = usual_kind(problem.format, problem.group_size)
            reason = why_exact(kind, problem.activations) if in_bytes else why_not_given(kind)
            if reason:
                return False, f"activations={problem.activations!r}: {reason}" if in_bytes else reason
        usable, about = self.usable()
        if usable and problem.activations != "exact" and device().capability != (9, 0):
            return False, f"8-bit activations need Hopper (sm_90); {device().name} is {device().arch}"
        return usable, "" if usable else about

    def usable(self) -> tuple[bool, str]:
        try:
            found = device()
            check_compiler()
        except BackendUnavailable as error:
            return False, str(error).removeprefix("cuda: ")
        return True, f"{found.name}, {found.arch}"

    def pack(self, tensor: QuantizedTensor, place: str = "cpu") -> DeviceWeights:
        return DeviceWeights.pack(tensor, place)

    def pack_planes(self, format: Format, planes: Planes, group_size: int, place: str) -> DeviceWeights:
        return DeviceWeights.pack_planes(format, planes, group_size, place)

    def linears(self, products: Sequence[Product], activations: str) -> list[Any]:
        if activations == "given":
            return [linear_blocks(product) for product in products]
        return [self._linear(product, activations) for product in products]

    def _linear(self, product: Product, activations: str) -> Any:
        x, weights, bias = product.x, product.weights, product.bias
        assert isinstance(x, Input)
        if x.device == "cpu":
            added = None if bias is None else bias.numpy()
            return delivered(product, linear_numpy(x.numpy(), weights, added, self.batch_invariant, activations))
        source = None if bias is None else bias.source
        if x.kind == "cupy":
            return linear_cupy(x.source, weights, source, self.batch_invariant, activations)
        from billfish.backends.cuda import torch_op  # here, where torch is in use

        return torch_op.linear(x.source, weights, source, self.batch_invariant, activations=activations)

    def pack_experts(self, stack: QuantizedExperts, place: str = "cpu") -> DeviceExperts:
        return DeviceExperts.pack(stack, place)

    def pack_gate_up(self, stacks: Sequence[QuantizedExperts], place: str = "cpu") -> list[DeviceExperts]:
        return pack_gate_up(stacks, place)

    def expert_linear(self, product: ExpertProduct, activations: str) -> Any:
        return experts.linear(product, self.batch_invariant)

    def experts(self, block: ExpertBlock, activations: str) -> Any:
        return experts.block(block, self.batch_invariant)

    def dequantize(self, tensor: QuantizedTensor, out: Input) -> None:
        weights = tensor.made((self.name, out.place), lambda: self.pack(tensor, out.place))
        dequantize(weights, out)

    def to_tensors(self, weights: DeviceWeights) -> tuple[list[Any], str] | None:
        """Bricks, row scales, and the planes beside the codes, all as bytes."""
        if weights.about.planes is None:
            return None
        memories = (weights.bricks, weights.row_scale, *weights.planes)
        return [as_tensor(memory) for memory in memories], weights.about.spelled()

    def from_tensors(self, tensors: Sequence[Any], about: str) -> DeviceWeights:
        bricks, row_scale, *planes = tensors
        return DeviceWeights(read_brick_info(about), bricks, row_scale, tuple(planes))

    def direct(self, weights: DeviceWeights) -> Direct:
        return direct(weights, self)

    def unpack(self, weights: DeviceWeights, format: Format, shape: tuple[int, ...], group_size: int) -> Storage:
        return weights.unpack(format)
