"""What the layers of every framework share: dispatch, the shapes of storage, and weights that are prepacked once."""

from __future__ import annotations

import atexit
import functools
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.activations import ACTIVATIONS
from billfish.errors import DTypeError, FormatError, ShapeError, complaint
from billfish.format import Format, get_format
from billfish.storage import Storage
from billfish.tensor import QuantizedTensor


class MarlinLinear:
    """A linear layer with quantized weights: y = x @ W.T + bias, x [..., K] -> y [..., N].

    ``bf.MarlinLinear.from_linear(linear, format="fp4", group_size=128)`` gives the layer of the framework that it was
    handed, :class:`billfish.nn.torch.MarlinLinear` or :class:`billfish.nn.mlx.MarlinLinear`, subclasses of this one.
    """

    kind: str  # as in billfish.arrays
    in_features: int
    out_features: int
    format: str
    group_size: int
    activations: str

    @classmethod
    def from_linear(cls, linear: Any, format: str | Format = "fp4", **settings: Any) -> Any:
        """Quantize a torch.nn.Linear or an mlx.nn.Linear; see the framework's class for the settings."""
        return layer_class("from_linear", linear).from_linear(linear, format, **settings)

    def describe(self, bias: bool, act_order: bool) -> str:
        """What a repr says: sizes, format, group and bits."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"
        bits = get_format(self.format).bits_per_weight(self.group_size)
        activations = "" if self.activations == "exact" else f", activations={self.activations}"
        order = ", act_order=True" if act_order else ""
        return f"{sizes}, format={self.format}, group_size={self.group_size}, bits={bits:g}{activations}{order}"


class Place(NamedTuple):
    """A Linear layer in a model, and how to put another module in its place."""

    path: str
    linear: Any
    put: Callable[[Any], None]


class Walk(NamedTuple):
    """What quantize_model needs to know about a model, whatever its framework."""

    linear_type: Any
    linears: list[Place]
    others: dict[int, str]  # id of a weight that something else than a Linear holds -> the path of that


def layer_class(call: str, module: object) -> Any:
    """Our layer for the framework that a module belongs to, which must have been imported by somebody already."""
    torch, mlx = sys.modules.get("torch"), sys.modules.get("mlx.nn")
    if torch is not None and isinstance(module, torch.nn.Module):
        from billfish.nn.torch import MarlinLinear as TorchLinear

        return TorchLinear
    if mlx is not None and isinstance(module, mlx.Module):
        from billfish.nn.mlx import MarlinLinear as MlxLinear

        return MlxLinear
    raise DTypeError(complaint(call, "module", f"a {type(module).__name__}", "a torch.nn.Module or an mlx.nn.Module"))


def check_activations(call: str, activations: str) -> str:
    """Raises unless there is such a kind of activations."""
    if activations not in ACTIVATIONS:
        raise FormatError(complaint(call, "activations", repr(activations), " or ".join(map(repr, ACTIVATIONS))))
    return activations


def check_weights(call: str, tensor: Any, bias: Any, permutation: Any) -> NDArray[np.int32] | None:
    """Raises unless a layer can be made of these. The order of the columns: column j multiplies x[..., order[j]]."""
    if not isinstance(tensor, QuantizedTensor):
        raise DTypeError(complaint(call, "tensor", f"a {type(tensor).__name__}", "a QuantizedTensor"))
    n, k = tensor.shape
    if bias is not None and tuple(bias.shape) != (n,):
        raise ShapeError(complaint(call, "bias", f"shape {tuple(bias.shape)}", f"({n},)"))
    if permutation is None:
        return None
    order = np.asarray(permutation)
    if order.shape != (k,) or order.dtype.kind not in "iu" or not np.array_equal(np.sort(order), np.arange(k)):
        got = f"{order.dtype} of shape {order.shape}" + (", not each index once" if order.shape == (k,) else "")
        raise ShapeError(complaint(call, "permutation", got, f"each of 0..{k - 1} once"))
    return order.astype(np.int32)


def empty_weights(
    format: str | Format, n: int, k: int, group_size: int | None, options: dict[str, str]
) -> tuple[str, int, Storage]:
    """The format's name, its group size, and a template of its storage, from what a layer is told."""
    call = "MarlinLinear"
    format = get_format(format, call)
    format.check_k(call, k)
    group_size = format.check_group_size(call, group_size, k)
    return format.name, group_size, storage_template(format, n, k, group_size, format.check_options(call, options))


def storage_template(format: Format, n: int, k: int, group_size: int, options: dict[str, str]) -> Storage:
    """Arrays of zeros in the shapes and types of a matrix [n, k]'s storage, without the memory for it.

    A format says how it stores a matrix by storing one. Here it stores one row and two rows: the axis that grew is N.
    """
    one, two = (
        format.pack(format.quantize(np.zeros((rows, k), np.float32), group_size, "rtn", **options)) for rows in (1, 2)
    )
    return {
        name: np.broadcast_to(
            np.zeros((), array.dtype),
            tuple(n if a != b else a for a, b in zip(array.shape, two[name].shape, strict=True)),
        )
        for name, array in one.items()
    }


@functools.cache
def storage_names(format: str) -> tuple[str, ...]:
    """The names of a format's storage arrays, in the order in which layers hold them."""
    known = get_format(format)
    options = known.check_options("MarlinLinear", {})
    group_size = known.default_group_size
    return tuple(storage_template(known, 1, math.lcm(known.block_size, group_size), group_size, options))


class WeightCache:
    """QuantizedTensors by the identity of a framework's storage arrays: prepacked at first use, forgotten with them.

    Layers hold plain arrays, so that state dicts, copies and moves are the framework's own. What a backend makes of
    the arrays is kept here as long as they live and are not written to.
    """

    def __init__(self, to_numpy: Callable[[Any], NDArray[Any]], stamp: Callable[[Any], int]) -> None:
        self.to_numpy = to_numpy  # must not keep the array itself alive
        self.stamp = stamp  # changes when an array is written to
        self._entries: dict[int, tuple[list[weakref.ref[Any]], list[int], str, int, QuantizedTensor]] = {}
        atexit.register(self._entries.clear)  # before the modules that the entries need are taken down

    def get(self, arrays: Sequence[Any], format: str, group_size: int) -> QuantizedTensor:
        """The tensor with this storage; `arrays` are in the order of :func:`storage_names`."""
        key, stamps = id(arrays[0]), [self.stamp(array) for array in arrays]
        entry = self._entries.get(key)
        if entry is not None:
            references, known_stamps, known_format, known_group_size, tensor = entry
            same = all(reference() is array for reference, array in zip(references, arrays, strict=True))
            if same and (known_stamps, known_format, known_group_size) == (stamps, format, group_size):
                return tensor
        storage = {name: self.to_numpy(array) for name, array in zip(storage_names(format), arrays, strict=True)}
        tensor = QuantizedTensor.from_storage(format, storage, group_size, call="MarlinLinear")
        references = [weakref.ref(array, lambda _: self._entries.pop(key, None)) for array in arrays]
        self._entries[key] = (references, stamps, format, group_size, tensor)
        return tensor

    def __len__(self) -> int:
        return len(self._entries)
