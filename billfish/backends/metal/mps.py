"""The Metal engine for torch: the same kernels on tensors on mps, through `torch.mps.compile_shader`.

    format planes -> MetalWeights (layout.py) -> the kernel for the shape (kernels.py) -> shader_kernel

torch takes whole shaders and has no template arguments, so :class:`shader_kernel` writes the text that MLX would write,
with an explicit instantiation, and binds arguments in its order.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.backends.base import Backend, ExpertBlock, ExpertProduct, Problem, Product
from billfish.backends.metal import experts, has_kernels
from billfish.backends.metal.kernels import Kernels
from billfish.backends.metal.layout import LEAST_SIZE, MetalWeights, lay_out, lay_out_experts
from billfish.backends.metal.signature import Argument, write
from billfish.core.arrays import Input, TorchArrays
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.tensor import QuantizedTensor

TORCH = TorchArrays()
OLDEST_TORCH = "2.7"
ALIGNMENT = 16  # bytes: kernels read vectors of up to so many

# What MLX has before every kernel, as far as ours need it. torch compiles with safe mathematics, unless its user asks
# for fast ones (PYTORCH_MPS_FAST_MATH), which would reorder what decode.metal does on purpose. The pragma came with
# Metal 3.2; macOS 14 has 3.1.
PRELUDE = """#include <metal_stdlib>
#if __METAL_VERSION__ >= 320
#pragma METAL fp math_mode(safe)
#endif
using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;
#ifndef METAL_FUNC
#define METAL_FUNC inline __attribute__((always_inline))
#endif
"""


class Compiled(NamedTuple):
    """A kernel for some types of arguments, and what to bind to it."""

    kernel: Any
    arguments: tuple[Argument, ...]
    casts: dict[int, str]  # of the integers that are no tensors; torch takes them for int64


class shader_kernel:
    """As `mx.fast.metal_kernel`, for tensors on mps. Inputs of fewer than 8 numbers may be in CPU memory."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        compile_options: object | None = None,
    ) -> None:
        self.name, self.source, self.header = name, source, header
        self.input_names, self.output_names = tuple(input_names), tuple(output_names)
        self._compiled: dict[tuple[Any, ...], Compiled] = {}

    def _compile(self, inputs: Sequence[Any], output_dtypes: Sequence[Any], template: Sequence[Any]) -> Compiled:
        import torch

        outputs = self.output_names, output_dtypes, template
        made = write(self.name, self.input_names, inputs, *outputs, self.header, self.source, atomic_outputs=False)
        integers = [argument.constant and argument.type in ("int", "int32_t") for argument in made.arguments]
        casts = {i: "int32" for i, is_integer in enumerate(integers) if is_integer}
        library = torch.mps.compile_shader(PRELUDE + made.text)
        return Compiled(getattr(library, made.name), made.arguments, casts)

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[Any],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        template: Sequence[tuple[str, Any]] = (),
    ) -> list[Any]:
        """Queues `grid` threads in groups of `threadgroup`; returns the outputs, on the device of the first input."""
        types = tuple((tensor.dtype, tensor.dim() == 0, tensor.numel() < LEAST_SIZE) for tensor in inputs)
        key = (types, *template, *output_dtypes)
        if key not in self._compiled:
            self._compiled[key] = self._compile(inputs, output_dtypes, template)
        kernel, arguments, casts = self._compiled[key]
        outputs = [
            inputs[0].new_empty(tuple(shape), dtype=dtype)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        given: list[Any] = []
        for argument in arguments:
            if argument.kind == "output":
                given.append(outputs[argument.index])
                continue
            tensor = inputs[argument.index]
            if argument.kind == "input":
                given.append(tensor.tolist() if argument.constant and tensor.is_cpu else bindable(tensor))
            else:
                assert argument.kind == "shape"  # our kernels ask for nothing else
                given.append(list(tensor.shape))
        kernel(*given, threads=list(grid), group_size=list(threadgroup), arg_casts=casts)
        return outputs


def bindable(tensor: Any) -> Any:
    """The tensor, or a copy, row by row from an address that vectors can be read from: torch binds memory as it is."""
    if tensor.is_contiguous() and not tensor.is_neg() and tensor.storage_offset() * tensor.itemsize % ALIGNMENT == 0:
        return tensor
    copy = tensor.new_empty(tensor.shape)
    return copy.copy_(tensor.detach())


def on_device(place: str, array: NDArray[Any]) -> Any:
    """A plane of weights as a tensor. A few numbers are constants, which stay in CPU memory."""
    if array.size < LEAST_SIZE:
        return TORCH.from_numpy(np.array(array))
    torch = sys.modules["torch"]
    if array.dtype == np.uint32:  # which torch can hold, and hardly more than that
        return TORCH.from_numpy(array.view(np.int32)).to(place).view(torch.uint32)
    return TORCH.from_numpy(np.array(array)).to(place)


class MpsBackend(Backend):
    """Apple GPUs, through `torch.mps.compile_shader`."""

    name = "mps"

    def can_run(self, problem: Problem) -> tuple[bool, str]:
        if problem.device != "mps":
            return False, f"runs on torch tensors on mps; x is a {problem.kind} array on {problem.device}"
        if not hasattr(sys.modules["torch"].mps, "compile_shader"):
            return False, f"torch is too old: torch.mps.compile_shader needs {OLDEST_TORCH}"
        return has_kernels(problem)

    def usable(self) -> tuple[bool, str]:
        if sys.platform != "darwin":
            return False, "Metal needs macOS"
        if importlib.util.find_spec("torch") is None:
            return False, "torch is not installed"
        import torch

        able = torch.backends.mps.is_available()
        return (
            (True, "Apple GPU, for torch tensors on mps") if able else (False, "torch finds no Metal on this machine")
        )

    @cached_property
    def kernels(self) -> Kernels:
        return Kernels(shader_kernel)

    def pack(self, tensor: QuantizedTensor, place: str = "mps:0") -> MetalWeights:
        return lay_out(tensor).converted(partial(on_device, place))

    def linears(self, products: Sequence[Product], activations: str) -> list[Any]:
        return [self._linear(product) for product in products]

    def _linear(self, product: Product) -> Any:
        assert isinstance(product.x, Input)
        x = product.x.source
        rows = math.prod(x.shape[:-1])
        if rows == 0:
            return x.new_zeros((*x.shape[:-1], product.n))
        flat = x.detach().reshape(rows, x.shape[-1])
        y = self.kernels.multiply(flat, product.weights, _beside(product.bias, x))
        return y.reshape(*x.shape[:-1], product.n)

    def pack_experts(self, stack: QuantizedExperts, place: str = "mps:0") -> MetalWeights:
        return lay_out_experts(list(stack)).converted(partial(on_device, place))

    def expert_linear(self, product: ExpertProduct, activations: str) -> Any:
        x = product.x.source
        ids, biases = _beside(product.ids, x), _beside(product.biases, x)
        return experts.multiply(self.kernels, x.detach(), product.weights, ids, biases, x.dtype)

    def experts(self, block: ExpertBlock, activations: str) -> Any:
        x = block.x.source
        return experts.block(
            partial(experts.multiply, self.kernels),
            experts.open_gate,
            x.detach(),
            _beside(block.ids, x),
            _beside(block.routing, x),
            block.gate_up,
            [_beside(biases, x) for biases in block.gate_up_biases],
            block.down,
            _beside(block.down_biases, x),
            block.activation,
        )

    def dequantize(self, tensor: QuantizedTensor, out: Input) -> None:
        weights = tensor.made((self.name, out.place), lambda: self.pack(tensor, out.place))
        out.source.copy_(self.kernels.dequantize(weights, out.source.dtype))


def _beside(array: Input | None, x: Any) -> Any:
    """An argument as a tensor where x is."""
    if array is None:
        return None
    source = array.source if array.kind == "torch" else TORCH.from_numpy(np.array(array.numpy()))
    return source.detach().to(x.device)
