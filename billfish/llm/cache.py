"""The keys and values of a text, which a decoder need not compute again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.errors import DataError, complaint
from billfish.llm.config import Config

Floats = NDArray[np.float32]
MOST_POSITIONS = 1 << 30


class Cache(ABC):
    """Keys and values of one text, for all layers. `tokens` are the ones whose keys and values are in it.

    A model's `cache()` makes one, and it is that model's alone. Generations may share it, also in several threads: each
    brings it to its own text before a step, and holds `lock` meanwhile. A text that another generation has replaced is
    fed again.
    """

    def __init__(self, config: Config, capacity: int) -> None:
        if not isinstance(capacity, int) or not 0 <= capacity <= MOST_POSITIONS:
            raise DataError(complaint("llm.Cache", "capacity", repr(capacity), f"a number from 0 to {MOST_POSITIONS}"))
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
    def copy(self) -> Cache:
        """Another one that holds the same: a conversation can go on in two ways."""

    def __copy__(self) -> Cache:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Cache:
        return self.copy()


def shared_length(a: list[int], b: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    if a == b:  # at most steps of a generation, and much faster than the loop
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
