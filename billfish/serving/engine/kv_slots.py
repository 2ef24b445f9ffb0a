"""The KV caches of an engine, one for each stream, and where prompts are cut to share them.

A free slot keeps its KV cache so that a later prompt with the same prefix can reuse it.
"""

from __future__ import annotations

from dataclasses import dataclass

from billfish.core.typing import Activations
from billfish.llm.decoder_base import Decoder
from billfish.llm.kv_cache import Cache
from billfish.serving.engine.prefix_index import PrefixIndex, block_hashes

SMALLEST = 16


@dataclass(frozen=True)
class Cuts:
    """Where prompts are cut into parts.

    chunk: what a decoder feeds at once of a prompt alone. smallest: of a part. Fewer rows may take other kernels than
    many, and the numbers would differ in their last digits from those of the prompt alone.
    """

    chunk: int
    smallest: int

    @property
    def step(self) -> int:
        """Parts begin at multiples of it: where parts are chunks, those of a prompt alone."""
        return self.chunk if self.smallest == self.chunk else 1

    def body(self, prompt: int) -> int:
        """The tokens of a prompt without the few behind the last whole chunk, which are fed apart from them."""
        tail = prompt % self.chunk
        return prompt - tail if tail < self.smallest else prompt

    def part(self, read: int, prompt: int, share: int) -> int:
        """How many tokens of a prompt are read next: about `share`, and so many that no few are left."""
        left, share = self.body(prompt) - read, max(share, self.smallest)
        if left <= 0:
            return prompt - read
        return left if left < share + self.smallest else share

    def reusable(self, shared: int, prompt: int) -> int:
        """How many of the first tokens of a prompt need not be read if a cache holds `shared` of them. At least one
        whole part is left."""
        most = min(shared, self.body(prompt) - self.smallest)
        return max(0, most // self.smallest * self.smallest)


def cuts_for(decoder: Decoder, activations: Activations | None) -> Cuts:
    """Which rows an expert gets depends on the part, and in exact mode its kernels on how many: parts are chunks then,
    as of a prompt alone. An encoder reads a text at once."""
    whole = decoder.config.encoder is not None or (activations == "exact" and decoder.config.has_experts)
    return Cuts(decoder.chunk, decoder.chunk if whole else SMALLEST)


class Slot:
    """A cache, and whether somebody has it. read: of its tokens, the first ones that were read as a prompt is. tenant:
    whose tokens they are. shared: whether prompts may begin with them."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.taken = self.shared = False
        self.tenant = b""
        self.read = 0


class Slots:
    """All caches, of `context` positions each. exact: a prompt gets only keys that it would have alone, to the bit:
    those of tokens that another prompt read, not those of an answer."""

    def __init__(self, decoder: Decoder, streams: int, context: int, cuts: Cuts, *, exact: bool) -> None:
        self._slots = [Slot(decoder.cache(context)) for _ in range(streams)]
        self._empty, self._kept = list(self._slots), dict[Slot, None]()  # of the free ones; the oldest text is first
        self._cuts, self._exact = cuts, exact
        self._index = PrefixIndex[Slot]()
        self.bytes_bound = sum(slot.cache.nbytes for slot in self._slots)

    @property
    def free(self) -> int:
        """How many nobody has."""
        return len(self._empty) + len(self._kept)

    @property
    def bytes_held(self) -> int:
        """Of keys and values of texts."""
        caches = [slot.cache for slot in self._slots]
        return sum(cache.nbytes * len(cache.tokens) // cache.capacity for cache in caches)

    def hashes(self, prompt: list[int], tenant: bytes = b"") -> list[bytes]:
        """What `reuse` and `take` look a tenant's prompt up by."""
        return block_hashes(prompt, self._cuts.smallest, tenant)

    def note_growth(self) -> None:
        """Look at what running requests have read since the last call: prompts may begin with that, too."""
        for slot in self._slots:
            if slot.taken and slot.shared:
                self._note(slot)

    def reuse(self, prompt: list[int], hashes: list[bytes]) -> int:
        """How many tokens of a prompt need not be read."""
        return self._nearest(prompt, hashes)[1]

    def take(self, prompt: list[int] | None = None, hashes: list[bytes] | None = None, tenant: bytes = b"") -> Slot:
        """A free slot. It holds as much of the prompt as some slot of the tenant does; None: nothing.

        The nearest slot itself is taken if it is free and most of its text is in the prompt. Else its beginning is
        copied to the slot that was given back longest ago.
        """
        source, length = (None, 0) if prompt is None or hashes is None else self._nearest(prompt, hashes)
        if source is not None and not source.taken and 2 * length >= len(source.cache.tokens):
            slot = source
        else:
            slot = self._empty[-1] if self._empty else next(iter(self._kept))
        if source is None or slot is source:
            self._hold(slot, length)
        else:
            self._hold(slot, 0)
            slot.cache.begin_as(source.cache, length)
            slot.read = min(source.read, length)
        if slot in self._kept:
            del self._kept[slot]
        else:
            self._empty.remove(slot)
        slot.taken, slot.shared, slot.tenant = True, prompt is not None, tenant
        return slot

    def give_back(self, slot: Slot, *, keep: bool) -> None:
        """keep: prompts to come may begin with its text."""
        slot.taken = False
        if keep and slot.shared:
            self._note(slot)
            self._kept[slot] = None
        else:
            self._hold(slot, 0)
            self._empty.append(slot)

    def clear(self) -> None:
        """Empty all slots and give them back."""
        for slot in self._slots:
            self._hold(slot, 0)
            slot.taken = False
        self._empty, self._kept = list(self._slots), {}

    def _hold(self, slot: Slot, length: int) -> None:
        """Keep a slot's first tokens alone, which are restorable."""
        slot.read = min(slot.read, slot.cache.rollback(length))
        self._index.cut(slot, self._of_use(slot) // self._cuts.smallest)

    def _note(self, slot: Slot) -> None:
        """Index what a slot holds."""
        known, block = self._index.hashes(slot), self._cuts.smallest
        new = slot.cache.tokens[len(known) * block : self._of_use(slot)]
        if len(new) >= block:
            self._index.extend(slot, block_hashes(new, block, slot.tenant, known))

    def _of_use(self, slot: Slot) -> int:
        """How many of a slot's tokens a prompt may begin with. The last one may be on its way (a number below 0)."""
        tokens = slot.cache.tokens
        return slot.read if self._exact else len(tokens) - (bool(tokens) and tokens[-1] < 0)

    def _nearest(self, prompt: list[int], hashes: list[bytes]) -> tuple[Slot | None, int]:
        """The slot with the longest beginning of the prompt, and how much of that is of use. What other tenants have
        read has other hashes: time and `cached_tokens` would tell their prompts."""
        best, longest = None, 0
        for blocks, slots in self._index.longest(hashes):
            most = self._cuts.reusable(blocks * self._cuts.smallest, len(prompt))
            if most <= longest:
                break
            for slot in sorted(slots, key=lambda slot: slot.taken):
                kept = self._usable(slot, most)
                if kept > longest:
                    best, longest = slot, kept
                if kept == most:
                    break
        return best, longest

    def _usable(self, slot: Slot, length: int) -> int:
        """Behind how many of its first `length` tokens a text can go on in a slot."""
        kept = slot.cache.restorable(length)
        while kept % self._cuts.step:  # the end of a message within a chunk
            kept = slot.cache.restorable(kept // self._cuts.step * self._cuts.step)
        return kept
