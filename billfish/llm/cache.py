"""The keys and values of a text, which a decoder need not compute again."""

from __future__ import annotations

from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cpu import _cpu
from billfish.errors import DataError, complaint
from billfish.llm.config import Config

Floats = NDArray[np.float32]
MOST_POSITIONS = 1 << 30


class Cache:
    """Keys and values of one text, for all layers. `tokens` are the ones whose keys and values are in it.

    It belongs to the model that made it. Generations may share it, also in several threads: each brings it to its own
    text before a step, and holds `lock` meanwhile. A text that another generation has replaced is fed again.
    """

    def __init__(self, config: Config, capacity: int = 256) -> None:
        self.config = config
        self.lock = RLock()
        self.tokens: list[int] = []
        # One attribute for both: whatever interrupts `reserve`, they are of one capacity.
        self._keys_and_values = self._room(capacity)

    def _room(self, capacity: int) -> tuple[Floats, Floats]:
        if not isinstance(capacity, int) or not 0 <= capacity <= MOST_POSITIONS:
            raise DataError(complaint("llm.Cache", "capacity", repr(capacity), f"a number from 0 to {MOST_POSITIONS}"))
        c, blocks = self.config, -(-capacity // _cpu.KEY_BLOCK)
        keys = np.zeros((c.layers, c.kv_heads, blocks, c.head_size, _cpu.KEY_BLOCK), np.float32)
        return keys, np.zeros((c.layers, c.kv_heads, blocks * _cpu.KEY_BLOCK, c.head_size), np.float32)

    @property
    def keys(self) -> Floats:
        """[layers, heads, blocks, head size, KEY_BLOCK]: positions are innermost, as the kernel reads them."""
        return self._keys_and_values[0]

    @property
    def values(self) -> Floats:
        """[layers, heads, positions, head size]."""
        return self._keys_and_values[1]

    @property
    def capacity(self) -> int:
        """How many positions there is room for."""
        return self.values.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def reserve(self, positions: int) -> None:
        """Make room, doubling, so that a long text is not copied at every token."""
        with self.lock:
            if positions <= self.capacity:
                return
            keys, values = self._room(max(positions, min(2 * self.capacity, self.config.context)))
            keys[:, :, : self.keys.shape[2]], values[:, :, : self.capacity] = self.keys, self.values
            self._keys_and_values = keys, values

    def copy(self) -> Cache:
        """Another one that holds the same: a conversation can go on in two ways."""
        with self.lock:
            other = Cache(self.config, 0)
            other._keys_and_values = self.keys.copy(), self.values.copy()
            other.tokens = list(self.tokens)
        return other

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> Cache:
        return self.copy()


def shared_length(a: list[int], b: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    if a == b:  # at most steps of a generation, and much faster than the loop
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
