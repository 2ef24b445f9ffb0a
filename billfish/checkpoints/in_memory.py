"""Tensors in memory, and models made of layers, as a checkpoint: what writes files takes them like any other."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.entry import Description, Entry, MatrixEntry, Span, cut_array
from billfish.checkpoints.safetensors_files import KINDS, TYPES
from billfish.core.arrays import Input
from billfish.core.errors import CheckpointError, DTypeError, bad_argument, failure, type_of
from billfish.core.format import Format, get_format
from billfish.core.quantized_experts import QuantizedExperts
from billfish.core.storage import Array, Storage
from billfish.core.tensor import QuantizedTensor

CALL = "save"
KIND_OF_NAME = {dtype.name: kind for dtype, kind in KINDS.items()}


class HeldPart(NamedTuple):
    """An array of a matrix's storage."""

    name: str
    kind: str
    nbytes: int


class HeldMatrix(MatrixEntry):
    """A quantized matrix or a stack of them; `make` gives it, as a layer may have to unpack its weights first."""

    layout = "memory"

    def __init__(
        self,
        name: str,
        format: Format,
        shape: tuple[int, ...],
        group_size: int,
        act_order: bool,
        make: Callable[[], QuantizedTensor | QuantizedExperts],
    ) -> None:
        n, k = shape[-2:]
        specs, matrices = format.storage_spec(n, k, group_size), math.prod(shape[:-2])
        parts = [HeldPart(f"{name}.{part}", KINDS[spec.dtype], matrices * spec.nbytes) for part, spec in specs.items()]
        super().__init__(name, format.name, shape, group_size, parts, act_order)
        self.group, self.make = group_size, make

    def storage(self, rows: slice, columns: slice) -> tuple[Format, Storage, int]:
        specs = self.format.storage_spec(self.description.shape[-2], self.k, self.group)
        held = self.make().storage
        group = -1 if self.group == self.k and self.format.whole_row_groups else self.group
        return self.format, {part: specs[part].cut(array, rows, columns) for part, array in held.items()}, group

    def stack(self, experts: slice, columns: slice) -> tuple[Format, Storage, int]:
        format, held, group = self.storage(slice(None), columns)
        return format, {part: array[experts] for part, array in held.items()}, group

    def permutation(self) -> NDArray[np.int64] | None:
        made = self.make() if self.description.act_order else None
        order = made.permutation if isinstance(made, QuantizedTensor) else None
        return None if order is None else order.astype(np.int64)


class HeldArray(Entry):
    """An array of NumPy, torch, MLX or CuPy, on whatever device. It is moved when it is read."""

    def __init__(self, name: str, array: Any) -> None:
        given = Input(CALL, name, array)
        kind = KIND_OF_NAME.get(given.dtype_name)
        if kind is None:
            raise DTypeError(bad_argument(CALL, f"dtype of {name}", given.dtype_name, ", ".join(KIND_OF_NAME)))
        _check_memory(given)
        nbytes = int(np.prod(given.shape)) * TYPES[kind][0] // 8
        super().__init__(Description(name, "memory", None, kind, given.shape, None, nbytes), [])
        self.array = array

    def read(self, rows: Span | None = None, columns: Span | None = None, experts: Span | None = None) -> Array:
        given = Input(CALL, self.description.name, self.array)
        if given.device != "cpu":
            moved = self.array.detach().cpu() if given.kind == "torch" else self.array.get()
            given = Input(CALL, self.description.name, moved)
        return cut_array(given.numpy(), rows, columns, experts)


class SavedLayer(Protocol):
    """A quantized layer of a model, as :func:`billfish.save` sees it.

    A module that has such layers says so in a method `saved_layers() -> Mapping[str, SavedLayer]`, by their paths below
    the module: "" for itself. Beside its bias, a layer's arrays in the state dict are what the matrix is made of.
    """

    format: str
    group_size: int
    in_features: int
    out_features: int
    # permutation: [K], of a layer whose columns are in another order (act-order)

    def quantized(self) -> QuantizedTensor: ...

    def weights_key(self) -> Hashable: ...  # equal for layers that share their weights


