"""What a sequence keeps on a GPU: keys and values in pages of 64 positions, and the states of recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock

from billfish.backends.cuda.driver import Buffer, OutOfMemory, Stream, check, current, driver, free_bytes, synchronize
from billfish.backends.cuda.step_memory import PAGE
from billfish.core.errors import ModelError, failure
from billfish.llm.cuda_blocks import PageTable, SequenceLayout
from billfish.llm.cuda_states import SequenceStates, StatePool
from billfish.llm.kv_cache import Cache
from billfish.models.description import Model

SLAB_BYTES = 1 << 26  # that are allocated at once, at least
KEPT_PAGES = 4  # before a window, so that a sequence can be cut back a little


class NoRoom(ModelError, MemoryError):
    """The device's memory ends before a KV cache does."""


class PagePool:
    """Pages of one size. Memory, once taken from the device, stays in the pool."""

    def __init__(self, page_bytes: int, ordinal: int) -> None:
        self.page_bytes, self._ordinal = page_bytes, ordinal
        self._lock = RLock()  # a cache that is collected in the middle of `take` gives its pages back in there
        self._slabs: list[Buffer] = []
        self._free: list[int] = []

    def take(self, count: int) -> list[int]:
        """The addresses of so many pages."""
        with self._lock:
            missing = count - len(self._free)
            if missing > 0:
                self._grow(missing)
            return [self._free.pop() for _ in range(count)]

    def give(self, pages: Sequence[int]) -> None:
        with self._lock:
            self._free += pages

    def _grow(self, missing: int) -> None:
        pages = max(missing, SLAB_BYTES // self.page_bytes)
        for count in dict.fromkeys((pages, missing)):
            try:
                slab = Buffer(count * self.page_bytes, self._ordinal)
            except OutOfMemory:
                continue
            self._slabs.append(slab)
            self._free += [slab.pointer + i * self.page_bytes for i in range(count)]
            return
        needed, free = missing * self.page_bytes / 1e9, free_bytes(self._ordinal) / 1e9
        raise NoRoom(
            f"The GPU has no room for {missing * PAGE} more positions of KV cache: {needed:.2f} GB, and {free:.2f} GB "
            "are free. Use a shorter context or fewer sequences."
        )


class SequencePool:
    """The pages of a model, a pool for each table of its layout.

    stream: where all that reads and writes them is launched, by whoever holds `steps`. The pool keeps it: a cache may
    outlive its decoder.
    """

    def __init__(self, layout: SequenceLayout, stream: Stream, steps: RLock) -> None:
        self.layout, self.stream, self.steps = layout, stream, steps
        self.pools = [PagePool(table.page_bytes, stream.ordinal) for table in layout.tables]
        self.states = StatePool(layout.state_bytes, stream) if layout.state_bytes else None


class PageList:
    """A sequence's pages of one table, by their number in the sequence; 0 where there is none.

    Layers without a window keep all. Layers with one keep the last pages, and give those before it back.
    """

    def __init__(self, table: PageTable, pool: PagePool) -> None:
        self.table, self._pool = table, pool
        self.pages: list[int] = []
        self._spare: list[int] = []  # set aside, not yet in the sequence
        self._range = (0, 0)  # that was held last

    def reserve(self, count: int) -> None:
        """Make room for so many pages, or as many as stay beside a window."""
        missing = self._kept(count) - len(self._spare) - sum(map(bool, self.pages))
        if missing > 0:
            self._spare += self._pool.take(missing)
        if not self.table.window:
            self.pages += self._spare
            self._spare = []

    def expect(self, start: int, count: int) -> None:
        """Positions from `start` on are about to come; those before it that they attend to stay."""
        self.hold(self.first_needed(start), pages_for(start + count))

    def hold(self, first: int, end: int) -> None:
        """Have the pages [first, end). Of those before them a few stay, and others are free."""
        if not self.table.window or (first, end) == self._range:
            return
        gone = max(0, first - KEPT_PAGES)
        free = [*self._spare, *filter(None, self.pages[:gone])]
        self.pages[:gone] = [0] * min(gone, len(self.pages))
        self.pages += [0] * (end - len(self.pages))
        missing = [i for i in range(first, end) if not self.pages[i]]
        if len(missing) > len(free):
            free += self._pool.take(len(missing) - len(free))
        for i in missing:
            self.pages[i] = free.pop()
        surplus = max(0, len(free) + sum(map(bool, self.pages)) - self._kept(len(self.pages)))
        self._pool.give(free[:surplus])
        self._spare, self._range = free[surplus:], (first, end)

    def holds(self, positions: int) -> bool:
        """Whether the sequence can go on behind so many positions."""
        return all(self.pages[self.first_needed(positions) : pages_for(positions)])

    def first_needed(self, positions: int) -> int:
        """The first page that a row at this position attends to."""
        return max(0, positions + 1 - self.table.window) // PAGE if self.table.window else 0

    def kept_bytes(self, capacity: int) -> int:
        return self._kept(pages_for(capacity)) * self.table.page_bytes

    def _kept(self, pages: int) -> int:
        return min(pages, pages_for(self.table.window) + 1 + KEPT_PAGES) if self.table.window else pages

    def give_back(self) -> None:
        self._pool.give([page for page in (*self.pages, *self._spare) if page])


class CudaCache(Cache):
    """Keys and values in 16 bits, in pages; states of recurrent layers in float32, with checkpoints to go back to."""

    def __init__(self, config: Model, pool: SequencePool, capacity: int) -> None:
        super().__init__(config, capacity)
        self._pool, self._capacity = pool, 0
        self.lists = [PageList(*each) for each in zip(pool.layout.tables, pool.pools, strict=True)]
        self.states = None if pool.states is None else self._first_states(pool.states)
        self.reserve(capacity)

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def nbytes(self) -> int:
        """That are kept from step to step. A long prompt may need more while it is fed."""
        return sum(pages.kept_bytes(self.capacity) for pages in self.lists) + self._pool.layout.state_bytes

    @property
    def state(self) -> int:
        """The address of the states of recurrent layers; 0 where there are none."""
        return 0 if self.states is None else self.states.address

    def _first_states(self, pool: StatePool) -> SequenceStates:
        try:
            return SequenceStates(pool)
        except OutOfMemory:
            free = free_bytes(self._pool.stream.ordinal) / 1e9
            raise NoRoom(
                f"The GPU has no room for the recurrent states of one more sequence: {pool.nbytes / 1e9:.2f} GB, and "
                f"{free:.2f} GB are free. Use fewer sequences."
            ) from None

    def reserve(self, positions: int) -> None:
        with self.lock:
            for pages in self.lists:
                pages.reserve(pages_for(positions))
            self._capacity = max(self._capacity, pages_for(positions) * PAGE)

    def check_state(self) -> None:
        """Raises if the states of recurrent layers cannot go on behind the tokens that are there."""
        if self.states is not None and self.states.restorable(len(self.tokens)) != len(self.tokens):
            problem = "a step that was interrupted has changed the recurrent state of the cache"
            raise ModelError(failure("llm.run", problem, "Begin with an empty cache."))

    def expect(self, count: int) -> None:
        """So many rows are about to come behind the tokens that are there. There is room for them."""
        for pages in self.lists:
            pages.expect(len(self.tokens), count)

    def like(self, capacity: int) -> CudaCache:
        return CudaCache(self.config, self._pool, capacity)

    def restorable(self, positions: int) -> int:
        if self.states is not None:
            positions = self.states.restorable(positions)
        return positions if all(pages.holds(positions) for pages in self.lists) else 0

    def copy_positions(self, other: Cache, positions: int) -> None:
        assert isinstance(other, CudaCache)
        pool = self._pool
        with pool.steps, current(pool.stream.ordinal):
            stream = pool.stream.pointer
            for own, theirs in zip(self.lists, other.lists, strict=True):
                first = own.first_needed(positions)
                end = pages_for(positions)
                own.hold(first, end)
                for to, source in zip(own.pages[first:end], theirs.pages[first:end], strict=True):
                    check(driver().cuMemcpyDtoDAsync(to, source, own.table.page_bytes, stream), "copying a page")
            if self.states is not None and other.states is not None:
                self.states.copy(other.states, positions)
            synchronize(stream)

    def __del__(self) -> None:
        for pages in getattr(self, "lists", ()):
            pages.give_back()


def pages_for(positions: int) -> int:
    return -(-positions // PAGE)
