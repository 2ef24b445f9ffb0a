"""QuantizedExperts: the matrices of E experts in one format, held as one stack of the bytes that checkpoints store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from billfish.core.errors import DTypeError, FormatError, ShapeError, bad_argument, failure, type_of
from billfish.core.format import Format
from billfish.core.formats import get_format
from billfish.core.storage import Array, Storage
from billfish.core.tensor import Made, QuantizedTensor, made_once, owners, read_only
from billfish.core.typing import FormatLike

CALL = "QuantizedExperts"


@dataclass(frozen=True, eq=False)
class QuantizedExperts:
    """The quantized matrices W [E, N, K] of E experts in one format. :func:`billfish.quantize` makes one of a stack.

    format, group_size: as of QuantizedTensor. shape: (E, N, K).
    storage: the arrays of the format by name, each with a leading axis E; an array without axes, such as nvfp4's scale
    of the whole tensor, is [E].

        >>> q = bf.quantize(np.ones((4, 8, 32), np.float32), "q8_0")
        >>> len(q), q[3]
        (4, QuantizedTensor(q8_0, [8, 32], group_size=32, 272 bytes))
    """

    format: Format
    shape: tuple[int, int, int]
    group_size: int
    storage: Storage
    # As of QuantizedTensor.
    _made: dict[Any, Any] = field(default_factory=dict, repr=False, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.group_size, (int, np.integer)):
            raise FormatError(bad_argument(CALL, "group_size", repr(self.group_size), "an integer"))
        whole_row = self.format.whole_row_groups and self.group_size == self.shape[-1]
        shape, _ = check_stack(CALL, self.format, self.storage, -1 if whole_row else self.group_size)
        if shape != tuple(self.shape):
            raise ShapeError(bad_argument(CALL, "shape", self.shape, f"{shape}, as the storage has"))
        held = {name: read_only(self.storage[name]) for name in self.format.storage_names}
        object.__setattr__(self, "storage", MappingProxyType(held))

    @classmethod
    def from_storage(
        cls, format: FormatLike, storage: Storage, group_size: int | None = None, *, call: str = "from_storage"
    ) -> QuantizedExperts:
        """Wrap arrays in a format's own layout, each [E, ...]; read-only arrays are not copied."""
        format = get_format(format, call)
        shape, group_size = check_stack(call, format, storage, group_size)
        return cls(format, shape, group_size, storage)

    @classmethod
    def owning(cls, format: Format, shape: tuple[int, int, int], group_size: int, storage: Storage) -> QuantizedExperts:
        """Of arrays that nobody else holds: they become read-only and are not copied."""
        for array in storage.values():
            for owner in owners(array):
                owner.setflags(write=False)
        return cls(format, shape, group_size, storage)

    @classmethod
    def borrowing(
        cls, format: FormatLike, storage: Storage, group_size: int | None = None, *, call: str = "from_storage"
    ) -> QuantizedExperts:
        """As of QuantizedTensor: of arrays that their owner may change."""
        format = get_format(format, call)
        shape, group_size = check_stack(call, format, storage, group_size)
        views = {name: storage[name].view() for name in format.storage_names}
        for view in views.values():
            view.setflags(write=False)
        stack = cls.__new__(cls)
        fields = {"format": format, "shape": shape, "group_size": group_size, "storage": MappingProxyType(views)}
        for name, value in {**fields, "_made": {}}.items():
            object.__setattr__(stack, name, value)
        return stack

    @classmethod
    def from_tensors(cls, tensors: Sequence[QuantizedTensor]) -> QuantizedExperts:
        """A stack of matrices of one format, group size and shape, in the order of the experts."""
        call = "QuantizedExperts.from_tensors"
        if not tensors:
            raise ShapeError(bad_argument(call, "tensors", "empty", "one QuantizedTensor for each expert"))
        first = tensors[0]
        for e, tensor in enumerate(tensors):
            if not isinstance(tensor, QuantizedTensor):
                raise DTypeError(bad_argument(call, f"tensors[{e}]", type_of(tensor), "a QuantizedTensor"))
            if tensor.permutation is not None:
                problem = f"tensors[{e}] has a permutation (act-order), which a stack of experts cannot store"
                raise FormatError(failure(call, problem, "Quantize it without act-order."))
            if _kind(tensor) != _kind(first):
                raise ShapeError(bad_argument(call, f"tensors[{e}]", _kind(tensor), f"{_kind(first)}, as tensors[0]"))
        storage = {name: np.stack([t.storage[name] for t in tensors]) for name in first.format.storage_names}
        return cls.owning(first.format, (len(tensors), *first.shape), first.group_size, storage)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, expert: int) -> QuantizedTensor:
        """The matrix [N, K] of one expert, on the same memory."""
        e = range(len(self))[expert]  # raises IndexError, and counts from the end as lists do
        views = {name: array[e, ...] for name, array in self.storage.items()}
        return QuantizedTensor(self.format, self.shape[1:], self.group_size, views)

    def __iter__(self) -> Iterator[QuantizedTensor]:
        return (self[e] for e in range(len(self)))

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return sum(array.nbytes for array in self.storage.values())

    @property
    def bits_per_weight(self) -> float:
        """Bits of storage for each weight."""
        experts, n, k = self.shape
        return 8 * self.nbytes / (experts * n * k)

    def take_rows(self, rows: Any) -> QuantizedExperts:
        """W[:, rows], the same rows of every expert, by moving storage."""
        specs, rows = self.format.storage_spec(*self.shape[1:], self.group_size), np.asarray(rows)
        taken = {}
        for name, array in self.storage.items():
            axis = specs[name].n_axis
            taken[name] = array if axis is None else np.take(array, rows, axis=1 + axis)
        return QuantizedExperts(self.format, (len(self), len(rows), self.shape[2]), self.group_size, taken)

    def take_experts(self, ids: Any) -> QuantizedExperts:
        """W[ids]: a stack of these experts, by moving storage; a slice moves nothing."""
        chosen = ids if isinstance(ids, slice) else np.asarray(ids)
        taken = {name: array[chosen] for name, array in self.storage.items()}
        count = len(next(iter(taken.values())))
        return QuantizedExperts(self.format, (count, *self.shape[1:]), self.group_size, taken)

    def made(self, key: Any, make: Callable[[], Made]) -> Made:
        """As of QuantizedTensor: what `make` gives, made at the first call with this key and kept."""
        return made_once(self._made, key, make)

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        return f"QuantizedExperts({self.format.name}, [{sizes}], group_size={self.group_size}, {self.nbytes} bytes)"

    def __reduce__(self) -> Any:
        """Pickles have the storage, and nothing that was made of it."""
        return QuantizedExperts.owning, (self.format, self.shape, self.group_size, dict(self.storage))

    def __copy__(self) -> QuantizedExperts:
        """The same read-only arrays, and nothing that was made of them."""
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedExperts:
        return replace(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        raise TypeError("QuantizedExperts is not an array. Use billfish.dequantize(experts, dtype=...).")


def _kind(tensor: QuantizedTensor) -> str:
    """Describe what all matrices of a stack must share. (np.stack would change types that differ.)"""
    types = ", ".join(f"{name} {array.dtype}" for name, array in tensor.storage.items())
    return f"{tensor.format.name} {tensor.shape} in groups of {tensor.group_size} ({types})"


def check_stack(
    call: str, format: Format, storage: Storage, group_size: int | None
) -> tuple[tuple[int, int, int], int]:
    """((E, N, K), group_size) of a stack; raises if its arrays are not the format's. Each is looked at once for all."""
    for name, array in storage.items():
        if not isinstance(array, np.ndarray):
            raise DTypeError(bad_argument(call, name, type_of(array), "an array"))
        if array.ndim == 0 or array.shape[0] == 0:
            raise ShapeError(bad_argument(call, f"shape of {name}", array.shape, "[E, ...] with E > 0"))
    experts = next((array.shape[0] for array in storage.values()), 0)
    for name, array in storage.items():
        if array.shape[0] != experts:
            expected = f"[{experts}, ...], as the first array"
            raise ShapeError(bad_argument(call, f"shape of {name}", array.shape, expected))
    first = {name: array[0, ...] for name, array in storage.items()}
    n, k, group_size = format.check_storage(call, first, group_size)
    return (experts, n, k), group_size
