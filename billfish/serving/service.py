"""What all endpoints share: the engine, its model, and the threads that read requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from billfish.llm.chat_template import ChatTemplate
from billfish.llm.model import Model
from billfish.serving.answers import Mailbox
from billfish.serving.calls import Form, form_of
from billfish.serving.engine import Engine
from billfish.serving.fields import Fields
from billfish.serving.logprobs import Written
from billfish.serving.metrics import Watch
from billfish.serving.options import Limits
from billfish.serving.refusals import Described, Refusal, shown, wrong

Result = TypeVar("Result")
READERS = 2  # threads that parse bodies and encode prompts: a large one does not keep all others waiting
MOST_ANSWERS = 128  # to one request


class Prompt(NamedTuple):
    """tokens: at least one. text: what they stand for."""

    tokens: list[int]
    text: str


class Service:
    """One model behind an engine. name: what requests call it."""

    def __init__(self, engine: Engine, model: Model, name: str) -> None:
        self.engine, self.model, self.name = engine, model, name
        vocabulary = min(model.config.vocabulary, len(model.tokenizer.pieces))  # matrices may have more rows
        answers = min(engine.streams + engine.queue_limit, MOST_ANSWERS)
        self.limits = Limits(engine.context, vocabulary, answers)
        self.watch = Watch()
        self.closing = False
        self._since = int(time.time())
        self._readers = ThreadPoolExecutor(READERS, "billfish-reader")

    @cached_property
    def mailbox(self) -> Mailbox:
        """For the loop that runs."""
        return Mailbox(asyncio.get_running_loop())

    async def read(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """The result of a function that takes long, outside of the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *arguments)

    @cached_property
    def form(self) -> Form | None:
        """How the model's chat template writes calls of functions, if it does."""
        return None if self.model.template is None else form_of(self.model.template)

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.model.tokenizer.pieces))

    def template(self, call: str) -> ChatTemplate:
        """The model's; raises if it has none."""
        if self.model.template is None:
            takes = "prompts at /v1/completions: this model has no chat template"
            raise wrong(call, "messages", Described("messages"), takes)
        return self.model.template

    def encode(self, call: str, field: str, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text. One that cannot fit is refused before it is encoded, which takes long.

        special: as in :meth:`billfish.checkpoints.tokenizer.tokenizer.Tokenizer.encode`.
        """
        context = self.limits.context
        if len(text) > context * self._longest:
            takes = f"at most {context} tokens, the context"
            raise wrong(call, field, Described(f"{len(text)} characters"), takes, "context_length_exceeded")
        return self.model.tokenizer.encode(text, special=special)

    def prompts(self, fields: Fields, name: str, *, special: bool = True) -> list[Prompt]:
        """Of a field that holds a text, texts, tokens, or lists of tokens."""
        value = fields.take(name)
        one = isinstance(value, str) or (isinstance(value, list) and value[:1] and type(value[0]) is int)
        items = [value] if one else value
        if not isinstance(items, list) or not items:
            raise fields.wrong(name, value, "a text, a list of tokens, or a list of at least one of them")
        return [
            self._prompt(fields, name if one else f"{name}[{index}]", item, special) for index, item in enumerate(items)
        ]

    def _prompt(self, fields: Fields, place: str, item: object, special: bool) -> Prompt:
        last = self.limits.vocabulary - 1
        takes = f"a text, or a list of tokens from 0 to {last}, with at least one token"
        if isinstance(item, str):
            prompt = Prompt(self.encode(fields.call, fields.at(place), item, special=special), item)
        elif isinstance(item, list):
            odd = [token for token in item if type(token) is not int or not 0 <= token <= last]
            if odd:
                raise fields.wrong(place, Described(f"{shown(odd[0])} among tokens"), takes)
            prompt = Prompt(item, self.model.tokenizer.decode(item))
        else:
            raise fields.wrong(place, item, takes)
        if not prompt.tokens:
            raise fields.wrong(place, item, takes)
        return prompt

    def written(self, alternatives: int | None) -> Written | None:
        """How tokens are told, where their probabilities are asked for."""
        return None if alternatives is None else Written(self.model.tokenizer.pieces)

    def check_name(self, call: str, name: str | None) -> None:
        """Raises 404 for the name of another model. Without one, this one is meant."""
        if name is not None and name != self.name:
            refusal = wrong(call, "model", name, self.name, "model_not_found")
            raise Refusal(404, str(refusal), refusal.param, refusal.code)

    def record(self) -> dict[str, Any]:
        """The model, as OpenAI lists it."""
        return {"id": self.name, "object": "model", "created": self._since, "owned_by": "billfish"}

    def close(self) -> None:
        """The threads end. The engine is closed by whoever made it."""
        self._readers.shutdown(wait=False, cancel_futures=True)
