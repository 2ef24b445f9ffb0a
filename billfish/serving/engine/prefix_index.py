"""Which KV caches begin like a prompt: a dictionary from chained hashes of blocks of tokens to whoever holds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

import numpy as np

Holder = TypeVar("Holder")
DIGEST_BYTES = 16


def block_hashes(tokens: Sequence[int], block: int, tenant: bytes, before: Sequence[bytes] = ()) -> list[bytes]:
    """The hash of each whole block of tokens. It covers the tenant and all tokens before: equal hashes are equal
    beginnings. before: those of the blocks ahead of `tokens`."""
    data = np.asarray(tokens[: len(tokens) // block * block], np.int64).tobytes()
    size, found = 8 * block, list[bytes]()
    last = before[-1] if before else blake2b(tenant, digest_size=DIGEST_BYTES, person=b"tenant").digest()
    for start in range(0, len(data), size):
        last = blake2b(last + data[start : start + size], digest_size=DIGEST_BYTES).digest()
        found.append(last)
    return found


class PrefixIndex(Generic[Holder]):
    """Holders of texts by the blocks that these begin with. A lookup costs a dictionary access per block."""

    def __init__(self) -> None:
        self._holders: dict[bytes, dict[Holder, None]] = {}
        self._hashes: dict[Holder, list[bytes]] = {}

    def hashes(self, holder: Holder) -> Sequence[bytes]:
        """Of the blocks that a holder is known to have."""
        return self._hashes.get(holder, ())

    def extend(self, holder: Holder, hashes: Sequence[bytes]) -> None:
        """A holder has further blocks."""
        self._hashes.setdefault(holder, []).extend(hashes)
        for each in hashes:
            self._holders.setdefault(each, {})[holder] = None

    def cut(self, holder: Holder, blocks: int) -> None:
        """A holder has its first blocks alone."""
        own = self._hashes.get(holder, [])
        for each in own[blocks:]:
            holders = self._holders[each]
            del holders[holder]
            if not holders:
                del self._holders[each]
        del own[blocks:]
        if not own:
            self._hashes.pop(holder, None)

    def longest(self, hashes: Sequence[bytes]) -> Iterator[tuple[int, list[Holder]]]:
        """From the longest beginning to the shortest: how many blocks, and who has no more of them than that."""
        depth = next((i for i, each in enumerate(hashes) if each not in self._holders), len(hashes))
        seen = dict[Holder, None]()
        for blocks in range(depth, 0, -1):
            holders = self._holders[hashes[blocks - 1]]
            if len(holders) > len(seen):  # all who have more blocks have these too
                fresh = [holder for holder in holders if holder not in seen]
                seen |= holders
                yield blocks, fresh
