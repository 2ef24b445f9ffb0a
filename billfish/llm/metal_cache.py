"""What an Apple GPU keeps of a sequence: keys and values, and the states of recurrent layers.

MLX's arrays do not change, so a state that somebody holds stays what it was, and a checkpoint is a reference. Keys and
values are written in place, as nobody else holds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from billfish.core.typing import CacheType
from billfish.llm.kv_cache import Cache
from billfish.llm.recurrent_checkpoints import Checkpoints, places
from billfish.models.description import Attention, Model

STEP = 256  # positions by which a cache grows


class KeysAndValues(NamedTuple):
    """Of one layer, [2, KV heads, room, head size]: keys, then values. They begin at position `first`."""

    both: mx.array
    first: int = 0

    def holds(self, positions: int, window: int) -> bool:
        """Whether a token behind so many positions finds all that it attends to."""
        return self.first <= max(0, positions - window + 1) if window else self.first == 0

    def with_rows(self, start: int, rows: mx.array, window: int) -> KeysAndValues:
        """With those [2, KV heads, count, head size] of further tokens at positions from `start` on. A layer with a
        window lets go of what no later token sees."""
        end = start + rows.shape[2]
        held = self.with_room(start, end, window)
        held.both[:, :, start - held.first : end - held.first] = rows.astype(held.both.dtype)
        return held

    def with_room(self, start: int, end: int, window: int) -> KeysAndValues:
        """The positions before `start`, and room for those up to `end`."""
        if end - self.first <= self.both.shape[2]:
            return self
        first = max(self.first, start - window + 1) if window else self.first
        more = STEP if first > self.first else 0  # so that not every token moves the window
        kept = self.both[:, :, first - self.first : start - self.first]
        _, heads, count, width = kept.shape
        behind = -(-(end - first) // STEP) * STEP + more - count
        return KeysAndValues(mx.concatenate([kept, mx.zeros((2, heads, behind, width), kept.dtype)], axis=2), first)

    def seen(self, end: int, count: int, window: int) -> tuple[mx.array, mx.array]:
        """Keys and values [1, KV heads, positions, head size] that the last `count` of `end` tokens attend to."""
        first = max(self.first, end - count - window + 1) if window else self.first
        keys, values = self.both[:, None, :, first - self.first : end - self.first]
        return keys, values


State = tuple[mx.array, ...]  # of a recurrent layer: what is left of its convolution, and the heads' states
States = Mapping[int, State]  # by layer


class Ahead(NamedTuple):
    """What a decode step has for a sequence that was submitted before anybody asked for it."""

    token: int
    start: int  # its position
    type: mx.Dtype  # of activations
    hidden: mx.array  # behind all layers, of all sequences of the step
    row: int  # which of these is the sequence's
    after: tuple[dict[int, State], ...]  # the recurrent states behind it

    def is_for(self, start: int, tokens: Sequence[int], type: mx.Dtype) -> bool:
        """Whether this is what is asked for."""
        return (self.start, [self.token], self.type) == (start, list(tokens), type)


class MetalCache(Cache):
    """Keys and values of layers with attention, states and checkpoints of recurrent ones."""

    def __init__(self, config: Model, capacity: int = 0, type: CacheType = "float16") -> None:
        super().__init__(config, capacity)
        mixers = dict(enumerate(block.mixer for block in config.blocks))
        self._attention = {i: m for i, m in mixers.items() if isinstance(m, Attention) and m.shares is None}
        self._state_bytes = 4 * sum(m.state_numbers for m in mixers.values() if not isinstance(m, Attention))
        self._capacity, self.type = capacity, type
        self.reset()

    def reset(self) -> None:
        """Hold nothing."""
        self.tokens.clear()
        self.keys: dict[int, KeysAndValues] = {}
        for layer, mixer in self._attention.items():
            empty = np.zeros((2, mixer.kv_heads, 0, mixer.head_size), self.type)  # mx.zeros is bound to this thread
            self.keys[layer] = KeysAndValues(mx.array(empty))
        self.states: States = {}  # none: zeros
        self.position = 0  # behind which the states are
        self.checkpoints: Checkpoints[States] = Checkpoints(self._state_bytes)
        self.ahead: Ahead | None = None

    @property
    def capacity(self) -> int:
        rooms = [held.both.shape[2] for layer, held in self.keys.items() if not self._attention[layer].window]
        return max([self._capacity, len(self.tokens), *rooms])

    @property
    def nbytes(self) -> int:
        arrays = [held.both for held in self.keys.values()]
        arrays += [array for state in self.states.values() for array in state]
        return sum(int(array.nbytes) for array in arrays) + self.checkpoints.nbytes

    def reserve(self, positions: int) -> None:
        """Room is made when tokens come: an Apple GPU's memory is also the computer's."""
        with self.lock:
            self._capacity = max(self._capacity, positions)

    def like(self, capacity: int) -> MetalCache:
        return MetalCache(self.config, capacity, self.type)

    def copy_positions(self, other: Cache, positions: int) -> None:
        assert isinstance(other, MetalCache)
        self.keys = {layer: held._replace(both=mx.array(held.both)) for layer, held in other.keys.items()}
        self.checkpoints = other.checkpoints.until(positions)
        self.states, self.position, self.ahead = other.states_at(positions), positions, None

    def restorable(self, positions: int) -> int:
        def holds(wanted: int) -> bool:
            return all(held.holds(wanted, self._attention[layer].window) for layer, held in self.keys.items())

        if not self._state_bytes or positions == self.position:
            return positions if holds(positions) else 0
        found = self.checkpoints.last_until(positions)
        return found.position if found is not None and holds(found.position) else 0

    @property
    def is_recurrent(self) -> bool:
        return self._state_bytes > 0

    def take(self, tokens: list[int], cuts: Sequence[int], after: Sequence[States], message_ends: set[int]) -> None:
        """Hold further tokens, whose keys are here. after: the recurrent states behind each of `cuts` of them."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        if self.is_recurrent:
            wanted = set(places(start, len(tokens), message_ends))
            for position, states in zip((start + cut for cut in cuts), after, strict=True):
                if position in wanted:
                    self.checkpoints.add(position, states, position in message_ends)
            self.states, self.position = after[-1], len(self.tokens)

    def begin_pass(self, start: int) -> States:
        """The recurrent states behind the first `start` tokens. Later checkpoints, and keys where the sequence begins
        again, are let go, as is a step ahead."""
        self.ahead = None
        if start == 0:
            self.keys = {layer: held._replace(first=0) for layer, held in self.keys.items()}
        states = self.states_at(start)
        self.checkpoints.forget_behind(start)
        return states

    def states_at(self, position: int) -> States:
        if not self._state_bytes or position == 0:
            return {}
        return self.states if position == self.position else self.checkpoints.at(position)
