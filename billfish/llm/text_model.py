"""What a model's files say apart from its weights: tokenizer, chat template, sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.tokenizer.tokenizer import Tokenizer
from billfish.core.errors import ModelError, failure
from billfish.llm.chat_template import ChatTemplate
from billfish.llm.model_files import Source, open_source
from billfish.models import describe
from billfish.models.description import Model as Description

ROLES = ("bos", "eos")  # tokens that templates write


class TextModel:
    """A model without its weights, for a process that turns text into tokens and back. :class:`billfish.llm.Model` is
    one with weights.

    path: of its files. source: these. config: sizes. tokenizer: encodes and decodes. adapters: numbers
    of LoRA adapters by their names.
    """

    path: Path
    source: Source
    config: Description
    tokenizer: Tokenizer
    adapters: dict[str, int]

    @classmethod
    def open(cls, path: Path) -> TextModel:
        """Read all but the weights."""
        made = cls()
        made.path, made.source = path, open_source(path)
        made.config = describe(made.source.fields, made.source.vocabulary, made.source.tensors)
        made.tokenizer, made.adapters = made.source.tokenizer(), {}
        return made

    @cached_property
    def template(self) -> ChatTemplate | None:
        """What makes a conversation a text, if the model has it. Compiled at first use: not every prompt is a chat."""
        source = self.source.template()
        if source is None:
            return None
        names, roles = self.tokenizer.pieces, self.tokenizer.roles
        return ChatTemplate(source, **{f"{role}_token": names[roles[role]] if role in roles else "" for role in ROLES})

    def check_ranks(self, call: str) -> None:
        """Raise ModelError unless the model rates pairs of texts. call: the name that the error begins with.

        >>> bf.llm.load("model.gguf").config.pooling
        'mean'
        """
        encoder = self.config.encoder
        if encoder is None or encoder.classifier is None or encoder.classifier.output.rows != 1:
            fix = "Compare vectors of embed_text instead."
            raise ModelError(failure(call, f"{self.config.name} has no classifier with one output", fix))

    @staticmethod
    def relevance(logits: Sequence[float] | NDArray[np.float32]) -> float:
        """Return the logit of :meth:`pool` as a probability.

        logits: [1], of a classifier.

            >>> bf.llm.Model.relevance([0.0])
            0.5
        """
        return float(1 / (1 + np.exp(-np.float64(logits[0]))))
