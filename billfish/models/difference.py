"""How a tensor of a GGUF file differs from the one that transformers has for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]
Numbers = NDArray[np.float32]


@dataclass(frozen=True)
class Values:
    """A function of every number, for plain tensors, and its inverse."""

    to_gguf: Callable[[Numbers], Numbers]
    to_folder: Callable[[Numbers], Numbers]


PLUS_ONE = Values(lambda x: x + np.float32(1), lambda x: x - np.float32(1))
NEGATIVE_EXPONENTIAL = Values(lambda x: -np.exp(x), lambda x: np.log(-x))  # of -a, whose logarithm folders have


@dataclass(frozen=True, eq=False)
class Difference:
    """rows, columns: which row or column of the folder's matrix comes where in GGUF's; None: they are in one order.
    Where a folder has several matrices of GGUF as one, `rows` are those of one of them.
    folder_axis, gguf_axis: where either has an axis of length 1 that the other has not. gguf_groups: a vector that is a
    matrix of so many rows in GGUF; 0: it is not."""

    rows: Order | None = None
    columns: Order | None = None
    values: Values | None = None
    folder_axis: int | None = None
    gguf_axis: int | None = None
    gguf_groups: int = 0

    def shape(self, shape: tuple[int, ...], to_gguf: bool) -> tuple[int, ...]:
        """Of a tensor on the other side."""
        if self.gguf_groups:
            size = math.prod(shape)
            return (self.gguf_groups, size // self.gguf_groups) if to_gguf else (size,)
        dropped, added = (self.folder_axis, self.gguf_axis)[:: 1 if to_gguf else -1]
        if dropped is not None and shape[dropped : dropped + 1] == (1,):
            shape = (*shape[:dropped], *shape[dropped + 1 :])
        return shape if added is None else (*shape[:added], 1, *shape[added:])


SAME = Difference()


def neighbours(rows: int, heads: int) -> Order:
    """The order of rows of q and k where llama.cpp rotates neighbours and transformers the halves of a head: row (head,
    half, i) of transformers is its row (head, i, half)."""
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).ravel()


def tiled(groups: int, heads: int, size: int, before: int = 0) -> Order:
    """The order of `groups * heads` heads of `size` rows where transformers has the heads of a group side by side, and
    llama.cpp the first of all groups, then the second, and so on. The first `before` rows stay."""
    order = np.arange(groups * heads * size).reshape(groups, heads, size).swapaxes(0, 1).ravel()
    return np.concatenate((np.arange(before), before + order))
