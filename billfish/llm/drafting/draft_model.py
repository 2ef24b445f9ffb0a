"""A small model that drafts for a large one with the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from billfish.checkpoints.tokenizer.tokenizer import Tokenizer
from billfish.core.errors import DataError, failure
from billfish.llm.decoder_base import Decoder
from billfish.llm.drafting.drafter import Drafter
from billfish.llm.sampler import Sampling


class ModelDrafter(Drafter):
    """Decodes greedily, with a KV cache of its own."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._cache = decoder, decoder.cache()

    def draft(self, sequence: Sequence[int], most: int) -> list[int]:
        drafted, known = list[int](), list(sequence)
        sampler = Sampling().sampler()
        while len(drafted) < most and len(known) < self._decoder.config.context:
            token, _ = self._decoder.go_on(self._cache, known, sampler, self._decoder.usual)
            drafted.append(token)
            known.append(token)
        return drafted


def check_vocabulary(call: str, tokenizer: Tokenizer, other: Tokenizer) -> None:
    """Raises unless the tokens of a draft model, `other`, are the model's."""
    if list(tokenizer.pieces[: len(other.pieces)]) != list(other.pieces):
        problem = f"the draft model has another vocabulary ({len(other.pieces)} tokens, not {len(tokenizer.pieces)})"
        if len(other.pieces) == len(tokenizer.pieces):
            problem = "the draft model has another vocabulary"
        raise DataError(failure(call, problem, "Draft with a smaller model of the same family."))
