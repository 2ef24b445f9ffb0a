"""The keys and values of a text, which a decoder need not compute again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import DataError, bad_argument
from billfish.models.description import Model

Floats = NDArray[np.float32]
MOST_POSITIONS = 1 << 30


class Cache(ABC):
    """Keys and values of one text, for all layers. `tokens` are the ones whose keys and values are in it.

    A model's `cache()` makes one, and it is that model's alone. Generations may share it, also in several threads: each
    brings it to its own text before a step, and holds `lock` meanwhile. A text that another generation has replaced is
    fed again.
    """

    def __init__(self, config: Model, capacity: int) -> None:
        if not isinstance(capacity, int) or not 0 <= capacity <= MOST_POSITIONS:
            raise DataError(bad_argument("llm.Cache", "capacity", repr(capacity), f"0 to {MOST_POSITIONS}"))
        self.config = config
        self.lock = RLock()
        self.tokens: list[int] = []

    @property
    @abstractmethod
    def capacity(self) -> int:
        """How many positions there is room for."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of keys and values."""

    @abstractmethod
    def reserve(self, positions: int) -> None:
        """Make room for so many positions."""

    @abstractmethod
    def like(self, capacity: int) -> Cache:
        """An empty one of the same model."""

    @abstractmethod
    def copy_positions(self, other: Cache, positions: int) -> None:
        """Take keys and values of the first positions of another cache. There is room for them."""

    def restorable(self, positions: int) -> int:
        """How many of the first `positions` tokens the sequence can go on behind: all of them, or fewer where the state
        of a layer cannot be cut back to any position."""
        return positions

    def rollback(self, positions: int) -> int:
        """Keep the first `positions` tokens, or as many of them as are `restorable`. Returns how many."""
        with self.lock:
            kept = self.restorable(min(positions, len(self.tokens)))
            del self.tokens[kept:]
            return kept

    def begin_as(self, other: Cache, positions: int) -> None:
        """Hold the first `positions` tokens of another cache of this model, and nothing else. They are `restorable`
        there."""
        first, second = sorted((self, other), key=id)  # in one order in all threads
        with first.lock, second.lock:
            self.tokens.clear()
            self.reserve(positions)
            self.copy_positions(other, positions)
            self.tokens += other.tokens[:positions]

    def copy(self) -> Cache:
        """Another one that holds the same: a conversation can go on in two ways."""
        with self.lock:
            other = self.like(self.capacity)
            other.begin_as(self, len(self.tokens))
        return other

    def __copy__(self) -> Cache:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Cache:
        return self.copy()


def shared_length(a: list[int], b: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # lists are compared much faster than tokens in a loop
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