def checkpoint_of(given: Any, name: str) -> Checkpoint:
    """A model of torch or MLX, tensors by name, or one quantized tensor, as a checkpoint that is called `name`."""
    if isinstance(given, Checkpoint):
        return given
    if isinstance(given, (QuantizedTensor, QuantizedExperts)):
        given = {"weight": given}
    if isinstance(given, Mapping) and not hasattr(given, "named_modules"):  # a Module of MLX is a dict
        entries = {str(key): _entry(str(key), value) for key, value in given.items()}
        return Checkpoint.of_entries(name, _some(entries), {})
    if not hasattr(given, "named_modules"):
        expected = "a torch.nn.Module, an mlx.nn.Module, a QuantizedTensor, or a dict of tensors"
        raise DTypeError(bad_argument(CALL, "model_or_tensors", type_of(given), expected))
    return Checkpoint.of_entries(name, _some(_model_entries(given)), _config(given))


def _some(entries: dict[str, Entry]) -> dict[str, Entry]:
    if not entries:
        raise CheckpointError(bad_argument(CALL, "model_or_tensors", "empty", "at least one tensor"))
    return entries


def _entry(name: str, tensor: Any) -> Entry:
    if not isinstance(tensor, (QuantizedTensor, QuantizedExperts)):
        return HeldArray(name, tensor)
    order = isinstance(tensor, QuantizedTensor) and tensor.permutation is not None
    return HeldMatrix(name, tensor.format, tensor.shape, tensor.group_size, order, lambda: tensor)


# ---- models -------------------------------------------------------------------------------------------------------


def _model_entries(model: Any) -> dict[str, Entry]:
    """A quantized layer's matrix is `LAYER.weight`, whatever arrays hold it; all else has its own name.

    Of tied parameters the first name is taken.
    """
    torch = hasattr(model, "state_dict")
    modules = list(model.named_modules(remove_duplicate=False) if torch else model.named_modules())
    layers: dict[str, SavedLayer] = {}
    for path, module in modules:
        for below, layer in getattr(module, "saved_layers", dict[str, SavedLayer])().items():
            layers[".".join(filter(None, (path, below)))] = layer
    entries: dict[str, Entry] = {}
    seen = set[Hashable]()
    for path, layer in layers.items():
        if layer.weights_key() not in seen:
            seen.add(layer.weights_key())
            matrix = f"{path}.weight" if path else "weight"
            entries[matrix] = _layer_entry(matrix, layer)
    for name, array in (_torch_arrays if torch else _mlx_arrays)(modules, layers).items():
        if _memory(array) not in seen:
            seen.add(_memory(array))
            entries[name] = HeldArray(name, array)
    return entries


def _torch_arrays(modules: Any, layers: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters and buffers of a state dict, without the weights of layers, which it would make."""
    found: dict[str, Any] = {}
    for path, module in modules:
        kept = {name: a for name, a in module._buffers.items() if name not in module._non_persistent_buffers_set}
        arrays = {**module._parameters, **({} if path in layers else kept)}
        found |= {f"{path}.{name}" if path else name: a for name, a in arrays.items() if a is not None}
    return found


def _mlx_arrays(modules: Any, layers: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by their paths, without the weights of layers."""
    root = dict(modules)[""]
    found = sys.modules["mlx.utils"].tree_flatten(root.parameters())
    return {n: a for n, a in found if n.rpartition(".")[0] not in layers or n.rpartition(".")[2] == "bias"}


def _layer_entry(name: str, layer: SavedLayer) -> Entry:
    if str(getattr(layer, "device", "")) == "meta":
        raise DTypeError(failure(CALL, f"the layer {name} is on the device 'meta', without weights", "Load it first."))
    shape = (layer.out_features, layer.in_features)
    order = getattr(layer, "permutation", None) is not None
    return HeldMatrix(name, get_format(layer.format), shape, layer.group_size, order, layer.quantized)


def _check_memory(array: Input) -> None:
    if array.device == "meta":
        problem = f"the tensor {array.argument} is on the device 'meta', without values"
        raise DTypeError(failure(CALL, problem, "Load the model first."))


def _memory(array: Any) -> Hashable:
    """Equal for arrays that are tied. torch may give a tensor out as several objects on the same memory."""
    if hasattr(array, "data_ptr") and array.data_ptr():
        return (array.data_ptr(), tuple(array.shape), array.stride(), array.dtype)
    return id(array)


def _config(model: Any) -> dict[str, Any]:
    """The configuration of a model of transformers, as its config.json has it; {} for other models."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if to_dict is None:
        return {}
    about: dict[str, Any] = json.loads(json.dumps(to_dict(), default=str))
    about["architectures"] = about.get("architectures") or [type(model).__name__]
    return about
