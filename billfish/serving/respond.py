"""What chats and completions share after their fields are read: answers in one piece, or as server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from billfish.core.errors import DataError
from billfish.serving.answers import Answers, compiled
from billfish.serving.grammar import Grammar
from billfish.serving.refusals import Described, Refusal, wrong
from billfish.serving.requests import Piece, Request
from billfish.serving.service import Service

DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]


class Choice(ABC):
    """One answer: pieces of the engine in, OpenAI's JSON out."""

    finish_reason: str | None = None

    def take(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """What a stream says of a piece: choices without their index."""
        yield from self.parts(piece)
        if piece.finished:
            yield from self.rest()
            self.finish_reason = self.reason(piece.finished)
            yield self.last()

    def first(self) -> dict[str, Any] | None:
        """What a stream says before anything has come."""
        return None

    @abstractmethod
    def parts(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """What a stream says of a piece's text and tokens."""

    def rest(self) -> Iterator[dict[str, Any]]:
        """What was held back, when the answer is over."""
        return iter(())

    @abstractmethod
    def last(self) -> dict[str, Any]:
        """What a stream says of `finish_reason`."""

    def reason(self, finished: str) -> str:
        """OpenAI's word for why an answer has ended."""
        return finished

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The choice of an answer in one piece."""


@dataclass(frozen=True)
class Schema:
    """What all answers must be, and the field of the request that says so."""

    grammar: Grammar
    call: str
    field: str


@dataclass(frozen=True)
class Asked:
    """A request that was read. choices: one for each of the engine's requests. prompts: how many texts are answered,
    each by as many neighbouring requests. kind, chunk: OpenAI's words for an answer, and for an event of a stream.
    schema: to be compiled before the requests are submitted."""

    requests: Sequence[Request]
    choices: Sequence[Choice]
    prompts: int
    stream: bool
    include_usage: bool
    prefix: str
    kind: str
    chunk: str
    schema: Schema | None = None


async def respond(service: Service, asked: Asked, receive: Receive) -> ASGIApp:
    """The HTTP answer."""
    if asked.schema is not None:
        asked = await _with_grammar(service, asked, asked.schema, receive)
    if asked.stream:
        return Events(_events(service, asked, receive))
    async with Answers(service, asked.requests, receive) as answers:
        async for came in answers:
            for index, piece in came:
                for _ in asked.choices[index].take(piece):
                    pass
    choices = [{"index": index, **choice.whole()} for index, choice in enumerate(asked.choices)]
    head = _head(service, asked, asked.kind)
    return JSONResponse({**head, "choices": choices, "usage": _usage(asked, answers)})


async def _with_grammar(service: Service, asked: Asked, schema: Schema, receive: Receive) -> Asked:
    """The same requests, with the compiled schema as their grammar."""
    try:
        grammar = await compiled(service, schema.grammar, receive)
    except DataError as error:
        raise wrong(schema.call, schema.field, Described(error), "a JSON schema that can be satisfied") from None
    return replace(asked, requests=[replace(request, grammar=grammar) for request in asked.requests])


async def _events(service: Service, asked: Asked, receive: Receive) -> AsyncGenerator[bytes, None]:
    """The events, several together where several pieces have come."""
    head = _head(service, asked, asked.chunk)
    if asked.include_usage:
        head["usage"] = None

    def encoded(index: int, parts: Iterable[dict[str, Any] | None]) -> Iterator[bytes]:
        for part in parts:
            if part is not None:
                yield event({**head, "choices": [{"index": index, **part}]})

    async with Answers(service, asked.requests, receive) as answers:
        yield b"".join(data for index, each in enumerate(asked.choices) for data in encoded(index, [each.first()]))
        async for came in answers:
            data = b"".join(one for index, piece in came for one in encoded(index, asked.choices[index].take(piece)))
            if data:
                yield data
    if asked.include_usage:
        yield event({**head, "choices": [], "usage": _usage(asked, answers)})
    yield DONE


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: %s\n\n" % json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class Events:
    """An answer of events. What is refused before the first one is an answer of its own, and later an event."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            data = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
            try:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Refusal as refusal:
                await send({"type": "http.response.body", "body": event(refusal.body()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _head(service: Service, asked: Asked, kind: str) -> dict[str, Any]:
    identifier = f"{asked.prefix}-{secrets.token_hex(12)}"
    return {"id": identifier, "object": kind, "created": int(time.time()), "model": service.name}


def _usage(asked: Asked, answers: Answers) -> dict[str, Any]:
    """Tokens. A prompt counts once, however many answers it has."""
    firsts = answers.tickets[:: len(asked.requests) // asked.prompts]
    prompt = sum(ticket.prompt_tokens for ticket in firsts)
    completion = sum(ticket.completion_tokens for ticket in answers.tickets)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(ticket.cached_tokens for ticket in firsts)},
    }
