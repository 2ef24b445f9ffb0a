"""The product as operators of torch: compilers see one opaque call, and autograd knows its derivative.

`weights` and `form` are `Weights.tensors` and `Weights.form` of a layer (billfish.nn.torch.weights).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from billfish.backends.cpu.packed import PackedWeights
from billfish.core.activations import check_activations
from billfish.core.errors import DTypeError, bad_argument
from billfish.core.tensor import QuantizedTensor
from billfish.nn.torch.weights import matrix_of
from billfish.ops.matmul import dequantize, quantized_linear

torch.library.define(
    "billfish::linear",
    "(Tensor x, Tensor[] weights, Tensor? bias, str format, int group_size, int n, str activations, str form)"
    " -> Tensor",
)
torch.library.define(
    "billfish::dequantize", "(Tensor[] weights, str format, int group_size, int n, int k, str form) -> Tensor"
)
DEVICES = ("cpu", "cuda", "mps")
KERNELS: dict[str, Callable[..., Any]] = {}  # what operators do, by name
Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def operator_kernel(name: str) -> Callable[[Kernel], Kernel]:
    """Function decorator: this is what the operator does, on every device."""

    def register(function: Kernel) -> Kernel:
        KERNELS[name] = function
        torch.library.impl(name, DEVICES, lambda *arguments: KERNELS[name](*arguments))
        return function

    return register


LINEAR, DEQUANTIZE = torch.ops.billfish.linear.default, torch.ops.billfish.dequantize.default


@operator_kernel("billfish::linear")
def _linear(
    x: Tensor,
    weights: list[Tensor],
    bias: Tensor | None,
    format: str,
    group_size: int,
    n: int,
    activations: str,
    form: str,
) -> Tensor:
    matrix = matrix_of(weights, format, (n, x.shape[-1]), group_size, form)
    return quantized_linear(x, matrix, bias=bias, activations=check_activations("MarlinLinear", activations))


@torch.library.register_fake("billfish::linear")  # type: ignore[untyped-decorator]
def _linear_fake(x: Tensor, weights: Any, bias: Any, format: str, group_size: int, n: int, *rest: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)


@operator_kernel("billfish::dequantize")
def _dequantize(weights: list[Tensor], format: str, group_size: int, n: int, k: int, form: str) -> Tensor:
    matrix = matrix_of(weights, format, (n, k), group_size, form)
    return decode(matrix, torch.empty(n, k, device=weights[0].device))


def decode(matrix: Any, out: Tensor) -> Tensor:
    """The numbers of a layer's matrix into `out`, columns in stored order."""
    if isinstance(matrix, PackedWeights):
        about = matrix.format, matrix.shape, matrix.group_size
        matrix = QuantizedTensor.packed_only(*about, {("cpu", "cpu"): matrix})
    return dequantize(matrix, out=out)


@torch.library.register_fake("billfish::dequantize")  # type: ignore[untyped-decorator]
def _dequantize_fake(weights: list[Tensor], format: str, group_size: int, n: int, k: int, form: str) -> Tensor:
    return weights[0].new_empty(n, k, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.weights, bias, ctx.format, ctx.group_size, ctx.out_features, _, ctx.form = inputs
    ctx.in_features = x.shape[-1]
    ctx.bias_dtype = None if bias is None else bias.dtype


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """For products with decoded weights, which autocast would round: derivatives may be taken within it."""
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """d/dx is gradient @ W, in float32 on the decoded weights. Integer activations pass gradients straight through."""
    wide = gradient.float()
    for_x = for_bias = None
    if ctx.needs_input_grad[0]:
        shape = ctx.out_features, ctx.in_features
        w = DEQUANTIZE(ctx.weights, ctx.format, ctx.group_size, *shape, ctx.form)
        with without_autocast(gradient.device.type):
            for_x = (wide @ w).to(gradient.dtype)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
        for_bias = wide.reshape(-1, ctx.out_features).sum(0).to(ctx.bias_dtype)
    return for_x, [None] * len(ctx.weights), for_bias, None, None, None, None, None


torch.library.register_autograd("billfish::linear", _backward, setup_context=_keep)


@torch.library.register_vmap("billfish::linear")  # type: ignore[untyped-decorator]
def _vmap(
    info: Any, in_dims: tuple[Any, ...], x: Tensor, weights: list[Tensor], bias: Tensor | None, *rest: Any
) -> Any:
    if in_dims[0] is None or in_dims[2] is not None or any(dim is not None for dim in in_dims[1]):
        raise DTypeError(bad_argument("MarlinLinear", "in_dims of vmap", in_dims, "a batch dimension of x alone"))
    return LINEAR(x.movedim(in_dims[0], 0), weights, bias, *rest), 0
