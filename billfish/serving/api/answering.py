"""From the engine's pieces to HTTP: events of an answer, whole or as a stream, for as long as the client is there.

Streams are written by hand: a library would add tasks and objects to each token.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from billfish.core.errors import DataError, ModelError
from billfish.llm.conversation.choice import Choice
from billfish.llm.conversation.events import Event
from billfish.llm.detokenizer import Piece, Token
from billfish.llm.grammar import Grammar
from billfish.llm.sampler import Scored
from billfish.serving.api.request_bodies import Refusal, refuse
from billfish.serving.api.service import Service
from billfish.serving.api.telemetry import Telemetry
from billfish.serving.engine.requests import Progress, QueueFull, Request, ServerClosing
from billfish.serving.ipc.client import Answers, EngineGone, SchemaError

Result = TypeVar("Result")
EVENTS, LINES = "text/event-stream; charset=utf-8", "application/x-ndjson"
ENCODER = msgspec.json.Encoder()
# str.splitlines, and so httpx's iter_lines, ends a line at these characters, which JSON may hold unescaped.
LINE_ENDS = {line_end.encode(): f"\\u{ord(line_end):04x}".encode() for line_end in "\x85\u2028\u2029"}
NO_TEXT = Piece("")


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
    except ModelError as error:  # as from an encoder, which answers nothing
        raise Refusal(400, str(error), "model", "model_cannot") from None
    except EngineGone as error:
        raise Refusal(500, str(error), None, "engine_gone") from None


@contextlib.contextmanager
def schema_errors(field: str, kind: type[DataError] = DataError) -> Iterator[None]:
    """A schema that cannot be used becomes 400 for its field. kind: of the errors that tell so."""
    try:
        yield
    except kind as error:
        raise cannot_be_used(field, str(error)) from None


def cannot_be_used(field: str, error: str) -> Refusal:
    """400 for the field of a schema. error: begins with the name of a call."""
    return refuse(field, f"{field} cannot be used: {error.partition(': ')[2]}")


def stopped() -> Refusal:
    """For an answer that the server's end has cancelled."""
    return Refusal(503, "The server is shutting down. Retry later.", None, "server_closing")


async def gone(receive: Receive) -> None:
    """Returns when the client has closed its connection. The request's body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(asking: Awaitable[Result], receive: Receive) -> Result:
    """What is awaited, which is cancelled when the client goes."""
    asked, watch = asyncio.ensure_future(asking), asyncio.ensure_future(gone(receive))
    both: list[asyncio.Future[Any]] = [asked, watch]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            raise ClientGone
        with refusals():
            return asked.result()
    finally:
        watch.cancel()
        asked.cancel()


def encode(value: object) -> bytes:
    """A value as JSON without any character that ends a line for `str.splitlines`."""
    data = ENCODER.encode(value)
    for line_end, escaped in LINE_ENDS.items():
        if line_end in data:
            data = data.replace(line_end, escaped)
    return data


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(encode(value), status, headers, "application/json")


# ---- what is asked and answered -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Tokens: of prompts, those of them that were cached, of answers, and those of answers that are thoughts. accepted,
    rejected: of answers, those that were drafted and right, and those that were drafted and wrong or not wanted."""

    prompt: int
    cached: int
    completion: int
    thought: int
    accepted: int = 0
    rejected: int = 0

    @property
    def drafted(self) -> dict[str, int]:
        """`accepted` and `rejected`, under OpenAI's names."""
        return {"accepted_prediction_tokens": self.accepted, "rejected_prediction_tokens": self.rejected}


class Format(ABC):
    """Writes answers in the JSON of one API. prompt: the text that messages made. telemetry: of the answers, if the
    client wants some."""

    media = EVENTS
    prompt = ""
    telemetry: Telemetry | None = None

    def __init__(self, stream: bool) -> None:
        """stream: whether the client wants an answer in pieces."""
        self.stream = stream

    @abstractmethod
    def begin(self, choices: Sequence[Choice], prompt_tokens: int) -> bytes:
        """What a stream begins with. prompt_tokens: of all prompts together."""

    @abstractmethod
    def step(self, index: int, choice: Choice, events: Sequence[Event], tokens: Sequence[Token]) -> bytes:
        """What is new in an answer. Its last step has `choice.finish_reason`."""

    @abstractmethod
    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """What a stream ends with."""

    @abstractmethod
    def failed(self, refusal: Refusal) -> bytes:
        """What a stream ends with that cannot go on."""

    @abstractmethod
    def whole(self, choices: Sequence[Choice], usage: Usage) -> object:
        """The JSON of an answer in one piece."""


