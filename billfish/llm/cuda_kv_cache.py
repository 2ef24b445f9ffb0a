"""Keys and values on a GPU: pages of 64 positions, which texts take from one pool and give back."""

from __future__ import annotations

from threading import RLock

from billfish.backends.cuda.decoder import PAGE, Shape
from billfish.backends.cuda.driver import Buffer, check, current, driver, free_bytes, synchronize
from billfish.core.errors import BillfishError, ModelError, complaint
from billfish.llm.config import Config
from billfish.llm.kv_cache import Cache

SLAB_BYTES = 1 << 26  # that are allocated at once, at least


class PagePool:
    """The pages of a model. Memory, once taken from the device, stays in the pool.

    stream: where all that reads and writes pages is launched, by whoever holds `steps`.
    """

    def __init__(self, shape: Shape, ordinal: int, stream: int, steps: RLock) -> None:
        self.page_bytes, self.ordinal, self.stream, self.steps = shape.page_bytes, ordinal, stream, steps
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
                slab = Buffer(count * self.page_bytes, self.ordinal)
            except BillfishError:
                continue
            self._slabs.append(slab)
            self._free += [slab.pointer + i * self.page_bytes for i in range(count)]
            return
        got = f"{missing * PAGE} positions more, {missing * self.page_bytes / 1e9:.2f} GB"
        takes = f"up to {free_bytes(self.ordinal) / 1e9:.2f} GB, which the GPU has left"
        raise ModelError(complaint("llm.generate", "keys and values", got, takes))


class CudaCache(Cache):
    """Keys and values in 16 bits, in pages."""

    def __init__(self, config: Config, pool: PagePool, capacity: int) -> None:
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
        with pool.steps, current(pool.ordinal):
            for to, source in zip(self.pages[:count], other.pages[:count], strict=True):
                copied = driver().cuMemcpyDtoDAsync(to, source, pool.page_bytes, pool.stream)
                check(copied, "copying on the device")
            synchronize(pool.stream)

    def __del__(self) -> None:
        if hasattr(self, "pages"):
            self._pool.give(self.pages)
