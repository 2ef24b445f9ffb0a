"""A block of experts as an operator of torch, as billfish.nn.torch.operator has it for products.

`gate`, `up` and `down` are `Weights.tensors` of the stacks, `forms` their `Weights.form`, and `shapes` those of all
three, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from billfish.backends.cpu.experts import PackedExperts
from billfish.core.activations import check_activations
from billfish.core.mixture import CLAMP, STEEPNESS
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.typing import Gate
from billfish.nn.torch.operator import decode, operator_kernel, without_autocast
from billfish.nn.torch.weights import matrix_of
from billfish.ops.expert_linear import experts

Stack = QuantizedExperts | PackedExperts

ARGUMENTS = (
    "Tensor x, Tensor ids, Tensor routing, Tensor[] gate, Tensor[] up, Tensor[] down,"
    " Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias,"
    " str[] formats, int[] group_sizes, int[] shapes, str[] forms, str activation"
)
torch.library.define("billfish::experts", f"({ARGUMENTS}, str activations) -> Tensor")
torch.library.define("billfish::experts_backward", f"(Tensor gradient, {ARGUMENTS}) -> Tensor[]")
EXPERTS = torch.ops.billfish.experts.default
EXPERTS_BACKWARD = torch.ops.billfish.experts_backward.default


def stacks_of(
    weights: Sequence[Sequence[Tensor]],
    formats: Sequence[str],
    group_sizes: Sequence[int],
    shapes: Sequence[int],
    forms: Sequence[str],
) -> list[Stack]:
    """The three stacks of an operator's arguments."""
    sizes = [tuple(shapes[i : i + 3]) for i in range(0, 9, 3)]
    abouts = zip(weights, formats, sizes, group_sizes, forms, strict=True)
    return [matrix_of(tensors, format, shape, group, form) for tensors, format, shape, group, form in abouts]


def matrix_at(stack: Stack, expert: int) -> Any:
    """The matrix of one expert."""
    return stack.matrix(expert) if isinstance(stack, PackedExperts) else stack[expert]


def run_block(
    x: Tensor,
    ids: Tensor,
    routing: Tensor,
    stacks: Sequence[Any],
    biases: Sequence[Tensor | None],
    activation: Gate,
    activations: str,
) -> Tensor:
    """:func:`billfish.core.quantized_experts` of three stacks with their biases."""
    gate, up, down = stacks
    y: Tensor = experts(
        x,
        (gate, up),
        down,
        ids,
        routing,
        hidden_act=activation,
        gate_up_biases=tuple(biases[:2]),
        down_biases=biases[2],
        activations=check_activations("MarlinExperts", activations),
    )
    return y


@operator_kernel("billfish::experts")
def _experts(
    x: Tensor,
    ids: Tensor,
    routing: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    formats: list[str],
    group_sizes: list[int],
    shapes: list[int],
    forms: list[str],
    activation: Gate,
    activations: str,
) -> Tensor:
    stacks = stacks_of((gate, up, down), formats, group_sizes, shapes, forms)
    return run_block(x, ids, routing, stacks, (gate_bias, up_bias, down_bias), activation, activations)


@torch.library.register_fake("billfish::experts")  # type: ignore[untyped-decorator]
def _experts_fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)  # contiguous, whatever x is


def opened(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """(h, dh/dgate, dh/dup) as core.mixture has h: each is gate * sigmoid(z) * up, of clamped values."""
    g, u, slope_g, slope_u = gate, up, 1.0, 1.0
    if activation == "clamped_silu":
        g, u = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP) + 1
        slope_g, slope_u = (gate <= CLAMP).float(), (up.abs() <= CLAMP).float()  # type: ignore[assignment]
        z, slope = STEEPNESS * g, torch.full_like(g, STEEPNESS)
    elif activation == "gelu":
        factor = math.sqrt(8 / math.pi)
        z, slope = factor * (g + 0.044715 * g**3), factor * (1 + 3 * 0.044715 * g**2)
    else:
        z, slope = g, torch.ones_like(g)
    s = z.sigmoid()
    return g * s * u, (s + g * s * (1 - s) * slope) * u * slope_g, g * s * slope_u


@operator_kernel("billfish::experts_backward")
def _gradients(gradient: Tensor, *arguments: Any) -> list[Tensor]:
    with without_autocast(gradient.device.type):
        return gradients(gradient, *arguments)


def gradients(
    gradient: Tensor,
    x: Tensor,
    ids: Tensor,
    routing: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    formats: list[str],
    group_sizes: list[int],
    shapes: list[int],
    forms: list[str],
    activation: str,
) -> list[Tensor]:
    """Of x, of the routing weights and of the biases that there are: in float32, on decoded weights, by expert."""
    stacks = stacks_of((gate, up, down), formats, group_sizes, shapes, forms)
    biases = gate_bias, up_bias, down_bias
    for_x, for_routing = torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(routing, dtype=torch.float32)
    for_biases = [None if bias is None else torch.zeros_like(bias, dtype=torch.float32) for bias in biases]
    for e in torch.unique(ids).tolist():
        t, j = (ids == e).nonzero(as_tuple=True)
        w_gate, w_up, w_down = (
            decode(matrix_at(stack, e), torch.empty(stack.shape[1:], device=x.device)) for stack in stacks
        )
        b_gate, b_up, b_down = (0 if bias is None else bias[e].float() for bias in biases)
        rows, wide = x[t].float(), gradient[t].float()
        h, by_gate, by_up = opened(rows @ w_gate.T + b_gate, rows @ w_up.T + b_up, activation)
        for_routing[t, j] = (wide * (h @ w_down.T + b_down)).sum(-1)
        back = wide * routing[t, j, None].float()
        for_h = back @ w_down
        parts = for_h * by_gate, for_h * by_up, back
        for_x.index_add_(0, t, parts[0] @ w_gate + parts[1] @ w_up)
        for total, part in zip(for_biases, parts, strict=True):
            if total is not None:
                total[e] = part.sum(0)
    given = [bias for bias in biases if bias is not None]
    totals = [total.to(bias.dtype) for total, bias in zip((t for t in for_biases if t is not None), given, strict=True)]
    return [for_x.to(x.dtype), for_routing.to(routing.dtype), *totals]


@torch.library.register_fake("billfish::experts_backward")  # type: ignore[untyped-decorator]
def _gradients_fake(
    gradient: Tensor, x: Tensor, ids: Tensor, routing: Tensor, gate: Any, up: Any, down: Any, *rest: Any
) -> list[Tensor]:
    return [torch.empty_like(x), torch.empty_like(routing), *(torch.empty_like(b) for b in rest[:3] if b is not None)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ids, routing, *ctx.weights = inputs[:6]
    ctx.biases, ctx.about = inputs[6:9], inputs[9:-1]
    ctx.save_for_backward(x, ids, routing)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, ids, routing = ctx.saved_tensors
    for_x, for_routing, *rest = EXPERTS_BACKWARD(gradient, x, ids, routing, *ctx.weights, *ctx.biases, *ctx.about)
    left = iter(rest)
    for_biases = [None if bias is None else next(left) for bias in ctx.biases]
    for_weights = [[None] * len(tensors) for tensors in ctx.weights]
    return for_x, None, for_routing, *for_weights, *for_biases, *[None] * (len(ctx.about) + 1)


torch.library.register_autograd("billfish::experts", _backward, setup_context=_keep)
