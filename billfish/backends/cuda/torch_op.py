"""`torch.ops.billfish.cuda_linear`: the product as an operator that torch.compile and graphs see as one.

An operator takes tensors and numbers, so the weights go by a number; they are found as long as somebody holds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from billfish.backends.cuda.arrays import linear_torch
from billfish.errors import DataError, complaint

if TYPE_CHECKING:
    from billfish.backends.cuda import CudaWeights

_weights: WeakValueDictionary[int, CudaWeights] = WeakValueDictionary()


def handle(weights: CudaWeights) -> int:
    """The number that stands for these weights."""
    number = id(weights)
    _weights[number] = weights
    return number


@torch.library.custom_op(
    "billfish::cuda_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor? bias, int weights, int n, bool batch_invariant, str? activation) -> Tensor",
)
def cuda_linear(
    x: torch.Tensor, bias: torch.Tensor | None, weights: int, n: int, batch_invariant: bool, activation: str | None
) -> torch.Tensor:
    held = _weights.get(weights)
    if held is None:
        raise DataError(complaint("cuda_linear", "weights", weights, "the handle of weights that are still held"))
    return linear_torch(x, held, bias, batch_invariant, activation)


@cuda_linear.register_fake
def _(x: Any, bias: Any, weights: int, n: int, batch_invariant: bool, activation: str | None) -> Any:
    return x.new_empty((*x.shape[:-1], n))


def linear(
    x: torch.Tensor,
    weights: CudaWeights,
    bias: torch.Tensor | None = None,
    batch_invariant: bool = False,
    activation: str | None = None,
) -> torch.Tensor:
    """activation(x W.T + bias) for a tensor on a GPU: x [..., K] -> [..., N]. activation: relu, silu or gelu."""
    n = weights.tensor.shape[0]
    return cuda_linear(x, bias, handle(weights), n, batch_invariant, activation)
