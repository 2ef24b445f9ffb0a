"""The caches of an engine: one for each stream, all made at the start.

A cache that nobody has keeps its text. A prompt that begins like the text of some cache begins with its keys and
values.
"""

from __future__ import annotations

from itertools import count

from billfish.llm.decoder import Decoder
from billfish.llm.kv_cache import Cache, shared_length
from billfish.serving.engine.scheduler import Cuts


class Slot:
    """A cache, and whether somebody has it. read: of its tokens, the first ones that were read as a prompt is."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.taken = False
        self.read = 0
        self.last_used = -1

    def hold(self, length: int) -> None:
        """Its first tokens alone."""
        del self.cache.tokens[length:]
        self.read = min(self.read, length)


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

    def reuse(self, prompt: list[int]) -> int:
        """How many tokens of a prompt need not be read."""
        return self._nearest(prompt)[1]

    def take(self, prompt: list[int] | None) -> Slot:
        """A free slot. It holds as much of the prompt as some slot does; None: nothing.

        The nearest slot itself is taken if it is free and most of its text is in the prompt. Else its beginning is
        copied to the slot that was given back longest ago.
        """
        slot = min((slot for slot in self._slots if not slot.taken), key=lambda slot: slot.last_used)
        source, length = (slot, 0) if prompt is None else self._nearest(prompt)
        if not source.taken and 2 * length >= len(source.cache.tokens):
            slot = source
        if slot is not source and length:
            slot.cache.begin_as(source.cache, length)
            slot.read = min(source.read, length)
        slot.hold(length)
        slot.taken = True
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

    def _nearest(self, prompt: list[int]) -> tuple[Slot, int]:
        """The slot with the longest beginning of the prompt, and how much of that is of use."""

        def length(slot: Slot) -> int:
            tokens = slot.cache.tokens[: slot.read] if self._exact else slot.cache.tokens
            return self._cuts.reusable(shared_length(tokens, prompt), len(prompt))

        best = max(self._slots, key=lambda slot: (length(slot), not slot.taken))
        return best, length(best)
