"""Weights that come as loose arrays, `quantized_linear(x, packed, scales)`, packed for a backend once.

The arrays are the caller's, who may write to them. What was packed is kept as long as the first array lives, and is
used again only while a digest of all arrays is the same. A digest reads the arrays at the speed of memory, which takes
a twentieth of the time of packing. Arrays that nobody can write to need none.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from billfish.backends import Backend
from billfish.backends.cpu import _cpu
from billfish.core.arrays import Input
from billfish.core.storage import Array
from billfish.core.tensor import QuantizedTensor, owners


class Loose:
    """Arrays of one matrix, and how they are to be read: as good as a QuantizedTensor for a product."""

    permutation = None

    def __init__(self, tensor: QuantizedTensor, first: Any) -> None:
        """tensor: borrowing the arrays. first: the caller's own array of codes."""
        self.tensor, self.first = tensor, first
        self.format, self.shape, self.group_size = tensor.format, tensor.shape, tensor.group_size

    def packed_for(self, backend: Backend, x: Input) -> Any:
        """The weights as the backend wants them beside x."""
        key = (self.format.name, self.group_size, backend.name, x.place)
        kept = _kept.setdefault(ByIdentity(self.first, _forget), {})
        digest = content(self.tensor.storage)
        known = kept.get(key)
        if known is None or known[0] != digest:
            known = kept[key] = digest, backend.pack(self.tensor, x.place)
        return known[1]


class ByIdentity(weakref.ref[Any]):
    """A key that stands for one object, whatever it equals, and does not keep it alive."""

    __slots__ = ("number",)
    number: int

    def __new__(cls, value: Any, callback: Any) -> ByIdentity:
        key = super().__new__(cls, value, callback)
        key.number = id(value)
        return key

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        mine = self()
        return mine is not None and isinstance(other, ByIdentity) and mine is other()


_kept: dict[ByIdentity, dict[Any, tuple[Any, Any]]] = {}


def _forget(key: Any) -> None:
    _kept.pop(key, None)


def content(storage: Mapping[str, Array]) -> tuple[Any, ...]:
    """What tells other contents of the arrays apart. The first array is known already if nobody can write to it."""
    first, *others = storage.values()
    writable = any(owner.flags.writeable for owner in owners(first))
    return tuple((a.shape, a.dtype.str, _digest(a)) for a in ([first] if writable else []) + others)


def _digest(array: Array) -> int:
    return _cpu.digest(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
