"""warm_up: what the first products of a model would wait for, before somebody waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from billfish.core.arrays import float_dtype
from billfish.core.errors import ShapeError, complaint
from billfish.core.typing import FloatType
from billfish.nn.layer_base import layer_class

CALL = "warm_up"
Multiply = Callable[[int], None]  # so many rows of zeros with one layer


class WarmUp(NamedTuple):
    """What warm_up did: with how many `layers`, in how many `products`, in how many `seconds`."""

    layers: int
    products: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.layers} layers, {self.products} products, {self.seconds:.1f} s"


def warm_up(
    model: Any, *, rows: Sequence[int] = (1, 8, 64, 512), dtype: FloatType = "float16", chosen: int = 2
) -> WarmUp:
    """Pack the weights of a model's quantized layers and compile the kernels for them, where the layers are.

    A GPU's kernels are compiled at their first use: by macOS (MLX, and torch on mps) or by NVRTC (torch on cuda). Each
    layer multiplies a row of zeros, so that its weights are packed. The first layer of each format and size multiplies
    as many rows as `rows` says, too: other numbers of rows may take other kernels.

    model: a torch.nn.Module or an mlx.nn.Module, a single layer or one with layers in it.
    rows: of x; 1 is a step of generation, many are a prompt.
    dtype: of x. Each type has kernels of its own.
    chosen: of layers of experts, how many experts each row has.
    """
    if not rows or any(not isinstance(m, int) or m < 1 for m in rows):
        raise ShapeError(complaint(CALL, "rows", rows, "positive integers, such as (1, 8, 64, 512)"))
    name = float_dtype(CALL, dtype).name
    layers = torch_layers if layer_class(CALL, model).kind == "torch" else mlx_layers
    started, seen, found, products = time.perf_counter(), set(), 0, 0
    for kind, multiply in layers(model, name, chosen):
        wanted = (1,) if kind in seen else (1, *(m for m in rows if m != 1))
        for m in wanted:
            multiply(m)
        seen.add(kind)
        found, products = found + 1, products + len(wanted)
    return WarmUp(found, products, time.perf_counter() - started)


def torch_layers(model: Any, dtype: str, chosen: int) -> Iterator[tuple[object, Multiply]]:
    """(What its kernels depend on, how to multiply) of each of our layers."""
    import torch

    from billfish.nn.torch.expert_layers import MarlinExperts
    from billfish.nn.torch.linear import MarlinLinear

    def zeros(*shape: int, device: torch.device, kind: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, device=device, dtype=kind)

    def linear(layer: MarlinLinear, m: int) -> None:
        features = layer.in_features if layer.all_features is None else layer.all_features
        with torch.no_grad():
            layer(zeros(m, features, device=layer.device, kind=getattr(torch, dtype)))

    def experts(layer: MarlinExperts, m: int) -> None:
        device, hidden = layer.gate_proj.device, layer.gate_proj.shape[2]
        ids = zeros(m, chosen, device=device, kind=torch.int64)
        x, weights = (zeros(m, size, device=device, kind=getattr(torch, dtype)) for size in (hidden, chosen))
        with torch.no_grad():
            layer(x, ids, weights)

    for layer in model.modules():
        if isinstance(layer, MarlinLinear):
            yield (layer.device, repr(layer)), partial(linear, layer)
        elif isinstance(layer, MarlinExperts):
            yield (layer.gate_proj.device, repr(layer)), partial(experts, layer)


def mlx_layers(model: Any, dtype: str, chosen: int) -> Iterator[tuple[object, Multiply]]:
    """As `torch_layers`."""
    import mlx.core as mx

    from billfish.nn.mlx.expert_layers import MarlinSwitchLinear
    from billfish.nn.mlx.linear import MarlinLinear

    def multiply(layer: Any, m: int) -> None:
        if isinstance(layer, MarlinSwitchLinear):
            x = mx.zeros((m, 1, 1, layer.in_features), getattr(mx, dtype))
            mx.eval(layer(x, mx.zeros((m, chosen), mx.uint32)))
        else:
            mx.eval(layer(mx.zeros((m, layer.in_features), getattr(mx, dtype))))

    for layer in model.modules():
        if isinstance(layer, MarlinLinear):
            yield repr(layer), partial(multiply, layer)
