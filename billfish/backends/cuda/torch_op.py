"""`torch.ops.billfish.cuda_linear`: the product as an operator that torch.compile and graphs see as one.

Its weights are tensors, so a compiled graph holds the memory that it reads.
"""

from __future__ import annotations

from typing import Any

import torch

from billfish.backends.cuda.axes import read_kind
from billfish.backends.cuda.device_weights import BrickInfo, DeviceWeights
from billfish.backends.cuda.memory import as_tensor
from billfish.backends.cuda.products import linear_torch
from billfish.core.torch_modes import is_watched


@torch.library.custom_op(
    "billfish::cuda_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor bricks, Tensor row_scale, Tensor? bias, str kind, int n, bool batch_invariant, "
    'str? activation, str activations="exact") -> Tensor',
)
def cuda_linear(
    x: torch.Tensor,
    bricks: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    n: int,
    batch_invariant: bool,
    activation: str | None,
    activations: str = "exact",
) -> torch.Tensor:
    """activation(x W.T + bias): x [..., K] -> [..., N]. bricks, row_scale: bytes; kind: as `Kind.spelled` spells it."""
    weights = DeviceWeights(BrickInfo(read_kind(kind), (n, x.shape[-1])), bricks, row_scale)
    y: torch.Tensor = linear_torch(x, weights, bias, batch_invariant, activation, activations)
    return y


@cuda_linear.register_fake
def _(x: Any, bricks: Any, row_scale: Any, bias: Any, kind: str, n: int, *rest: Any) -> Any:
    return x.new_empty((*x.shape[:-1], n))


def linear(
    x: torch.Tensor,
    weights: DeviceWeights,
    bias: torch.Tensor | None = None,
    batch_invariant: bool = False,
    activation: str | None = None,
    activations: str = "exact",
) -> torch.Tensor:
    """activation(x W.T + bias) for a tensor on a GPU: x [..., K] -> [..., N]. activation: relu, silu or gelu.

    The dispatch of an operator that is written in Python takes longer than a product does, so a call that nobody
    compiles or watches goes past it.
    """
    if type(x) is torch.Tensor and not torch.compiler.is_compiling() and not is_watched():
        with torch.no_grad():  # as the operator, which has no derivative
            direct: torch.Tensor = linear_torch(x, weights, bias, batch_invariant, activation, activations)
        return direct
    bricks, row_scale = as_tensor(weights.bricks), as_tensor(weights.row_scale)
    kind, n = weights.kind.spelled(), weights.shape[0]
    return cuda_linear(x, bricks, row_scale, bias, kind, n, batch_invariant, activation, activations)
