"""The MTP block of a model drafts for it: one layer, on the hidden state behind the last token."""

from __future__ import annotations

from collections.abc import Sequence

from billfish.llm.decoder_base import MtpDecoder
from billfish.llm.drafting.drafter import Drafter
from billfish.llm.kv_cache import Cache, HiddenStates, shared_length

PIECE = 256  # tokens of a text that are fed at once: the answers of others wait meanwhile


class MtpDrafter(Drafter):
    """Feeds the block all tokens of the sequence, each with the model's hidden state before it, and then its own tokens
    with its own hidden states."""

    acceptance = (0.7,)

    def __init__(self, mtp: MtpDecoder, width: int) -> None:
        """width: of hidden states."""
        self._mtp, self._cache, self._width = mtp, mtp.cache(), width
        self._hidden = HiddenStates(width)

    def follow(self, cache: Cache) -> None:
        """States that an earlier answer has left in the cache are those of a common beginning."""
        cache.hidden = cache.hidden or HiddenStates(self._width)
        self._hidden = cache.hidden

    def draft(self, sequence: Sequence[int], most: int) -> list[int]:
        mtp, cache, fed = self._mtp, self._cache, list(sequence[1:])
        there = cache.rollback(shared_length(cache.tokens, fed[:-1]))
        if len(fed) > there + PIECE:
            end = there + PIECE
            mtp.run(cache, fed[there:end], mtp.normalize_model(self._hidden.of(there, end)))
            return []
        states = mtp.run(cache, fed[there:], mtp.normalize_model(self._hidden.of(there, len(fed))))[-1:]
        drafted = [int(mtp.logits(states)[0].argmax())]
        while len(drafted) < most:
            states = mtp.run(cache, drafted[-1:], mtp.normalize(states))
            drafted.append(int(mtp.logits(states)[0].argmax()))
        cache.rollback(len(fed))  # the model's hidden states take the place of the block's
        return drafted
