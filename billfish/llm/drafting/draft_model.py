"""A small model that drafts for a large one with the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from billfish.checkpoints.tokenizer.tokenizer import Tokenizer
from billfish.core.errors import DataError, failure
from billfish.llm.decoder_base import Decoder, Passage
from billfish.llm.drafting.drafter import Drafter
from billfish.llm.kv_cache import shared_length
from billfish.llm.sampler import Sampling


class ModelDrafter(Drafter):
    """Decodes greedily, with a KV cache of its own."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._cache = decoder, decoder.cache()

    def draft(self, sequence: Sequence[int], most: int) -> list[int]:
        return self.draft_together([(self, sequence, most)])[0]

    @classmethod
    def draft_together(cls, asked: Sequence[tuple[ModelDrafter, Sequence[int], int]]) -> list[list[int]]:
        """The next token of all sequences in one pass. All drafters have the same model."""
        decoder, sampler = asked[0][0]._decoder, Sampling().sampler()
        ends = [min(len(sequence) + most, decoder.config.context) for _, sequence, most in asked]
        known = [list(sequence) for _, sequence, _ in asked]
        while going := [i for i, end in enumerate(ends) if len(known[i]) < end]:
            passages = list[Passage]()
            for i in going:
                cache = asked[i][0]._cache
                there = cache.rollback(shared_length(cache.tokens, known[i][:-1]))
                passages.append((cache, known[i][there:]))
            for i, token in zip(going, decoder.choose(passages, [sampler] * len(going), decoder.usual), strict=True):
                known[i].append(token)
        return [tokens[len(sequence) :] for tokens, (_, sequence, _) in zip(known, asked, strict=True)]


def check_vocabulary(call: str, tokenizer: Tokenizer, other: Tokenizer) -> None:
    """Raises unless the tokens of a draft model, `other`, are the model's."""
    if list(tokenizer.pieces[: len(other.pieces)]) != list(other.pieces):
        problem = f"the draft model has another vocabulary ({len(other.pieces)} tokens, not {len(tokenizer.pieces)})"
        if len(other.pieces) == len(tokenizer.pieces):
            problem = "the draft model has another vocabulary"
        raise DataError(failure(call, problem, "Draft with a smaller model of the same family."))
