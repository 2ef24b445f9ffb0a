"""What conversations need to know of a model: its chat template, how that writes, and its control tokens."""

from __future__ import annotations

import threading
from functools import cached_property

from billfish.checkpoints.tokenizer.tokenizer import CONTROL
from billfish.llm.chat_template import ChatTemplate
from billfish.llm.control_names import ControlNames
from billfish.llm.conversation.derive import derive
from billfish.llm.conversation.syntax import ChatSyntax
from billfish.llm.text_model import TextModel


class ChatTexts:
    """All of it is found out when it is first asked for."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self.vocabulary = min(model.config.vocabulary, len(model.tokenizer.pieces))  # matrices may have more rows
        self._deriving = threading.Lock()

    @property
    def template(self) -> ChatTemplate | None:
        """The model's."""
        return self._model.template

    @property
    def syntax(self) -> ChatSyntax:
        """How the model's chat template writes thoughts and calls of functions."""
        with self._deriving:  # it takes a while: no two threads do it
            return self._syntax

    @cached_property
    def _syntax(self) -> ChatSyntax:
        return ChatSyntax() if self.template is None else derive(self.template)

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Control tokens by their names."""
        tokenizer = self._model.tokenizer
        kinds = enumerate(tokenizer.kinds[: self.vocabulary])
        return {tokenizer.pieces[token]: token for token, kind in kinds if kind == CONTROL}

    def tokens(self, mark: str) -> list[int]:
        """The tokens of a text that the template writes, with names of control tokens."""
        return self._model.tokenizer.encode(mark, start=False)

    @cached_property
    def marks(self) -> frozenset[int]:
        """Control tokens that mark thoughts and calls. They are part of the text that is read."""
        names = self.syntax.mark_texts()
        ends = self._model.tokenizer.ends
        found = {token for name, token in self.control_tokens.items() if name and any(name in text for text in names)}
        return frozenset(found - set(ends))

    @cached_property
    def control_names(self) -> ControlNames:
        """Names that are no control tokens where somebody writes them."""
        marks = {self._model.tokenizer.pieces[token] for token in self.marks}
        return ControlNames(self._model.tokenizer, marks)
