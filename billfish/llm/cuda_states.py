"""The states of a sequence's recurrent layers on a GPU, and checkpoints: a sequence can only be cut back to those.

A checkpoint is made at every multiple of 64 positions and where a message ends. Sequences with a common beginning share
checkpoints. All that reads or writes states is on one stream, so memory may be used again as soon as it is given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock

from billfish.backends.cuda.driver import Buffer, OutOfMemory, Stream, check, driver, free_bytes
from billfish.backends.cuda.recurrent import Chunk, chunks_between
from billfish.llm.recurrent_checkpoints import least_useful, most_kept, places

# Checkpoints of all sequences take at most this part of the memory that was free, and so do states behind drafted rows.
CHECKPOINT_SHARE = 8
CHANGING = -1  # the position of states while a step is under way


class StatePool:
    """Memory for the states of one model, `nbytes` for a sequence. Once taken from the device, it stays here."""

    def __init__(self, nbytes: int, stream: Stream) -> None:
        self.nbytes, self.stream = nbytes, stream
        self.most_checkpoints = free_bytes(stream.ordinal) // CHECKPOINT_SHARE // max(1, nbytes)
        self.checkpoints = self.drafted = 0
        self._lock = RLock()  # a sequence may be collected anywhere, also in here
        self._free: list[Buffer] = []

    def take(self) -> Buffer:
        with self._lock:
            if self._free:
                return self._free.pop()
        return Buffer(self.nbytes, self.stream.ordinal)

    def give(self, buffer: Buffer) -> None:
        with self._lock:
            self._free.append(buffer)


class DeviceCheckpoint:
    """States behind `position` tokens."""

    def __init__(self, pool: StatePool, position: int, message_end: bool) -> None:
        self.position, self.message_end = position, message_end
        self._pool, self._buffer = pool, pool.take()
        pool.checkpoints += 1

    @property
    def address(self) -> int:
        return self._buffer.pointer

    def __del__(self) -> None:
        if hasattr(self, "_buffer"):
            self._pool.checkpoints -= 1
            self._pool.give(self._buffer)


class SequenceStates:
    """The states of one sequence. Methods that copy are for whoever may launch on the pool's stream; the device is
    current.

    position: how many tokens the states are behind. CHANGING: nobody knows.

    Behind drafted rows, states are in memory of their own until it is known which rows are right: `reserve_rows`, a
    step, then `settle`.
    """

    def __init__(self, pool: StatePool) -> None:
        self._pool, self._buffer = pool, pool.take()
        self.position = CHANGING
        self.checkpoints: list[DeviceCheckpoint] = []  # in order
        self._before: DeviceCheckpoint | None = None  # the last step that was launched ahead
        self._rows: list[Buffer] = []  # of states behind each drafted row

    @property
    def address(self) -> int:
        return self._buffer.pointer

    def restorable(self, length: int) -> int:
        """The most positions, up to `length`, that the sequence can go on behind."""
        known = [0, self.position, *(each.position for each in self._kept())]
        return max(position for position in known if position <= length)

    def prepare(self, start: int, count: int, message_ends: Sequence[int] = ()) -> list[Chunk]:
        """Be behind `start` positions, before `count` rows come in one step: the chunks they come in, with places of
        checkpoints. message_ends: positions that another message follows.

        A decode step has one row. Behind it `save` makes the checkpoint.
        """
        if self.position != start:
            self._restore(self, start)
        end, ends = start + count, {position for position in message_ends if start < position <= start + count}
        self.checkpoints = [each for each in self.checkpoints if each.position <= start]
        if self._before is not None and self._before.position > start:
            self._before = None  # of other tokens
        for position in places(start, count, ends):
            self._add(position, position in ends)
        self.position = CHANGING
        return chunks_between(start, end, {each.position: each.address for each in self.checkpoints})

    def reserve_rows(self, drafted: int) -> bool:
        """Have memory for states behind so many drafted rows. False: there is not enough."""
        self.drop_rows()
        if self._pool.drafted + drafted > self._pool.most_checkpoints:
            return False
        try:
            for _ in range(drafted):
                self._rows.append(self._pool.take())
                self._pool.drafted += 1
        except OutOfMemory:
            self.drop_rows()
            return False
        return True

    @property
    def rows_known(self) -> bool:
        """Whether no drafted rows wait for `settle`."""
        return not self._rows

    def row_addresses(self, rows: int) -> list[int]:
        """Where the states behind each row of a step go."""
        return [self.address, *(buffer.pointer for buffer in self._rows[: rows - 1])]

    def settle(self, start: int, right: int) -> None:
        """Of the last step, which began behind `start` positions, so many rows were right."""
        for position in places(start + 1, right - 1, ()):
            self._add(position, False)
            made = next((each for each in self.checkpoints if each.position == position), None)
            if made is not None:
                self._copy(made.address, self._rows[position - start - 2].pointer)
        if right > 1:
            self._buffer, self._rows[right - 2] = self._rows[right - 2], self._buffer
        self.drop_rows()
        self.position = start + right

    def drop_rows(self) -> None:
        """Nobody wants the states behind drafted rows any more."""
        rows, self._rows = self._rows, []
        self._pool.drafted -= len(rows)
        for buffer in rows:
            self._pool.give(buffer)

    def save(self, chunks: Sequence[Chunk]) -> None:
        """Copy the states to where the last of a decode step's chunks wants them."""
        if chunks[-1].save:
            self._copy(chunks[-1].save, self.address)

    def done(self, position: int) -> None:
        """The step was launched: the states are behind so many positions."""
        self.position = position

    def keep(self) -> bool:
        """Be able to go back to where the states are, before a step is launched that nobody asked for yet. False: there
        is no memory for it."""
        self._before = None  # its memory first
        try:
            self._before = DeviceCheckpoint(self._pool, self.position, False)
        except OutOfMemory:
            return False
        self._copy(self._before.address, self.address)
        return True

    def forget_behind(self, position: int) -> None:
        """Drop checkpoints of later positions."""
        self.checkpoints, self._before = [each for each in self.checkpoints if each.position <= position], None

    def copy(self, other: SequenceStates, length: int) -> None:
        """Be behind the first `length` positions of another sequence, which can go on there."""
        self._restore(other, length)
        self.checkpoints = [each for each in other.checkpoints if each.position <= length]
        self._before = None

    def _restore(self, source: SequenceStates, position: int) -> None:
        if position == 0:
            stream = self._pool.stream.pointer
            check(driver().cuMemsetD8Async(self.address, 0, self._pool.nbytes, stream), "clearing a state")
        else:
            at = [each.address for each in source._kept() if each.position == position]
            [address] = [source.address] if source.position == position else at[:1]
            self._copy(self.address, address)
        self.position = position

    def _kept(self) -> list[DeviceCheckpoint]:
        return self.checkpoints if self._before is None else [*self.checkpoints, self._before]

    def _copy(self, to: int, source: int) -> None:
        nbytes, stream = self._pool.nbytes, self._pool.stream.pointer
        if to != source:
            check(driver().cuMemcpyDtoDAsync(to, source, nbytes, stream), "copying a state")

    def _add(self, position: int, message_end: bool) -> None:
        """Make a checkpoint, in the place of another where there are too many."""
        pool = self._pool
        if len(self.checkpoints) >= most_kept(pool.nbytes) or pool.checkpoints >= pool.most_checkpoints:
            worst = least_useful(self.checkpoints, position)
            if worst is None:
                return
            del self.checkpoints[worst]
        try:
            self.checkpoints.append(DeviceCheckpoint(pool, position, message_end))
        except OutOfMemory:  # the sequence goes on without
            return

    def __del__(self) -> None:
        if hasattr(self, "_buffer"):
            self._pool.give(self._buffer)
            self.drop_rows()
