"""The arrays that a format stores a matrix W [N, K] in: how each is called, typed and shaped, and where n and k lie.

A format declares :class:`StoragePart`; everything that makes, checks, cuts or sizes storage asks the
:class:`ArraySpec` that comes of a part for one matrix, and needs to know nothing else about the format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import DTypeError, ShapeError, bad_argument, type_of

Array = NDArray[Any]
# The arrays as checkpoints hold them, by the names of their parts.
Storage = Mapping[str, Array]


class StoragePart(NamedTuple):
    """One array of a format's storage, for matrices of any size."""

    name: str
    dtypes: tuple[np.dtype[Any], ...]  # the first is what quantizing makes; checkpoints may have the others
    axes: str = ""  # "nk": [N, ...K]; "kn": [...K, N]; "": one number for the whole tensor
    run: int = 0  # how many k a step along K holds; 0: a group
    items: int = 1  # how many items of the array a step takes
    like: str = ""  # another part, whose type this one must have

    def spec(self, n: int, k: int, group_size: int) -> ArraySpec:
        """The array for a matrix [n, k]. The last step may be partial."""
        if not self.axes:
            return ArraySpec(self.name, self.dtypes, (), None, None, 0, 1)
        run = self.run or group_size
        along_k = -(-k // run) * self.items
        shape = tuple(n if axis == "n" else along_k for axis in self.axes)
        return ArraySpec(self.name, self.dtypes, shape, self.axes.index("n"), self.axes.index("k"), run, self.items)


class ArraySpec(NamedTuple):
    """One array of the storage of a matrix [N, K]."""

    name: str
    dtypes: tuple[np.dtype[Any], ...]
    shape: tuple[int, ...]
    n_axis: int | None
    k_axis: int | None
    run: int  # a step along `k_axis` holds so many k,
    items: int  # in so many items

    @property
    def dtype(self) -> np.dtype[Any]:
        """What quantizing makes."""
        return self.dtypes[0]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def zeros(self) -> Array:
        """An array of zeros that takes no memory."""
        return np.broadcast_to(np.zeros((), self.dtype), self.shape)

    def cut(self, array: Array, rows: slice | Array | None = None, columns: slice | None = None) -> Array:
        """W[rows, columns]: rows are a slice or indices, columns a slice whose ends are ends of steps. Of an array with
        axes before the spec's own, such as experts, the same of each."""
        if self.n_axis is None or self.k_axis is None or array.ndim < len(self.shape):
            return array  # too few axes: whoever checks the storage says so
        before = array.ndim - len(self.shape)
        if isinstance(rows, slice):
            array = array[(slice(None),) * (before + self.n_axis) + (rows,)]
        elif rows is not None:
            array = np.take(array, rows, axis=before + self.n_axis)
        if columns is not None:
            along = slice(columns.start // self.run * self.items, -(-columns.stop // self.run) * self.items)
            array = array[(slice(None),) * (before + self.k_axis) + (along,)]
        return array


def check_array(call: str, argument: str, array: object, dtypes: tuple[Any, ...], ndim: int) -> Array:
    """Raises unless `array` is a NumPy array of one of the types and of that many axes."""
    wanted = tuple(np.dtype(dtype) for dtype in dtypes)
    names = " or ".join(map(str, wanted))
    if not isinstance(array, np.ndarray):
        raise DTypeError(bad_argument(call, argument, type_of(array), f"a {names} array"))
    if array.dtype not in wanted:
        raise DTypeError(bad_argument(call, f"dtype of {argument}", array.dtype, names))
    if array.ndim != ndim:
        raise ShapeError(bad_argument(call, f"shape of {argument}", array.shape, f"{ndim} axes"))
    return array
