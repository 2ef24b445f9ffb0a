"""What a sequence keeps on a GPU: keys and values in pages of 64 positions, and the states of recurrent layers.

Pages are taken when they are needed. Sequences that begin alike share full pages, by a count of holders; the last one,
which is not full, is copied. A sequence that goes back into a shared page gets a copy before it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock
from typing import Any

from billfish.backends.cuda.driver import Buffer, OutOfMemory, Stream, check, current, driver, free_bytes
from billfish.backends.cuda.step_memory import PAGE
from billfish.core.errors import ModelError, failure
from billfish.llm.cuda_blocks import PageTable, SequenceLayout
from billfish.llm.cuda_states import SequenceStates, StatePool
from billfish.llm.kv_cache import Cache, NoRoom, PageCounts, PagedMemory
from billfish.models.description import Model

SLAB_BYTES = 1 << 26  # least memory to allocate at once
SLAB_SHARE = 16  # a pool grows by its own size, at most by 1 / SLAB_SHARE of the memory that is left
LEFT_BYTES, LEFT_SHARE = 1 << 30, 10  # of free memory, for steps: so many bytes, or a tenth, but at most half of it
KEPT_PAGES = 4  # before a window, so that a sequence can be cut back a little


class Budget:
    """What all pools may take of a device. limit: None is as much as there is."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self.taken = 0

    def left(self, page_bytes: int) -> int | None:
        """How many pages of a size may still be taken."""
        return None if self.limit is None else max(0, self.limit - self.taken) // page_bytes


