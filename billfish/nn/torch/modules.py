"""What billfish.nn has to know of torch models: see `billfish.nn.layer_base.Kit`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from billfish.checkpoints.names.expert_stacks import by_stacks
from billfish.nn import layer_base
from billfish.nn.torch.calibration import calibrate
from billfish.nn.torch.expert_layers import (
    MarlinExperts,
    is_experts,
    layer_of_stacks,
    stack_biases,
    stack_bytes,
    stack_shapes,
    why_not,
)
from billfish.nn.torch.linear import MarlinLinear

__all__ = ["calibrate", "layer_of_stacks", "stack_biases", "stack_bytes", "stack_shapes", "why_not"]

layer_type, quantize_experts, stacked = MarlinLinear, MarlinExperts.from_experts, by_stacks


def walk(model: torch.nn.Module) -> layer_base.Walk:
    """The Linear layers of a model, who else holds a weight, and what is quantized already."""
    linears: list[layer_base.Place] = []
    experts: list[layer_base.Place] = []
    others: dict[int, str] = {}
    matrices: dict[str, str] = {}
    quantized: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, child in module._modules.items():
            if isinstance(child, torch.nn.Linear):
                linears.append(layer_base.Place(prefix + name, child, partial(setattr, module, name)))
            elif child is not None and is_experts(child):
                experts.append(layer_base.Place(prefix + name, child, partial(setattr, module, name)))
        if isinstance(module, (MarlinLinear, MarlinExperts)):
            quantized.append(path)
        elif not isinstance(module, torch.nn.Linear):
            own = dict(module.named_parameters(recurse=False))
            others |= {id(p): prefix + name for name, p in own.items()}
            if not is_experts(module) and any(p.ndim > 1 for p in own.values()):
                matrices[path] = type(module).__name__
    return layer_base.Walk(torch.nn.Linear, linears, others, experts, matrices, quantized)


def note_layers(model: torch.nn.Module) -> None:
    """A model of transformers saves layers that were put into it as ours."""
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        from billfish.nn.transformers import note_layers  # here: its models alone need transformers

        note_layers(model)


def parameter_arrays(model: torch.nn.Module) -> dict[str, Tensor]:
    """Everything that a state dict holds, under all its names, but for the weights of quantized layers."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        held = {name: b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for name, tensor in {**module._parameters, **held}.items():
            if tensor is not None:
                found[f"{path}.{name}" if path else name] = tensor
    return found


def set_parameter(model: torch.nn.Module, name: str, value: Tensor) -> None:
    """Write a value into one of them."""
    path, _, own = name.rpartition(".")
    with torch.no_grad():
        getattr(model.get_submodule(path), own).copy_(value)


def place_of(linear: torch.nn.Module) -> dict[str, Any]:
    """Where `from_quantized` is to put the layer that takes the place of `linear`; on the CPU for a meta tensor."""
    device = next(linear.parameters()).device
    return {"device": None if device.type == "meta" else device}


def warm_layers(model: Any, dtype: str, chosen: int) -> Iterator[tuple[object, Callable[[int], None]]]:
    """(What its kernels depend on, a product with so many rows of zeros) of each of our layers."""
    kind = getattr(torch, dtype)

    def linear(layer: MarlinLinear, m: int) -> None:
        features = layer.in_features if layer.features is None else layer.features
        with torch.no_grad():
            layer(torch.zeros(m, features, device=layer.device, dtype=kind))

    def experts(layer: MarlinExperts, m: int) -> None:
        device, hidden = layer.gate_proj.device, layer.gate_proj.shape[2]
        ids = torch.zeros(m, chosen, device=device, dtype=torch.int64)
        x, weights = (torch.zeros(m, size, device=device, dtype=kind) for size in (hidden, chosen))
        with torch.no_grad():
            layer(x, ids, weights)

    for layer in model.modules():
        if isinstance(layer, MarlinLinear):
            yield (layer.device, repr(layer)), partial(linear, layer)
        elif isinstance(layer, MarlinExperts):
            yield (layer.gate_proj.device, repr(layer)), partial(experts, layer)
