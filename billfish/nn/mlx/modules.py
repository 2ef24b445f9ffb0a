"""What billfish.nn has to know of MLX models: see `billfish.nn.layer_base.Kit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.utils import tree_flatten

from billfish.checkpoints.names.expert_stacks import by_mlx_stacks
from billfish.core.errors import DTypeError, failure
from billfish.nn import layer_base
from billfish.nn.mlx.expert_layers import (
    MarlinSwitchLinear,
    is_switch,
    layer_of_stacks,
    stack_biases,
    stack_bytes,
    stack_shapes,
    why_not,
)
from billfish.nn.mlx.linear import MarlinLinear

__all__ = ["layer_of_stacks", "stack_biases", "stack_bytes", "stack_shapes", "why_not"]

layer_type, quantize_experts, stacked = MarlinLinear, MarlinSwitchLinear.from_switch, by_mlx_stacks


def walk(model: Module) -> layer_base.Walk:
    """The Linear layers of a model, who else holds a weight, and what is quantized already."""
    linears: list[layer_base.Place] = []
    experts: list[layer_base.Place] = []
    others: dict[int, str] = {}
    matrices: dict[str, str] = {}
    quantized: list[str] = []

    def visit(container: Any, path: str) -> None:
        for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
            where = f"{path}.{key}" if path else str(key)
            if isinstance(value, Linear):
                linears.append(layer_base.Place(where, value, partial(container.__setitem__, key)))
            elif is_switch(value):
                experts.append(layer_base.Place(where, value, partial(container.__setitem__, key)))
            elif isinstance(value, MarlinLinear):
                quantized.append(where)
            elif isinstance(value, (dict, list)):  # a Module is a dict
                visit(value, where)
            elif isinstance(value, mx.array):
                others[id(value)] = where
                if value.ndim > 1:
                    matrices[path] = type(container).__name__

    visit(model, "")
    return layer_base.Walk(Linear, linears, others, experts, matrices, quantized)


def note_layers(model: Module) -> None:
    """MLX has no models that save their own configuration."""


def parameter_arrays(model: Module) -> dict[str, mx.array]:
    """All parameters by their paths, but for the weights of quantized layers."""
    found = dict(tree_flatten(model.parameters()))  # type: ignore[no-untyped-call]
    layers = {path for path, module in model.named_modules() if isinstance(module, MarlinLinear)}  # type: ignore[no-untyped-call]
    return {n: a for n, a in found.items() if n.rpartition(".")[0] not in layers or n.endswith("bias")}


def set_parameter(model: Module, name: str, value: mx.array) -> None:
    """Put a value in the place of one of them."""
    model.load_weights([(name, value)], strict=False)


def place_of(linear: Module) -> dict[str, Any]:
    """MLX has one memory."""
    return {}


def calibrate(model: Module, batches: Any, **_: Any) -> Any:
    """Raises: hooks, which see the inputs of layers, are torch's."""
    fix = "Pass statistics= from bf.calibrate_checkpoint."
    raise DTypeError(failure("quantize_model", "calibrate= works with torch models, not with MLX", fix))


def warm_layers(model: Any, dtype: str, chosen: int) -> Iterator[tuple[object, Callable[[int], None]]]:
    """(What its kernels depend on, a product with so many rows of zeros) of each of our layers."""

    def multiply(layer: Any, m: int) -> None:
        if isinstance(layer, MarlinSwitchLinear):
            x = mx.zeros((m, 1, 1, layer.in_features), getattr(mx, dtype))
            mx.eval(layer(x, mx.zeros((m, chosen), mx.uint32)))
        else:
            mx.eval(layer(mx.zeros((m, layer.in_features), getattr(mx, dtype))))

    for layer in model.modules():
        if isinstance(layer, MarlinLinear):
            yield repr(layer), partial(multiply, layer)
