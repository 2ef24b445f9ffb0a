"""What all endpoints share: the model's texts, the way to its engine, and threads that read requests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from billfish.core.errors import ModelError, readable
from billfish.llm.chat_template import ChatTemplate
from billfish.llm.conversation.chat_texts import ChatTexts
from billfish.llm.conversation.syntax import ChatSyntax
from billfish.llm.sampling_defaults import sampling_defaults
from billfish.llm.text_model import TextModel
from billfish.serving.api.request_bodies import Limits, Refusal, refuse, shown, too_long, wrong
from billfish.serving.ipc.client import EngineClient

Result = TypeVar("Result")
Inputs = str | list[Any] | dict[str, Any]  # of one prompt or of several
READERS = 2  # threads that parse bodies and encode prompts: a large one does not keep all others waiting
MOST_ANSWERS = 128  # to one request
# Tokens of infill, by their names: before the text, before what follows it, and before what is between them.
INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


class Prompt(NamedTuple):
    """tokens: at least one. text: what they stand for."""

    tokens: list[int]
    text: str


class EngineFacts(NamedTuple):
    """What requests need to know about the engine. streams, context, queue: its settings. nbytes: of the weights."""

    streams: int
    context: int
    queue: int
    nbytes: int


class Service:
    """One model and the way to its engine. name: what requests call it."""

    def __init__(
        self,
        client: EngineClient,
        model: TextModel,
        facts: EngineFacts,
        name: str,
        *,
        strict_fields: bool = False,
        effort: str | None = None,
        budget: int | None = None,
        verbose: bool = False,
    ) -> None:
        """client: asks the engine. strict_fields: unknown fields of a body are refused. effort, budget: of reasoning,
        for requests that name none. verbose: every chat is told its prompt."""
        self.client, self.model, self.facts, self.name = client, model, facts, name
        self.strict_fields, self.effort, self.budget, self.verbose = strict_fields, effort, budget, verbose
        vocabulary = min(model.config.vocabulary, len(model.tokenizer.pieces))  # matrices may have more rows
        answers = min(facts.streams + facts.queue, MOST_ANSWERS)
        self.limits = Limits(facts.context, model.config.context, vocabulary, answers)
        self.chat = ChatTexts(model)
        self._since = int(time.time())
        self._readers = ThreadPoolExecutor(READERS, "billfish-reader")

    async def read(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """The result of a function that takes long, outside of the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *arguments)

    @property
    def syntax(self) -> ChatSyntax:
        """How the model's chat template writes thoughts and calls of functions."""
        return self.chat.syntax

    @cached_property
    def defaults(self) -> dict[str, float]:
        """Sampling settings of requests that have none."""
        return sampling_defaults(self.model)

    @cached_property
    def infill(self) -> tuple[int, int, int] | None:
        """The tokens before a text, before what follows it, and before what is between them, if the model has them."""
        known = {piece: token for token, piece in enumerate(self.model.tokenizer.pieces[: self.limits.vocabulary])}
        for first, second, third in INFILL:
            if first in known and second in known and third in known:
                return known[first], known[second], known[third]
        return None

    def warm_up(self) -> None:
        """Find out what the first chat needs, beside the loop."""
        self._readers.submit(lambda: self.chat.marks)

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.model.tokenizer.pieces))

    def template(self, place: str = "messages") -> ChatTemplate:
        """The model's; raises if it has none."""
        if self.model.template is None:
            raise refuse(place, "This model has no chat template. Send a prompt to /v1/completions.")
        return self.model.template

    def check_length(self, field: str, turns: Sequence[object]) -> None:
        """Raises for more messages than the context has tokens: each has a token at least."""
        if len(turns) > self.limits.context:
            raise too_long(field, f"{len(turns)} messages", self.limits)

    def encode(self, field: str, text: str, *, special: bool = True, start: bool = True) -> list[int]:
        """The tokens of a text. One that cannot fit is refused before it is encoded, which takes long.

        special, start: as in :meth:`billfish.checkpoints.tokenizer.tokenizer.Tokenizer.encode`.
        """
        self._check_characters(field, len(text))
        return self.model.tokenizer.encode(text, special=special, start=start)

    def _check_characters(self, place: str, count: int) -> None:
        if count > self.limits.context * self._longest:
            raise too_long(place, f"{count} characters", self.limits)

    def prompts(self, field: str, value: Inputs, *, most: int, whole: bool = False) -> list[Prompt]:
        """Of a field that holds a text, texts, tokens, or lists of tokens. As llama.cpp's server, it takes texts among
        the tokens of a prompt, and objects that have a text. They are counted before they are encoded, and the first
        that does not fit is the last that is encoded. whole: they are embedded, so control tokens are no
        part of them, and the model's are around them."""
        one = isinstance(value, (str, dict)) or (value[:1] and type(value[0]) is int)
        items = [value] if one else value
        if not items:
            raise wrong(field, "empty", "a string, a list of tokens, or a list of them")
        if len(items) > most:
            raise wrong(field, f"a list of {len(items)}", f"at most {most}")
        places = [field] if one else [f"{field}[{index}]" for index in range(len(items))]
        return [self._prompt(place, item, whole) for place, item in zip(places, items, strict=True)]

    def pairs(self, field: str, query: str, texts: list[str]) -> list[Prompt]:
        """A query with each of the texts, for a model that scores them together."""
        try:
            self.model.check_ranks("rerank")
        except ModelError as error:
            raise refuse("model", str(error)) from None
        prompts = []
        for index, text in enumerate(texts):
            place = f"{field}[{index}]"
            self._check_characters(place, len(query) + len(text))
            tokens = self.model.tokenizer.encode_pair(query, text)
            if len(tokens) > self.limits.context:
                raise too_long(place, f"{len(tokens)} tokens with the query", self.limits)
            prompts.append(Prompt(tokens, text))
        return prompts

    def _prompt(self, place: str, item: object, whole: bool) -> Prompt:
        last = self.limits.vocabulary - 1
        accepted = f"a string, or a list of tokens from 0 to {last}, with at least one token"
        if isinstance(item, dict):
            item = text_of_object(place, item)
        if isinstance(item, str):
            self._check_characters(place, len(item))
            tokenizer = self.model.tokenizer
            prompt = Prompt(tokenizer.encode_whole(item) if whole else tokenizer.encode(item), item)
        elif isinstance(item, list):
            tokens = list[int]()
            for part in item:
                tokens += self.encode(place, part, start=not tokens) if isinstance(part, str) else [part]
            item = tokens
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

    def is_named(self, name: str | None) -> bool:
        """Whether a request means this model. Without a name it does."""
        own = (self.name, f"{self.name}:latest")  # Ollama's clients add a version
        return name is None or name in own or name in self.model.adapters

    def check_name(self, name: str) -> None:
        """Raises 404 for the name of another model."""
        if not self.is_named(name):
            shown_name = readable(json.dumps(name, ensure_ascii=False))
            message = f"There is no model {shown_name}. This server has {json.dumps(self.name, ensure_ascii=False)}."
            raise Refusal(404, message, "model", "model_not_found")

    def record(self, name: str | None = None) -> dict[str, Any]:
        """The model, or one of its adapters, as OpenAI lists it."""
        record = {"id": self.name, "object": "model", "created": self._since, "owned_by": "billfish"}
        return record if name not in self.model.adapters else {**record, "id": name, "parent": self.name}

    def records(self) -> list[dict[str, Any]]:
        """The model and its adapters."""
        return [self.record(), *map(self.record, self.model.adapters)]

    def close(self) -> None:
        """The threads end. The engine is closed by whoever made it."""
        self._readers.shutdown(wait=False, cancel_futures=True)


def text_of_object(place: str, item: Mapping[str, Any]) -> str:
    """Of llama.cpp's `{"prompt_string": ...}` and `{"content": [{"type": "text", "text": ...}]}`."""
    parts = item.get("content", ())
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if set(item) == {"prompt_string"} and isinstance(item["prompt_string"], str):
        return item["prompt_string"]
    whole = set(item) == {"content"} and isinstance(parts, list) and 0 < len(texts) == len(parts)
    if whole and all(isinstance(text, str) for text in texts):
        return "".join(map(str, texts))
    raise wrong(place, shown(item), "prompt_string with a text, or content with parts of type text; no images or audio")
