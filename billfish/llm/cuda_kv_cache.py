"""Keys and values on a GPU: pages of 64 positions, which texts take from one pool and give back."""

from __future__ import annotations

from threading import RLock

from billfish.backends.cuda.decoder import PAGE, Shape
from billfish.backends.cuda.driver import Buffer, OutOfMemory, Stream, check, current, driver, free_bytes, synchronize
from billfish.core.errors import ModelError
from billfish.llm.kv_cache import Cache
from billfish.models.description import Model

SLAB_BYTES = 1 << 26  # that are allocated at once, at least


class NoRoom(ModelError, MemoryError):
    """The device's memory ends before a KV cache does."""


class PagePool:
    """The pages of a model. Memory, once taken from the device, stays in the pool.

    stream: where all that reads and writes pages is launched, by whoever holds `steps`. The pool keeps it: a cache may
    outlive its decoder.
    """

    def __init__(self, shape: Shape, stream: Stream, steps: RLock) -> None:
        self.page_bytes, self.stream, self.steps = shape.page_bytes, stream, steps
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

    def give(self, pages: list[int]) -> None:
        with self._lock:
            self._free += pages

    def _grow(self, missing: int) -> None:
        pages = max(missing, SLAB_BYTES // self.page_bytes)
        for count in dict.fromkeys((pages, missing)):
            try:
                slab = Buffer(count * self.page_bytes, self.stream.ordinal)
            except OutOfMemory:
                continue
            self._slabs.append(slab)
            self._free += [slab.pointer + i * self.page_bytes for i in range(count)]
            return
        needed, free = missing * self.page_bytes / 1e9, free_bytes(self.stream.ordinal) / 1e9
        raise NoRoom(
            f"The GPU has no room for {missing * PAGE} more positions of KV cache: {needed:.2f} GB, and {free:.2f} GB "
            "are free. Use a shorter context or fewer sequences."
        )


class CudaCache(Cache):
    """Keys and values in 16 bits, in pages."""

    def __init__(self, config: Model, pool: PagePool, capacity: int) -> None:
        super().__init__(config, capacity)
        self._pool = pool
        self.pages: list[int] = []
        self.reserve(capacity)

    @property
    def capacity(self) -> int:
        return len(self.pages) * PAGE

    @property
    def nbytes(self) -> int:
        return len(self.pages) * self._pool.page_bytes

    def reserve(self, positions: int) -> None:
        with self.lock:
            missing = -(-positions // PAGE) - len(self.pages)
            if missing > 0:
                self.pages += self._pool.take(missing)

    def like(self, capacity: int) -> CudaCache:
        return CudaCache(self.config, self._pool, capacity)

    def copy_positions(self, other: Cache, positions: int) -> None:
        assert isinstance(other, CudaCache)
        pool, count = self._pool, -(-positions // PAGE)
        with pool.steps, current(pool.stream.ordinal):
            stream = pool.stream.pointer
            for to, source in zip(self.pages[:count], other.pages[:count], strict=True):
                check(driver().cuMemcpyDtoDAsync(to, source, pool.page_bytes, stream), "copying on the device")
            synchronize(stream)

    def __del__(self) -> None:
        if hasattr(self, "pages"):
            self._pool.give(self.pages)
