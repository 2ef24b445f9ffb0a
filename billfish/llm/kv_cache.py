"""The keys and values of a text, which a decoder need not compute again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import DataError, ModelError, bad_argument
from billfish.models.description import Model

Floats = NDArray[np.float32]
MOST_POSITIONS = 1 << 30
NO_ADAPTER = -1


class NoRoom(ModelError, MemoryError):
    """Memory ends before a KV cache does."""


class PageCounts(NamedTuple):
    """Pages of all KV caches. shared: of the used ones, those that several sequences have. free: that can be taken."""

    used: int
    shared: int
    free: int


class PagedMemory(ABC):
    """Pages that all caches of a model take from, and give back to."""

    @abstractmethod
    def limit(self, nbytes: int, positions: int) -> int:
        """From now on take at most `nbytes` of the device, and leave some of it. There is room for one sequence of so
        many positions at least, or NoRoom is raised. Returns the limit."""

    @abstractmethod
    def bytes_for(self, positions: int) -> int:
        """Bytes of a sequence that shares nothing."""

    @property
    @abstractmethod
    def bytes_held(self) -> int:
        """Of pages in caches, each page once."""

    @property
    @abstractmethod
    def has_states(self) -> bool:
        """Whether a cache has recurrent states beside its pages, which it takes when it is made."""

    @abstractmethod
    def counts(self) -> PageCounts:
        """How the pages are used."""


class HiddenStates:
    """What the last layer gave for the tokens of a cache, by position; zeros where that was not kept."""

    def __init__(self, width: int) -> None:
        self._rows = np.zeros((0, width), np.float32)

    def put(self, start: int, rows: Floats) -> None:
        """Of tokens from position `start` on."""
        end = start + len(rows)
        if end > len(self._rows):
            grown = np.zeros((max(end, 2 * len(self._rows)), self._rows.shape[1]), np.float32)
            grown[: len(self._rows)] = self._rows
            self._rows = grown
        self._rows[start:end] = rows

    def of(self, first: int, end: int) -> Floats:
        """[end - first, width]"""
        self.put(end, self._rows[:0])
        return self._rows[first:end]


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
        self._adapter = NO_ADAPTER
        self.hidden: HiddenStates | None = None  # of its tokens, for whoever asks to keep them

    @property
    def adapter(self) -> int:
        """The adapter of the decoder whose keys and values these are."""
        return self._adapter

    def adapt(self, adapter: int) -> None:
        """Compute with another adapter from now on. What the cache holds is of no use to it."""
        with self.lock:
            if adapter != self._adapter:
                self.rollback(0)
                self._adapter = adapter

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

    def fits(self, positions: int, count: int, spare: int) -> bool:
        """Whether `make_room` has memory, and would leave some for `spare` positions more."""
        return True

    def make_room(self, positions: int, count: int) -> None:
        """Take memory for so many positions, and for a step that feeds `count` tokens. Raises NoRoom if it ends."""
        self.reserve(max(positions, len(self.tokens) + count))

    def trim(self) -> None:  # noqa: B027  # of most devices, a cache keeps its room
        """Give back memory behind the tokens that are there."""

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
            self.adapt(other.adapter)
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
