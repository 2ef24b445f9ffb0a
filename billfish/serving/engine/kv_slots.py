"""The KV caches of an engine, the memory that they share, and where prompts are cut to share what is in them.

A free slot keeps its KV cache so that a later prompt with the same prefix can reuse it. Where memory ends, the text
that was given back longest ago goes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from billfish.core.typing import Activations
from billfish.llm.decoder_base import Decoder
from billfish.llm.kv_cache import Cache, NoRoom, PageCounts
from billfish.serving.engine.prefix_index import PrefixIndex, block_hashes

SMALLEST = 16
PAGE = 64  # positions in which memory is counted where a cache has its own
KEPT = 64  # texts that are kept beside those of all streams, where caches share pages


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
        self.room = 0  # positions that memory was taken for


class Slots:
    """The caches of all streams, of `context` positions each at most.

    exact: a prompt gets only keys that it would have alone, to the bit: those of tokens that another prompt read, not
    those of an answer. tokens: that all caches hold together, at most; None: as many as all streams can have, or as
    there is memory for, on a device whose caches take pages of it when they need them.
    """

    def __init__(
        self, decoder: Decoder, streams: int, context: int, cuts: Cuts, *, exact: bool, tokens: int | None = None
    ) -> None:
        self._decoder, self._streams, self._context, self._tokens = decoder, streams, context, tokens
        self._cuts, self._exact, self._pages = cuts, exact, decoder.pages
        self._slots = list[Slot]()
        self._most = streams
        if self._pages is None:
            self._slots += [Slot(decoder.cache(context)) for _ in range(streams)]
            nbytes = sum(slot.cache.nbytes for slot in self._slots)
            self.bytes_bound = nbytes if tokens is None else min(nbytes, nbytes * tokens // (streams * context))
        else:
            wanted = streams * self._pages.bytes_for(context)
            wanted = wanted if tokens is None else min(wanted, self._pages.bytes_for(context) * tokens // context)
            self.bytes_bound = self._pages.limit(wanted, context)
            self._most += 0 if self._pages.has_states else KEPT  # states take memory without any token
        self._empty, self._kept = list(self._slots), dict[Slot, None]()  # of the free ones; the oldest text is first
        self._index = PrefixIndex[Slot]()

    @property
    def free(self) -> int:
        """How many requests can have a slot."""
        return self._streams - len(self._slots) + len(self._empty) + len(self._kept)

    @property
    def bytes_held(self) -> int:
        """Of keys and values of texts."""
        if self._pages is not None:
            return self._pages.bytes_held
        caches = [slot.cache for slot in self._slots]
        return sum(cache.nbytes * len(cache.tokens) // cache.capacity for cache in caches)

    @property
    def pages(self) -> PageCounts:
        """How memory is used, in pages."""
        if self._pages is not None:
            return self._pages.counts()
        total = self._streams * self._context if self._tokens is None else self._tokens
        used = sum(in_pages(len(slot.cache.tokens)) for slot in self._slots) // PAGE
        return PageCounts(used, 0, max(0, total // PAGE - used))

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
            slot = self._next_slot()
        if source is None or slot is source:
            self._hold(slot, length)
        else:
            self._hold(slot, 0)
            self._begin_as(slot, source, length)
        if slot in self._kept:
            del self._kept[slot]
        else:
            self._empty.remove(slot)
        slot.taken, slot.shared, slot.tenant, slot.room = True, prompt is not None, tenant, length
        return slot

    def _next_slot(self) -> Slot:
        """A free one: without a text, or with the one that was given back longest ago."""
        if not self._empty and len(self._slots) < self._most:
            self._slots.append(Slot(self._decoder.cache(0)))
            self._empty.append(self._slots[-1])
        return self._empty[-1] if self._empty else next(iter(self._kept))

    def make_room(self, slot: Slot, positions: int, count: int, spare: int = 0) -> bool:
        """Take memory for so many positions of a slot's text, and for a step that feeds `count` tokens, at the cost of
        texts that are kept. False: there is too little, or less than `spare` positions would be left for others."""
        positions = min(positions, self._context)
        while not self._took_room(slot, positions, count, spare):
            if not self._forget_oldest():
                return False
        slot.room = max(slot.room, positions)
        return True

    def _forget_oldest(self, besides: Slot | None = None) -> bool:
        """Give up the text that was given back longest ago. False: there is none."""
        oldest = next((slot for slot in self._kept if slot is not besides), None)
        if oldest is None:
            return False
        del self._kept[oldest]
        self._hold(oldest, 0)
        self._empty.append(oldest)
        return True

    def _begin_as(self, slot: Slot, source: Slot, length: int) -> None:
        while True:
            try:
                slot.cache.begin_as(source.cache, length)
                break
            except NoRoom:
                slot.cache.trim()
                if not self._forget_oldest(besides=source):
                    raise
        slot.read = min(source.read, length)

    def _took_room(self, slot: Slot, positions: int, count: int, spare: int) -> bool:
        if self._pages is None:
            if self._tokens is None or positions <= in_pages(slot.room):
                return True
            others = sum(in_pages(each.room if each.taken else len(each.cache.tokens)) for each in self._slots)
            return others - in_pages(slot.room) + in_pages(positions) + spare <= self._tokens
        if count == 1 and positions <= slot.cache.capacity:
            return True
        try:
            if slot.cache.fits(positions, count, spare):
                slot.cache.make_room(positions, count)
                return True
        except NoRoom:  # somebody else has taken memory of the device
            pass
        return False

    def give_back(self, slot: Slot, *, keep: bool) -> None:
        """keep: prompts to come may begin with its text."""
        slot.taken, slot.cache.hidden = False, None
        if keep and slot.shared:
            slot.cache.rollback(self._settled(slot))
            slot.cache.trim()
            self._note(slot)
            self._kept[slot] = None
        else:
            self._hold(slot, 0)
            self._empty.append(slot)

    def clear(self) -> None:
        """Empty all slots and give them back."""
        for slot in self._slots:
            self._hold(slot, 0)
            slot.taken, slot.cache.hidden = False, None
        self._empty, self._kept = list(self._slots), {}

    def _hold(self, slot: Slot, length: int) -> None:
        """Keep a slot's first tokens alone, which are restorable."""
        slot.read = min(slot.read, slot.cache.rollback(length))
        slot.cache.trim()
        self._index.cut(slot, self._of_use(slot) // self._cuts.smallest)

    def _note(self, slot: Slot) -> None:
        """Index what a slot holds."""
        known, block = self._index.hashes(slot), self._cuts.smallest
        new = slot.cache.tokens[len(known) * block : self._of_use(slot)]
        if len(new) >= block:
            self._index.extend(slot, block_hashes(new, block, slot.tenant, known))

    def _of_use(self, slot: Slot) -> int:
        """How many of a slot's tokens another prompt may begin with."""
        return slot.read if self._exact else self._settled(slot)

    def _settled(self, slot: Slot) -> int:
        """How many tokens a slot has, without one that is on its way (a number below 0)."""
        tokens = slot.cache.tokens
        return len(tokens) - (bool(tokens) and tokens[-1] < 0)

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


def in_pages(positions: int) -> int:
    """Positions of whole pages."""
    return -(-positions // PAGE) * PAGE