class PagePool:
    """Pages of one size. Memory, once taken from the device, stays in the pool."""

    def __init__(self, page_bytes: int, ordinal: int, budget: Budget) -> None:
        self.page_bytes, self._ordinal, self._budget = page_bytes, ordinal, budget
        self._lock = RLock()  # a cache that is collected in the middle of `take` gives its pages back in there
        self._slabs: list[Buffer] = []
        self._pages = 0  # of all slabs
        self._free: list[int] = []
        self._others: dict[int, int] = {}  # of pages that several sequences have: how many, beside the first

    def take(self, count: int) -> list[int]:
        """The addresses of so many pages."""
        with self._lock:
            missing = count - len(self._free)
            if missing > 0:
                self._grow(missing)
            return [self._free.pop() for _ in range(count)]

    def share(self, pages: Sequence[int]) -> None:
        """One sequence more has these pages."""
        with self._lock:
            for page in pages:
                self._others[page] = self._others.get(page, 0) + 1

    def is_shared(self, page: int) -> bool:
        return page in self._others

    def give(self, pages: Sequence[int]) -> None:
        """A sequence has these pages no more."""
        with self._lock:
            for page in pages:
                others = self._others.pop(page, 0)
                if others == 0:
                    self._free.append(page)
                elif others > 1:
                    self._others[page] = others - 1

    @property
    def free(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    @property
    def shared(self) -> int:
        return len(self._others)

    @property
    def used(self) -> int:
        """Pages that somebody has."""
        return self._pages - len(self._free)

    def fill(self, pages: int) -> None:
        """Take memory for so many pages, used and free ones together."""
        missing = pages - self.used - self.free
        if missing > 0:
            with self._lock:
                self._grow(missing)

    def _grow(self, missing: int) -> None:
        left = self._budget.left(self.page_bytes)
        if left is not None and left < missing:
            raise NoRoom(f"The KV cache is full: there is no room for {missing * PAGE} more positions.")
        most = free_bytes(self._ordinal) // self.page_bytes if left is None else left
        pages = max(missing, SLAB_BYTES // self.page_bytes, min(self._pages, most // SLAB_SHARE))
        for count in dict.fromkeys((pages if left is None else min(pages, left), missing)):
            try:
                slab = Buffer(count * self.page_bytes, self._ordinal)
            except OutOfMemory:
                continue
            self._slabs.append(slab)
            self._pages += count
            self._budget.taken += slab.nbytes
            self._free += [slab.pointer + i * self.page_bytes for i in range(count)]
            return
        needed, free = missing * self.page_bytes / 1e9, free_bytes(self._ordinal) / 1e9
        raise NoRoom(
            f"The GPU has no room for {missing * PAGE} more positions of KV cache: {needed:.2f} GB, and {free:.2f} GB "
            "are free. Use a shorter context or fewer sequences."
        )


class SequencePool(PagedMemory):
    """The pages of a model, a pool for each table of its layout.

    stream: where all that reads and writes them is launched, by whoever holds `steps`. The pool keeps it: a cache may
    outlive its decoder.
    """

    def __init__(self, layout: SequenceLayout, stream: Stream, steps: RLock) -> None:
        self.layout, self.stream, self.steps = layout, stream, steps
        self.budget = Budget()
        self.pools = [PagePool(table.page_bytes, stream.ordinal, self.budget) for table in layout.tables]
        self.states = StatePool(layout.state_bytes, stream) if layout.state_bytes else None

    def limit(self, nbytes: int, positions: int) -> int:
        free = free_bytes(self.stream.ordinal)
        left = min(max(LEFT_BYTES, free // LEFT_SHARE), free // 2)
        self.budget.limit = min(nbytes, self.budget.taken + free - left)
        for table, pool in zip(self.layout.tables, self.pools, strict=True):
            pool.fill(pool.used + pages_kept(table, pages_for(positions)))
        return self.budget.limit

    def bytes_for(self, positions: int) -> int:
        return sum(pages_kept(table, pages_for(positions)) * table.page_bytes for table in self.layout.tables)

    @property
    def bytes_held(self) -> int:
        return sum(pool.used * pool.page_bytes for pool in self.pools)

    @property
    def has_states(self) -> bool:
        return self.states is not None

    def counts(self) -> PageCounts:
        left = self.budget.left(max(1, sum(pool.page_bytes for pool in self.pools))) or 0
        used, shared, free = (sum(getattr(pool, name) for pool in self.pools) for name in ("used", "shared", "free"))
        return PageCounts(used, shared, free + left * len(self.pools))

    def fits(self, pages: Sequence[int]) -> bool:
        """Whether so many pages of each pool can be taken."""
        needed = sum(max(0, n - pool.free) * pool.page_bytes for n, pool in zip(pages, self.pools, strict=True))
        return not needed or self.budget.limit is None or self.budget.taken + needed <= self.budget.limit


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
        if not self.table.window:  # it has all pages from the first one on
            if count > len(self.pages):
                self.pages += self._pool.take(count - len(self.pages))
            return
        missing = self._kept(count) - len(self._spare) - sum(map(bool, self.pages))
        if missing > 0:
            self._spare += self._pool.take(missing)

    def missing(self, start: int, positions: int, count: int) -> int:
        """How many pages `reserve` and `expect` would take, for a step of `count` rows from position `start` on."""
        first, end = self.first_needed(start), pages_for(start + count)
        held, own = len(self._spare) + sum(map(bool, self.pages)), self.pages[first:end]
        shared = sum(map(self._pool.is_shared, self.pages[start // PAGE : end]))
        more = max(0, self._kept(pages_for(positions)) - held)
        if self.table.window:
            more = max(more, max(0, end - first) - sum(map(bool, own)) - len(self._spare))
        return more + shared

    def expect(self, start: int, count: int) -> list[tuple[int, int]]:
        """Positions from `start` on are about to come; those before it that they attend to stay. Returns pages that
        must be copied before: to, from."""
        end = pages_for(start + count)
        self.hold(self.first_needed(start), end)
        copies = []
        for i in range(start // PAGE, min(end, len(self.pages))):
            page = self.pages[i]
            if self._pool.is_shared(page):
                [self.pages[i]] = self._pool.take(1)
                if start > i * PAGE:
                    copies.append((self.pages[i], page))
                self._pool.give([page])
        return copies

    def share(self, other: PageList, positions: int) -> list[tuple[int, int]]:
        """Have the pages of the first positions of another sequence, and no others. Returns copies as `expect`."""
        self.give_back()
        first, full, end = self.first_needed(positions), positions // PAGE, pages_for(positions)
        shared = other.pages[first:full]
        self._pool.share(shared)
        self.pages = [*[0] * min(first, full), *shared]
        if full == end:
            return []
        self.pages += self._pool.take(1)
        return [(self.pages[full], other.pages[full])]

    def trim(self, positions: int) -> None:
        """Give back the pages behind so many positions."""
        end = pages_for(positions)
        self._pool.give([page for page in (*self.pages[end:], *self._spare) if page])
        del self.pages[end:]
        self._spare, self._range = [], (0, 0)

    def hold(self, first: int, end: int) -> None:
        """Have the pages [first, end). Of those before them a few stay, and others are free."""
        if not self.table.window or (first, end) == self._range:
            return
        before = min(max(0, first - KEPT_PAGES), len(self.pages))
        gone = [page for page in self.pages[:before] if page]
        shared = [page for page in gone if self._pool.is_shared(page)]  # others still read them
        free = [*self._spare, *(page for page in gone if page not in shared)]
        missing = [i for i in range(first, end) if i >= len(self.pages) or not self.pages[i]]
        if len(missing) > len(free):
            free += self._pool.take(len(missing) - len(free))  # or nothing has changed
        self._pool.give(shared)
        self.pages[:before] = [0] * before
        self.pages += [0] * (end - len(self.pages))
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
        return pages_kept(self.table, pages)

    def give_back(self) -> None:
        """Have no page."""
        self.trim(0)


class CudaCache(Cache):
    """Keys and values in pages; states of recurrent layers in float32, with checkpoints to go back to."""

    def __init__(self, config: Model, pool: SequencePool, capacity: int) -> None:
        super().__init__(config, capacity)
        self._pool, self._capacity = pool, 0
        self.row: Any = None  # of the tables of pages on the device: a TableRow of cuda_steps.py
        self.choosing: Any = None  # the CudaPending of cuda.py that chose a token for it last
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

    def reserve_rows(self, drafted: int) -> bool:
        """Make room for the states of recurrent layers behind so many drafted tokens. False: there is none."""
        return self.states is None or self.states.reserve_rows(drafted)

    def row_states(self, rows: int) -> list[int]:
        """Where the states of recurrent layers go behind each row of a decode step."""
        return [0] * rows if self.states is None else self.states.row_addresses(rows)

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
            if copies := pages.expect(len(self.tokens), count):
                self._copy(pages, copies)

    def fits(self, positions: int, count: int, spare: int) -> bool:
        start, more = len(self.tokens), pages_for(spare)
        return self._pool.fits([pages.missing(start, positions, count) + more for pages in self.lists])

    def make_room(self, positions: int, count: int) -> None:
        with self.lock:
            self.reserve(positions)
            self.expect(count)

    def trim(self) -> None:
        with self.lock:
            for pages in self.lists:
                pages.trim(len(self.tokens))
            self._capacity = pages_for(len(self.tokens)) * PAGE
            if self.states is not None:
                self.states.forget_behind(len(self.tokens))

    def like(self, capacity: int) -> CudaCache:
        return CudaCache(self.config, self._pool, capacity)

    def restorable(self, positions: int) -> int:
        if self.states is not None:
            positions = self.states.restorable(positions)
        return positions if all(pages.holds(positions) for pages in self.lists) else 0

    def begin_as(self, other: Cache, positions: int) -> None:
        first, second = sorted((self, other), key=id)
        with first.lock, second.lock:
            self.tokens.clear()
            self.copy_positions(other, positions)
            self.tokens += other.tokens[:positions]

    def copy_positions(self, other: Cache, positions: int) -> None:
        """Share them. The room that was there before stays."""
        assert isinstance(other, CudaCache)
        capacity, self._capacity = self._capacity, 0
        for own, theirs in zip(self.lists, other.lists, strict=True):
            if copies := own.share(theirs, positions):
                self._copy(own, copies)
        if self.states is not None and other.states is not None:
            with self._pool.steps, current(self._pool.stream.ordinal):
                self.states.copy(other.states, positions)
        self.reserve(max(positions, capacity))

    def _copy(self, pages: PageList, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages, behind whatever was launched."""
        stream = self._pool.stream
        with self._pool.steps, current(stream.ordinal):
            for to, source in copies:
                check(driver().cuMemcpyDtoDAsync(to, source, pages.table.page_bytes, stream.pointer), "copying a page")

    def __del__(self) -> None:
        for pages in getattr(self, "lists", ()):
            pages.give_back()


def pages_kept(table: PageTable, pages: int) -> int:
    """How many of the first pages of a sequence stay."""
    return min(pages, pages_for(table.window) + 1 + KEPT_PAGES) if table.window else pages


def pages_for(positions: int) -> int:
    return -(-positions // PAGE)
