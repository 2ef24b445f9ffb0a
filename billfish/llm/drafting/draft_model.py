"""A small model that drafts for a large one with the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from billfish.checkpoints.tokenizer.tokenizer import Tokenizer
from billfish.core.errors import DataError, failure
from billfish.llm.decoder_base import Decoder, Passage
from billfish.llm.drafting.drafter import MOST_DRAFTED, Drafter
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
        behind = cls._catch_up(decoder, [(drafter._cache, list(sequence)) for drafter, sequence, _ in asked])
        ends = [
            min(len(sequence) + most * (i not in behind), decoder.config.context)
            for i, (_, sequence, most) in enumerate(asked)
        ]
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

    @staticmethod
    def _catch_up(decoder: Decoder, texts: Sequence[Passage]) -> set[int]:
        """Read what comes before the last token of long texts, a piece in each step, since the answers of others wait
        meanwhile. Returns the texts that are not read yet."""
        left, behind, passages = decoder.prefill_budget(len(texts)), set[int](), list[Passage]()
        for i, (cache, text) in enumerate(texts):
            there = cache.rollback(shared_length(cache.tokens, text[:-1]))
            missing = len(text) - there
            if missing <= MOST_DRAFTED + 1:  # since the last draft
                continue
            if missing > left:
                behind.add(i)
                if left:
                    passages.append((cache, text[there : there + left]))
            left = max(0, left - missing)
        if passages:
            decoder.choose(passages, [], decoder.usual)
        return behind


def check_vocabulary(call: str, tokenizer: Tokenizer, other: Tokenizer) -> None:
    """Raises unless the tokens of a draft model, `other`, are the model's."""
    if list(tokenizer.pieces[: len(other.pieces)]) != list(other.pieces):
        problem = f"the draft model has another vocabulary ({len(other.pieces)} tokens, not {len(tokenizer.pieces)})"
        if len(other.pieces) == len(tokenizer.pieces):
            problem = "the draft model has another vocabulary"
        raise DataError(failure(call, problem, "Draft with a smaller model of the same family."))
