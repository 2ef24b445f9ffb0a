"""load_into: a checkpoint of any layout into a torch or MLX model, quantized matrices as MarlinLinear."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from billfish.checkpoints import Checkpoint, open_checkpoint
from billfish.checkpoints.names.gguf_names import by_model_names
from billfish.core.arrays import ADAPTERS
from billfish.core.errors import CheckpointError, bad_argument, failure
from billfish.core.progress import Progress
from billfish.core.tensor import QuantizedTensor
from billfish.core.typing import Activations
from billfish.nn.layer_base import Place, Walk, kit_of
from billfish.nn.quantize_model import ModelReport, Replaced
from billfish.ops.matmul import dequantize


def load_into(
    model: Any,
    source: Checkpoint | str | os.PathLike[str],
    *,
    rename: Callable[[str], str] | None = None,
    activations: Activations = "exact",
    strict: bool = True,
    progress: bool = True,
) -> ModelReport:
    """Load a checkpoint into a torch or MLX model, in place and without changing a bit of its quantized weights.

    model: a torch.nn.Module or an mlx.nn.Module. Each Linear whose matrix the checkpoint has in a quantized format
    becomes a MarlinLinear, and quantized experts become layers of stacks, whether the checkpoint has them as stacks or
    one by one. Everything else is loaded unquantized, embeddings too.
    source: what :func:`billfish.open_checkpoint` takes, or returned. GGUF names are translated to those of
    transformers and mlx-lm.
    rename: from the model's name of a parameter to the checkpoint's, such as lambda name: "model." + name.
    activations: as in :func:`billfish.quantized_linear`, for the layers.
    strict: whether it is an error if the model has no place for a tensor of the checkpoint, or the checkpoint has a
    quantized matrix without the bias that the model's layer has. If not, such a layer keeps its own bias.
    progress: whether to draw a bar on terminals.

    Returns a ModelReport. Raises CheckpointError for a checkpoint that does not fit; the model is then as it was,
    unless the file itself turns out to be damaged.

        >>> import torch
        >>> arrays = {"0.weight": bf.quantize(np.ones((8, 64), np.float32), "q8_0"), "0.bias": np.zeros(8, np.float32)}
        >>> saved = bf.save(arrays, "weights.safetensors", progress=False)
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 8))
        >>> report = bf.load_into(model, "weights.safetensors", progress=False)
        >>> round(model(torch.ones(1, 64))[0, 0].item())
        64
    """
    weights = by_model_names(source if isinstance(source, Checkpoint) else open_checkpoint(source))
    rename = rename or (lambda name: name)
    kit = kit_of("load_into", model)
    adapter = next(adapter for adapter in ADAPTERS if adapter.kind == kit.layer_type.kind)
    walk = kit.walk(model)
    weights, experts = _with_stacks(kit, walk, weights, rename)
    linears = [place for place in walk.linears if _is_matrix(weights, rename(f"{place.path}.weight"))]
    arrays = kit.parameter_arrays(model)
    numbers = _numbers(arrays, {place.path for place in (*linears, *experts)}, weights, rename)
    paths = [*(place.path for place in linears), *(p for place in experts for p in kit.stack_shapes(*place[:2]))]
    used = {rename(f"{path}.{part}") for path in paths for part in ("weight", "bias")} | set(numbers.values())
    spare = sorted(weights.keys() - used)
    if spare and strict:
        problem = f"the model has no layer for {len(spare)} tensors of the checkpoint, such as {spare[0]!r}"
        raise CheckpointError(failure("load_into", problem, "Pass strict=False to ignore them."))
    for own, linear, _ in linears:
        _check_layer(weights, rename, own, linear.weight.shape, getattr(linear, "bias", None), strict)
    for path, module, _ in experts:
        for own, shape in kit.stack_shapes(path, module).items():
            _check_layer(weights, rename, own, shape, kit.stack_biases(path, module).get(own), strict)
    for own, theirs in numbers.items():
        _check_shape(theirs, weights.describe(theirs).shape, own, arrays[own].shape)
    report = ModelReport()
    with Progress(len(linears) + len(experts) + len(numbers), "tensors", enabled=progress) as bar:
        for path, module, put in experts:
            bar.advance(1, path)
            stacks, biases = dict[str, Any](), kit.stack_biases(path, module)
            for own in kit.stack_shapes(path, module):
                name, bias_name = (rename(f"{own}.{part}") for part in ("weight", "bias"))
                stacks[own] = weights[name]
                if bias_name in weights:
                    biases[own] = adapter.from_numpy(np.array(weights[bias_name]))
            before = kit.stack_bytes(module)
            layer = kit.layer_of_stacks(module, list(stacks.values()), [biases.get(own) for own in stacks], activations)
            layer.train(model.training)
            put(layer)
            report.replaced.append(Replaced(path, layer.format, layer.group_size, before, layer.storage_bytes))
        for path, linear, put in linears:
            bar.advance(1, path)
            name, bias_name = (rename(f"{path}.{part}") for part in ("weight", "bias"))
            tensor = weights[name]
            assert isinstance(tensor, QuantizedTensor)
            bias = getattr(linear, "bias", None)
            if bias_name in weights:
                bias = adapter.from_numpy(np.array(weights[bias_name]))
            place = kit.place_of(linear)
            layer = kit.layer_type.from_quantized(tensor, bias, activations=activations, **place)
            layer.train(model.training)
            put(layer)
            report.replaced.append(Replaced(path, layer.format, layer.group_size, linear.weight.nbytes, tensor.nbytes))
        for own, theirs in numbers.items():
            bar.advance(1, own)
            tensor = weights[theirs]
            array = np.array(tensor) if isinstance(tensor, np.ndarray) else dequantize(tensor)
            kit.set_parameter(model, own, adapter.from_numpy(array))
    kit.note_layers(model)
    return report


def _with_stacks(
    kit: Any, walk: Walk, weights: Checkpoint, rename: Callable[[str], str]
) -> tuple[Checkpoint, list[Place]]:
    """The checkpoint with all experts as stacks, and their places; as it was, and none, unless all are quantized."""
    stacked = kit.stacked(weights) if walk.experts else weights
    names = [rename(f"{path}.weight") for place in walk.experts for path in kit.stack_shapes(*place[:2])]
    if all(name in stacked and stacked.describe(name).format is not None for name in names):
        return stacked, walk.experts
    return weights, []


def _check_layer(
    weights: Checkpoint, rename: Callable[[str], str], path: str, shape: tuple[int, ...], bias: Any, strict: bool
) -> None:
    """Raises unless the checkpoint has this layer's matrix [N, K] or stack [E, N, K], and its bias, if it has one."""
    name, bias_name = (rename(f"{path}.{part}") for part in ("weight", "bias"))
    _check_shape(name, weights.describe(name).shape, path, shape)
    if bias_name in weights:
        _check_shape(bias_name, weights.describe(bias_name).shape, path, shape[:-1])
    elif strict and bias is not None:
        problem = f"the checkpoint has {name!r} without {bias_name!r}"
        raise CheckpointError(failure("load_into", problem, f"Pass strict=False to keep the bias of {path}."))


def _check_shape(name: str, shape: tuple[int, ...], own: str, wanted: Any) -> None:
    if shape != tuple(wanted):
        raise CheckpointError(bad_argument("load_into", f"shape of {name}", shape, f"{tuple(wanted)} for {own}"))


def _is_matrix(weights: Checkpoint, name: str) -> bool:
    about = weights.describe(name) if name in weights else None
    return about is not None and about.format is not None and len(about.shape) == 2


def _numbers(
    arrays: dict[str, Any], replaced: set[str], weights: Checkpoint, rename: Callable[[str], str]
) -> dict[str, str]:
    """The model's names of what stays numbers, and the checkpoint's. Of arrays with several names one is enough."""
    plain = {name: array for name, array in arrays.items() if name.rpartition(".")[0] not in replaced}
    found = {name: rename(name) for name in plain if rename(name) in weights}
    held = {id(plain[name]) for name in found}
    missing = sorted(name for name, array in plain.items() if id(array) not in held)
    if missing:
        others = f" and {len(missing) - 1} others" if missing[1:] else ""
        problem = f"the checkpoint has no {rename(missing[0])!r}{others}, which the model needs"
        raise CheckpointError(failure("load_into", problem, "Load a checkpoint of this model, or pass rename=."))
    return found
