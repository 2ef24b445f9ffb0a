"""From the engine's pieces to HTTP: answers in one piece, or as server-sent events, for as long as the client is there.

Events are written by hand: a library would add tasks and objects to each token.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from billfish.core.errors import DataError
from billfish.llm.detokenizer import Alternative, Piece, Token
from billfish.llm.grammar import Grammar
from billfish.serving.api.request_bodies import Options, Refusal, refuse
from billfish.serving.api.service import Service
from billfish.serving.engine.requests import QueueFull, Request, ServerClosing, Ticket

Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]
encode = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """Nobody waits for the answer."""


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What an engine that takes nothing more raises becomes an HTTP answer."""
    try:
        yield
    except QueueFull as error:
        raise Refusal(429, str(error), None, "queue_full", retry_after="1") from None
    except ServerClosing as error:
        raise Refusal(503, str(error), None, "server_closing", retry_after="5") from None


@contextlib.contextmanager
def schema_errors(field: str) -> Iterator[None]:
    """A schema that cannot be used becomes 400 for its field."""
    try:
        yield
    except DataError as error:
        raise refuse(field, f"{field} cannot be used: {str(error).partition(': ')[2]}") from None


def stopped() -> Refusal:
    """For an answer that the server's end has cancelled."""
    return Refusal(503, "The server is shutting down. Retry later.", None, "server_closing")


