"""Which recurrent states of a sequence are kept: a recurrent state cannot be cut back to an earlier position.

The CPU's are in native code (sequence_state.h), by the same rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

EVERY = 64  # positions
MOST_BYTES, LEAST = 1 << 28, 4  # of all checkpoints of a sequence; but so many at least

State = TypeVar("State")


class Kept(Protocol):
    @property
    def position(self) -> int: ...
    @property
    def message_end(self) -> bool: ...


def places(start: int, count: int, message_ends: Iterable[int]) -> list[int]:
    """The positions behind which a checkpoint is made, of `count` tokens that come at positions from `start` on."""
    last = start + count
    regular = range(start - start % EVERY + EVERY, last + 1, EVERY)
    return sorted({*regular, *(end for end in message_ends if start < end <= last)})


def most_kept(nbytes: int) -> int:
    """How many checkpoints of so many bytes a sequence has."""
    return max(LEAST, MOST_BYTES // max(nbytes, 1))


def least_useful(kept: Sequence[Kept], position: int) -> int | None:
    """The checkpoint that goes before one at `position` is made, if there is any.

    The gap that it leaves is small beside its distance from the end: prompts part near their ends, so checkpoints are
    the denser, the later they are. Ends of messages, where prompts part most often, count four times.
    """
    at = [0, *(each.position for each in kept), position]

    def loss(i: int) -> float:
        gap = (at[i + 2] - at[i]) * (4 if kept[i].message_end else 1)
        return gap / (position - at[i + 1] + EVERY)

    return min(range(len(kept)), key=loss, default=None)


class StateCheckpoint(NamedTuple, Generic[State]):
    """The states of all recurrent layers behind `position` tokens."""

    position: int
    message_end: bool
    state: State


class Checkpoints(Generic[State]):
    """Checkpoints of a sequence, in order, where a state is a reference. nbytes: of one state."""

    def __init__(self, nbytes: int, kept: Iterable[StateCheckpoint[State]] = ()) -> None:
        self._state_bytes, self._kept = nbytes, list(kept)

    def add(self, position: int, state: State, message_end: bool) -> None:
        """Keep a state, in the place of another where there are too many."""
        if len(self._kept) >= most_kept(self._state_bytes):
            worst = least_useful(self._kept, position)
            assert worst is not None
            del self._kept[worst]
        self._kept.append(StateCheckpoint(position, message_end, state))

    def forget_behind(self, position: int) -> None:
        """Drop those of later positions, which belong to other tokens now."""
        self._kept = [each for each in self._kept if each.position <= position]

    def last_until(self, position: int) -> StateCheckpoint[State] | None:
        """The last one that is not behind `position` tokens."""
        return next((each for each in reversed(self._kept) if each.position <= position), None)

    def at(self, position: int) -> State:
        """The state behind so many tokens, which is there."""
        return next(each.state for each in self._kept if each.position == position)

    def until(self, position: int) -> Checkpoints[State]:
        """Another one with those up to a position: sequences with a common beginning share states."""
        return Checkpoints(self._state_bytes, (each for each in self._kept if each.position <= position))

    @property
    def nbytes(self) -> int:
        return len(self._kept) * self._state_bytes