def event(value: object, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%sdata: %s\n\n" % (head, encode(value))


@dataclass(frozen=True)
class Asked:
    """A request that was read. choices: one for each of the engine's requests. prompts: how many texts are answered,
    each by as many neighbouring requests. grammar: what all answers must be, and the field that says so; it is compiled
    before the requests are submitted. empty: nothing is generated. score: prompts whose own log probabilities are
    wanted, and how many alternatives. answers: those of the requests, when they are submitted."""

    requests: Sequence[Request]
    choices: Sequence[Choice]
    format: Format
    prompts: int = 1
    grammar: tuple[Grammar, str] | None = None
    empty: bool = False
    score: tuple[Sequence[list[int]], int] | None = None
    scores: list[list[list[Scored]]] = field(default_factory=list)
    answers: list[Answers] = field(default_factory=list)

    def tokens(self) -> tuple[int, int]:
        """Tokens of prompts and of answers so far. A prompt counts once, however many answers it has."""
        prompts = self.requests[:: max(1, len(self.requests) // self.prompts)]
        return sum(len(each.prompt) for each in prompts), sum(each.completion_tokens for each in self.answers)

    def usage(self, service: Service) -> Usage:
        """At the end."""
        prompt, completion = self.tokens()
        each = max(1, len(self.requests) // self.prompts)
        cached = sum(sum(answers.cached_tokens[::each]) for answers in self.answers)
        thoughts = [choice.message.thought for choice in self.choices if choice.message.thought]
        thought = sum(len(service.model.tokenizer.encode(each, special=False, start=False)) for each in thoughts)
        drafts = [each for answers in self.answers for each in answers.drafts]
        accepted = min(sum(each.accepted for each in drafts), completion)  # some may come behind a stop text
        rejected = sum(each.drafted for each in drafts) - accepted
        return Usage(prompt, cached, completion, min(thought, completion), accepted, rejected)


# ---- answers ----------------------------------------------------------------------------------------------------


async def pieces_of(service: Service, asked: Asked, receive: Receive) -> AsyncGenerator[list[tuple[int, Piece]], None]:
    """Answer requests. Yields once when all are submitted, then what has come, as (number of the request, piece).

    Leaving cancels what still runs. ClientGone is raised when the client has closed its connection.
    """
    came: list[tuple[int, Piece]] = []
    running, first, started = len(asked.requests), True, time.perf_counter()
    something = asyncio.Event()

    telemetry = asked.format.telemetry

    def take(index: int, piece: Piece | Progress) -> None:
        nonlocal running, first
        if isinstance(piece, Progress):
            if telemetry is not None:
                telemetry.read(index, piece)
            came.append((index, NO_TEXT))
            something.set()
            return
        if telemetry is not None:
            telemetry.token(index)
        if first:
            first = False
            service.client.first_piece(time.perf_counter() - started)
        running -= bool(piece.finished)
        came.append((index, piece))
        something.set()

    grammar, place = asked.grammar or (None, "")
    with schema_errors(place, SchemaError):
        answers = await while_there(service.client.ask(asked.requests, grammar, take), receive)
    watch = asyncio.ensure_future(gone(receive))
    watch.add_done_callback(lambda _: something.set())
    try:
        asked.answers.append(answers)
        if telemetry is not None:
            telemetry.tokens_of = answers.tokens_of
        yield []
        while running or came:
            await something.wait()
            something.clear()
            if watch.done():
                raise ClientGone
            batch, came[:] = list(came), []
            batch = [(index, piece) for index, piece in batch if asked.choices[index].finish_reason is None]
            for _, piece in batch:
                if piece.finished == "failed":
                    raise Refusal(500, piece.error, None, "generation_failed")
                if piece.finished == "refused":
                    raise cannot_be_used(place, piece.error)
                if piece.finished == "cancelled":
                    raise stopped()
            yield batch
    finally:
        watch.cancel()
        answers.cancel()


Step = tuple[int, list[Event], Sequence[Token]]


async def steps_of(service: Service, asked: Asked, receive: Receive) -> AsyncGenerator[Iterable[Step], None]:
    """As `pieces_of`, with what pieces mean. An answer that has said all that is wanted ends. Each step is taken when
    it is iterated over, so that `finish_reason` is not there before the last one."""
    if asked.score is not None:
        asked.scores.extend(await while_there(service.client.score(*asked.score), receive))
    if asked.empty:
        if asked.grammar is not None:  # whether it can be used
            async with contextlib.aclosing(pieces_of(service, asked, receive)) as pieces:
                await anext(pieces)
            asked.answers.clear()
        yield []
        for index, choice in enumerate(asked.choices):
            choice.finish_reason = "length"
            yield [(index, [], ())]
        return
    async with contextlib.aclosing(pieces_of(service, asked, receive)) as pieces:
        async for came in pieces:
            yield _steps(asked, came)


def _steps(asked: Asked, came: Sequence[tuple[int, Piece]]) -> Iterator[Step]:
    for index, piece in came:
        choice = asked.choices[index]
        if choice.finish_reason is None:  # else an earlier piece of the batch has ended it
            events = choice.take(piece)
            if choice.finish_reason is not None and not piece.finished:
                asked.answers[0].end(index)
            yield index, events, piece.tokens


async def respond(service: Service, asked: Asked, receive: Receive) -> ASGIApp:
    """The HTTP answer."""
    if asked.format.stream:
        return Stream(_stream(service, asked, receive), asked.format)
    async with contextlib.aclosing(steps_of(service, asked, receive)) as steps:
        async for came in steps:
            for _ in came:
                pass
    return json_response(asked.format.whole(asked.choices, asked.usage(service)))


async def _stream(service: Service, asked: Asked, receive: Receive) -> AsyncGenerator[bytes, None]:
    """The pieces of a stream, several together where several have come."""
    written = asked.format
    async with contextlib.aclosing(steps_of(service, asked, receive)) as steps:
        await anext(steps)
        yield written.begin(asked.choices, asked.tokens()[0])
        async for came in steps:
            data = b"".join(written.step(index, asked.choices[index], events, tokens) for index, events, tokens in came)
            if data:
                yield data
    yield written.end(asked.choices, asked.usage(service))


class Stream:
    """An answer in pieces. What is refused before the first one is an answer of its own, and later a piece."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], format: Format) -> None:
        self._pieces, self._format = pieces, format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", self._format.media.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would collect events
        ]
        async with contextlib.aclosing(self._pieces) as pieces:
            data = await anext(pieces)
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                async for data in pieces:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Refusal as refusal:
                await send({"type": "http.response.body", "body": self._format.failed(refusal), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