async def gone(receive: Receive) -> None:
    """Returns when the client has closed its connection. The request's body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(future: Future[Result], receive: Receive) -> Result:
    """The result of a future, which is cancelled when the client goes."""
    asked, watch = asyncio.wrap_future(future), asyncio.ensure_future(gone(receive))
    both: list[asyncio.Future[Any]] = [asked, watch]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            raise ClientGone
        if asked.cancelled():
            raise stopped()
        return asked.result()
    finally:
        watch.cancel()
        asked.cancel()


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(encode(value), status, headers, "application/json")


async def answers(
    service: Service, requests: Sequence[Request], receive: Receive, tickets: list[Ticket]
) -> AsyncGenerator[list[tuple[int, Piece]], None]:
    """Answer requests. Yields once when all are submitted, then what has come, as (number of the request, piece).

    tickets: gets those of the requests. Leaving cancels what still runs. ClientGone is raised when the client has
    closed its connection.
    """
    came: list[tuple[int, Piece]] = []
    running, first, started = len(requests), True, time.perf_counter()
    something = asyncio.Event()
    watch = asyncio.ensure_future(gone(receive))
    watch.add_done_callback(lambda _: something.set())
    put = service.mailbox.put

    def take(index: int, piece: Piece) -> None:
        nonlocal running, first
        if first:
            first = False
            service.first_token(time.perf_counter() - started)
        running -= bool(piece.finished)
        came.append((index, piece))
        something.set()

    def submit() -> None:
        with refusals():
            for index, request in enumerate(requests):
                tickets.append(service.engine.submit(request, partial(put, partial(take, index))))

    try:
        await service.read(submit)  # it may wait for the engine
        yield []
        while running or came:
            await something.wait()
            something.clear()
            if watch.done():
                raise ClientGone
            batch, came[:] = list(came), []
            for _, piece in batch:
                if piece.finished == "failed":
                    raise Refusal(500, piece.error, None, "generation_failed")
                if piece.finished == "cancelled":
                    raise stopped()
            yield batch
    finally:
        watch.cancel()
        for ticket in tickets:
            ticket.cancel()  # the engine ignores it for answers that are over


class Written:
    """Tokens as clients read them. pieces: of the vocabulary, which name the tokens that add nothing to a text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def of_chat(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Of a chat's answer: an object for each token."""
        return {
            "content": [
                {**self._entry(token), "top_logprobs": [self._entry(each) for each in token.top]} for token in tokens
            ]
        }

    def of_completion(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Of a completion: a list for each property. The chosen token is among the best ones in any case."""
        return {
            "tokens": [self._text(token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._best(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _best(self, token: Token) -> dict[str, float | None]:
        return {self._text(each): each.logprob for each in token.top} | {self._text(token): token.logprob}

    def _entry(self, token: Token | Alternative) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": token.logprob, "bytes": list(token.data)}

    def _text(self, token: Token | Alternative) -> str:
        """Part of a character is written as its bytes, so that different tokens stay different."""
        try:
            return token.data.decode() or self._pieces[token.id]
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def written(service: Service, alternatives: int | None) -> Written | None:
    """How tokens are told, where their probabilities are asked for."""
    return None if alternatives is None else Written(service.model.tokenizer.pieces)


class Choice(ABC):
    """One answer: pieces of the engine in, OpenAI's JSON out."""

    finish_reason: str | None = None

    @abstractmethod
    def first(self) -> dict[str, Any] | None:
        """What a stream says before anything has come: a choice without its index."""

    @abstractmethod
    def take(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """What a stream says of a piece."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The choice of an answer in one piece."""


@dataclass(frozen=True)
class Asked:
    """A request that was read. choices: one for each of the engine's requests. prompts: how many texts are answered,
    each by as many neighbouring requests. schema: what all answers must be, and the field that says so; it is compiled
    before the requests are submitted. tickets: those of the requests, when they are submitted."""

    body: Options
    requests: Sequence[Request]
    choices: Sequence[Choice]
    prompts: int = 1
    schema: tuple[Grammar, str] | None = None
    tickets: list[Ticket] = field(default_factory=list)

    def tokens(self) -> tuple[int, int]:
        """Tokens of prompts and of answers so far. A prompt counts once, however many answers it has."""
        return sum(each.prompt_tokens for each in self.firsts()), sum(each.completion_tokens for each in self.tickets)

    def firsts(self) -> list[Ticket]:
        """The ticket of the first answer to each prompt."""
        return self.tickets[:: len(self.requests) // self.prompts]


async def respond(service: Service, asked: Asked, receive: Receive) -> ASGIApp:
    """The HTTP answer."""
    if asked.schema is not None:
        grammar, field = asked.schema
        with refusals(), schema_errors(field):
            made = await while_there(service.engine.compile(grammar), receive)
        asked = replace(asked, requests=[replace(request, grammar=made) for request in asked.requests])
    if asked.body.stream:
        return Events(_events(service, asked, receive))
    async with contextlib.aclosing(answers(service, asked.requests, receive, asked.tickets)) as pieces:
        async for came in pieces:
            for index, piece in came:
                for _ in asked.choices[index].take(piece):
                    pass
    choices = [{"index": index, **choice.whole()} for index, choice in enumerate(asked.choices)]
    head = _head(service, asked, asked.body.kind)
    return json_response({**head, "choices": choices, "usage": _usage(asked)})


async def _events(service: Service, asked: Asked, receive: Receive) -> AsyncGenerator[bytes, None]:
    """The events, several together where several pieces have come."""
    head = _head(service, asked, asked.body.chunk)
    include_usage = asked.body.stream_options is not None and asked.body.stream_options.include_usage
    if include_usage:
        head["usage"] = None

    def encoded(index: int, parts: Iterable[dict[str, Any] | None]) -> Iterator[bytes]:
        for part in parts:
            if part is not None:
                yield event({**head, "choices": [{"index": index, **part}]})

    async with contextlib.aclosing(answers(service, asked.requests, receive, asked.tickets)) as pieces:
        await anext(pieces)
        yield b"".join(data for index, each in enumerate(asked.choices) for data in encoded(index, [each.first()]))
        async for came in pieces:
            data = b"".join(one for index, piece in came for one in encoded(index, asked.choices[index].take(piece)))
            if data:
                yield data
    if include_usage:
        yield event({**head, "choices": [], "usage": _usage(asked)})
    yield DONE


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: %s\n\n" % encode(value)


class Events:
    """An answer of events. What is refused before the first one is an answer of its own, and later an event."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
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
    identifier = f"{asked.body.prefix}-{secrets.token_hex(12)}"
    return {"id": identifier, "object": kind, "created": int(time.time()), "model": service.name}


def _usage(asked: Asked) -> dict[str, Any]:
    prompt, completion = asked.tokens()
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(ticket.cached_tokens for ticket in asked.firsts())},
    }
