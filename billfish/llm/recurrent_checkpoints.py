"""Which recurrent states of a sequence are kept: a recurrent state cannot be cut back to an earlier position."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

EVERY = 64  # positions
MOST_BYTES, LEAST = 256 << 20, 4  # of all checkpoints of a sequence; but so many at least

State = TypeVar("State")


class Checkpoint(NamedTuple, Generic[State]):
    """The states of all recurrent layers behind `position` tokens."""

    position: int
    message_end: bool
    state: State


class Checkpoints(Generic[State]):
    """Checkpoints of a sequence, in order. size: bytes of one. The CPU's are in native code: sequence_state.h has the
    same rules."""

    def __init__(self, size: int, kept: Iterable[Checkpoint[State]] = ()) -> None:
        self._size, self._kept = size, list(kept)

    @staticmethod
    def places(start: int, count: int, message_ends: Iterable[int]) -> list[int]:
        """The positions behind which a checkpoint is made, of `count` tokens that come at positions from `start` on."""
        last = start + count
        regular = range(start - start % EVERY + EVERY, last + 1, EVERY)
        return sorted({*regular, *(end for end in message_ends if start < end <= last)})

    def add(self, position: int, state: State, message_end: bool = False) -> None:
        """Keep a state, and let one go where there are too many.

        That is one whose gap, when it is gone, is small beside its distance from the end: prompts part near their ends,
        so checkpoints are the denser, the later they are. Ends of messages count four times.
        """
        self._kept.append(Checkpoint(position, message_end, state))
        if len(self._kept) <= max(LEAST, MOST_BYTES // max(self._size, 1)):
            return

        def loss(i: int) -> float:
            before = self._kept[i - 1].position if i else 0
            gap = (self._kept[i + 1].position - before) * (4 if self._kept[i].message_end else 1)
            return gap / (position - self._kept[i].position + EVERY)

        del self._kept[min(range(len(self._kept) - 1), key=loss)]

    def forget_behind(self, position: int) -> None:
        """Drop those of later positions, which belong to other tokens now."""
        self._kept = [each for each in self._kept if each.position <= position]

    def last_until(self, position: int) -> Checkpoint[State] | None:
        """The last one that is not behind `position` tokens."""
        return next((each for each in reversed(self._kept) if each.position <= position), None)

    def at(self, position: int) -> State:
        """The state behind so many tokens, which is there."""
        return next(each.state for each in self._kept if each.position == position)

    def until(self, position: int) -> Checkpoints[State]:
        """Another one with those up to a position: sequences with a common beginning share states."""
        return Checkpoints(self._size, (each for each in self._kept if each.position <= position))

    @property
    def nbytes(self) -> int:
        return len(self._kept) * self._size
