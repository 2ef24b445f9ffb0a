"""What all endpoints share: the engine and its model, threads that read requests, and the way back from the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from billfish.core.errors import readable
from billfish.llm.chat_template import ChatTemplate
from billfish.llm.detokenizer import Piece
from billfish.llm.model import Model
from billfish.serving.api.request_bodies import Limits, Refusal, refuse, shown, too_long, wrong
from billfish.serving.api.tool_calls import Form, form_of
from billfish.serving.engine.engine import Engine

Result = TypeVar("Result")
READERS = 2  # threads that parse bodies and encode prompts: a large one does not keep all others waiting
MOST_ANSWERS = 128  # to one request


class Prompt(NamedTuple):
    """tokens: at least one. text: what they stand for."""

    tokens: list[int]
    text: str


class Mailbox:
    """Where the engine puts pieces. The loop is woken once for all that a step gave: waking costs more than a piece."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pieces: deque[tuple[Callable[[Piece], None], Piece]] = deque()
        self._woken = False

    def put(self, take: Callable[[Piece], None], piece: Piece) -> None:
        """Have the loop call take(piece). Called in the engine's thread."""
        self._pieces.append((take, piece))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: a piece that comes now wakes the loop again
        while self._pieces:
            take, piece = self._pieces.popleft()
            take(piece)


class Service:
    """One model behind an engine. name: what requests call it."""

    def __init__(self, engine: Engine, model: Model, name: str) -> None:
        self.engine, self.model, self.name = engine, model, name
        vocabulary = min(model.config.vocabulary, len(model.tokenizer.pieces))  # matrices may have more rows
        answers = min(engine.streams + engine.queue_limit, MOST_ANSWERS)
        self.limits = Limits(engine.context, model.config.context, vocabulary, answers)
        self.first_tokens, self.first_token_seconds = 0, 0.0  # how many there were, and after how long together
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

    def first_token(self, seconds: float) -> None:
        """The first piece of an answer has come, so long after its request was read. The loop alone calls this."""
        self.first_tokens += 1
        self.first_token_seconds += seconds

    def template(self) -> ChatTemplate:
        """The model's; raises if it has none."""
        if self.model.template is None:
            raise refuse("messages", "This model has no chat template. Send a prompt to /v1/completions.")
        return self.model.template

    def encode(self, field: str, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text. One that cannot fit is refused before it is encoded, which takes long.

        special: as in :meth:`billfish.checkpoints.tokenizer.tokenizer.Tokenizer.encode`.
        """
        if len(text) > self.limits.context * self._longest:
            raise too_long(field, f"{len(text)} characters", self.limits)
        return self.model.tokenizer.encode(text, special=special)

    def prompts(self, field: str, value: str | list[Any], *, most: int, special: bool = True) -> list[Prompt]:
        """Of a field that holds a text, texts, tokens, or lists of tokens. They are counted before they are encoded,
        and the first that does not fit is the last that is encoded."""
        one = isinstance(value, str) or (value[:1] and type(value[0]) is int)
        items = [value] if one else value
        if not items:
            raise wrong(field, "empty", "a string, a list of tokens, or a list of them")
        if len(items) > most:
            raise wrong(field, f"a list of {len(items)}", f"at most {most}")
        places = [field] if one else [f"{field}[{index}]" for index in range(len(items))]
        return [self._prompt(place, item, special) for place, item in zip(places, items, strict=True)]

    def _prompt(self, place: str, item: object, special: bool) -> Prompt:
        last = self.limits.vocabulary - 1
        accepted = f"a string, or a list of tokens from 0 to {last}, with at least one token"
        if isinstance(item, str):
            prompt = Prompt(self.encode(place, item, special=special), item)
        elif isinstance(item, list):
            for token in item:
                if type(token) is not int or not 0 <= token <= last:
                    raise refuse(place, f"{place} has the token {shown(token)}; expected integers from 0 to {last}.")
            prompt = Prompt(item, "")
        else:
            raise wrong(place, shown(item), accepted)
        if not prompt.tokens:
            raise wrong(place, shown(item), accepted)
        if len(prompt.tokens) > self.limits.context:
            raise too_long(place, f"{len(prompt.tokens)} tokens", self.limits)
        return prompt if prompt.text else Prompt(prompt.tokens, self.model.tokenizer.decode(prompt.tokens))

    def check_name(self, name: str | None) -> None:
        """Raises 404 for the name of another model. Without one, this one is meant."""
        if name is not None and name != self.name:
            shown_name = readable(json.dumps(name, ensure_ascii=False))
            message = f"There is no model {shown_name}. This server has {json.dumps(self.name, ensure_ascii=False)}."
            raise Refusal(404, message, "model", "model_not_found")

    def record(self) -> dict[str, Any]:
        """The model, as OpenAI lists it."""
        return {"id": self.name, "object": "model", "created": self._since, "owned_by": "billfish"}

    def close(self) -> None:
        """The threads end. The engine is closed by whoever made it."""
        self._readers.shutdown(wait=False, cancel_futures=True)
