"""The KV caches of an engine: one for each stream, all made at the start, and where prompts are cut to share them.

A free slot keeps its KV cache so that a later prompt with the same prefix can reuse it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from billfish.core.typing import Activations
from billfish.llm.decoder_base import Decoder
from billfish.llm.kv_cache import Cache, shared_length

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
    as of a prompt alone."""
    whole = activations == "exact" and decoder.config.has_experts
    return Cuts(decoder.chunk, decoder.chunk if whole else SMALLEST)


class Slot:
    """A cache, and whether somebody has it. read: of its tokens, the first ones that were read as a prompt is. tenant:
    whose tokens they are."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.taken = False
        self.tenant = b""
        self.read = 0
        self.last_used = -1

    def hold(self, length: int) -> None:
        """Its first tokens alone, which are restorable."""
        self.read = min(self.read, self.cache.rollback(length))


class Slots:
    """All caches, of `context` positions each. exact: a prompt gets only keys that it would have alone, to the bit:
    those of tokens that another prompt read, not those of an answer."""

    def __init__(self, decoder: Decoder, streams: int, context: int, cuts: Cuts, *, exact: bool) -> None:
        self._slots = [Slot(decoder.cache(context)) for _ in range(streams)]
        self._cuts, self._exact = cuts, exact
        self._time = count()
        self.bytes_bound = sum(slot.cache.nbytes for slot in self._slots)

    @property
    def free(self) -> int:
        """How many nobody has."""
        return sum(not slot.taken for slot in self._slots)

    @property
    def bytes_held(self) -> int:
        """Of keys and values of texts."""
        caches = [slot.cache for slot in self._slots]
        return sum(cache.nbytes * len(cache.tokens) // cache.capacity for cache in caches)

    def reuse(self, prompt: list[int], tenant: bytes = b"") -> int:
        """How many tokens of a tenant's prompt need not be read."""
        return self._nearest(prompt, tenant)[1]

    def take(self, prompt: list[int] | None, tenant: bytes = b"") -> Slot:
        """A free slot. It holds as much of the prompt as some slot of the tenant does; None: nothing.

        The nearest slot itself is taken if it is free and most of its text is in the prompt. Else its beginning is
        copied to the slot that was given back longest ago.
        """
        slot = min((slot for slot in self._slots if not slot.taken), key=lambda slot: slot.last_used)
        source, length = (slot, 0) if prompt is None else self._nearest(prompt, tenant)
        if not source.taken and 2 * length >= len(source.cache.tokens):
            slot = source
        if slot is not source and length:
            slot.cache.begin_as(source.cache, length)
            slot.read = min(source.read, length)
        slot.hold(length)
        slot.taken, slot.tenant = True, tenant
        return slot

    def give_back(self, slot: Slot, *, keep: bool) -> None:
        """keep: prompts to come may begin with its text."""
        if not keep:
            slot.hold(0)
        slot.taken, slot.last_used = False, next(self._time) if keep else -1

    def clear(self) -> None:
        """Empty all slots and give them back."""
        for slot in self._slots:
            self.give_back(slot, keep=False)

    def _nearest(self, prompt: list[int], tenant: bytes) -> tuple[Slot, int]:
        """The slot with the longest beginning of the prompt, and how much of that is of use: what others have read is
        of none, or time and `cached_tokens` would tell their prompts."""

        def length(slot: Slot) -> int:
            if slot.tenant != tenant:
                return 0
            tokens = slot.cache.tokens[: slot.read] if self._exact else slot.cache.tokens
            kept = slot.cache.restorable(self._cuts.reusable(shared_length(tokens, prompt), len(prompt)))
            while kept % self._cuts.step:  # the end of a message within a chunk
                kept = slot.cache.restorable(kept // self._cuts.step * self._cuts.step)
            return kept

        best = max(self._slots, key=lambda slot: (length(slot), not slot.taken))
        return best, length(best)
