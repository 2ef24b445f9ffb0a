"""A front's side: asks the engine, wherever it runs, and gives what comes back to whoever waits in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.tokenizer.tokenizer import Tokenizer
from billfish.core.errors import BillfishError, DataError, ModelError
from billfish.llm.detokenizer import Piece
from billfish.llm.grammar import Grammar
from billfish.llm.sampler import Scored
from billfish.serving.engine.answer_text import AnswerText
from billfish.serving.engine.requests import Chosen, Drafts, Progress, QueueFull, Request, ServerClosing
from billfish.serving.ipc import messages

FETCH_SECONDS = 10.0
LOST = "The engine has ended."
Take = Callable[[int, Piece | Progress], object]


class SchemaError(DataError):
    """A grammar cannot be compiled."""


class EngineGone(BillfishError, RuntimeError):
    """The engine's process has ended, and with it what it was asked."""


ERRORS: dict[str, type[BillfishError]] = {
    "full": QueueFull,
    "closing": ServerClosing,
    "schema": SchemaError,
    "data": DataError,
    "model": ModelError,
    "gone": EngineGone,
}


class Answers:
    """Answers to one request. take(index, piece) is called in the loop, up to the last piece of each; before the first
    one with the progress of the prefill, for requests that want it.

    cached_tokens, completion_tokens: of each answer, so far. drafts: tokens of each that were drafted and right.
    """

    def __init__(
        self,
        client: EngineClient,
        first: int,
        requests: Sequence[Request],
        take: Take,
        tokenizer: Tokenizer,
    ) -> None:
        self._client, self._first, self._take = client, first, take
        self._texts = [AnswerText(request, tokenizer) for request in requests]
        self.cached_tokens = [0] * len(requests)
        self.drafts = [Drafts()] * len(requests)
        self._running = set(range(len(requests)))  # in the engine

    @property
    def completion_tokens(self) -> int:
        """Of all together."""
        return sum(text.completion_tokens for text in self._texts)

    def tokens_of(self, index: int) -> int:
        """Of one answer, so far."""
        return self._texts[index].completion_tokens

    def progressed(self, id: int, progress: Progress) -> None:
        """The prefill went on."""
        self._take(id - self._first, progress)

    def drafted(self, id: int, drafts: Drafts) -> None:
        """The step whose tokens come next had a draft."""
        self.drafts[id - self._first] = drafts

    def reused(self, id: int, cached: int) -> None:
        """So many tokens of the prompt were not computed again."""
        self.cached_tokens[id - self._first] = cached

    def took(self, id: int, chosen: Chosen) -> None:
        """The engine has chosen a token of an answer."""
        index = id - self._first
        if chosen.finished:
            self._running.discard(index)
            self.cached_tokens[index] = chosen.cached_tokens
        piece = self._texts[index].take(chosen)
        if piece is not None:
            if piece.finished and not chosen.finished:
                self.end(index)
            self._take(index, piece)

    def end(self, index: int, *, enough: bool = True) -> None:
        """Nothing more of an answer is wanted. enough: because it says all that was wanted."""
        if index in self._running:
            self._running.discard(index)
            self._client.drop(self._first + index, enough)

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._client.forget(self._first)
        for index in list(self._running):
            self.end(index, enough=False)


class ServerClient:
    """Asks what is one for the whole server, and tells what is counted. It is the loop's alone, but for `fetch` and
    `keep`. send: set by who connects it."""

    def __init__(self) -> None:
        self.send: Callable[[messages.ToEngine], object] = lambda message: None
        self._next = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.lost = False  # whether the engine's process has ended

    def connect(self, send: Callable[[messages.ToEngine], object]) -> None:
        """Called in the loop. What comes back is given to `receive`, there, too."""
        self._loop, self.send = asyncio.get_running_loop(), send

    async def state(self) -> str:
        """ "ok", "closing" or "failed": what the engine's process says, whose steps this does not wait for. No time is
        too long: a process that other work keeps from answering is busy, not ill."""
        id = self._ids()
        try:
            found: bytes = await self._asked(messages.AskState(id), id)
        except EngineGone:
            return "failed"
        return found.decode()

    async def metrics(self) -> bytes:
        """Of all fronts and the engine, as Prometheus reads them."""
        id = self._ids()
        found: bytes = await self._asked(messages.AskMetrics(id), id)
        return found

    def answered(self, path: str, status: int) -> None:
        """An HTTP answer has begun, of a route."""
        self.send(messages.Answered(path, status))

    def first_piece(self, seconds: float) -> None:
        """The first piece of an answer has come, so long after its request was read."""
        self.send(messages.FirstPiece(seconds))

    def keep(self, key: str, data: bytes) -> None:
        """Keep some bytes for `fetch` of any front."""
        self.send(messages.Keep(key, data))

    def fetch(self, key: str, *, remove: bool = False) -> bytes | None:
        """What is kept, if it is. Called outside of the loop."""
        assert self._loop is not None
        found: Future[bytes | None] = asyncio.run_coroutine_threadsafe(self._fetch(key, remove), self._loop)
        return found.result(FETCH_SECONDS)

    async def _fetch(self, key: str, remove: bool) -> bytes | None:
        id = self._ids()
        found: bytes | None = await self._asked(messages.Fetch(id, key, remove), id)
        return found

    async def _asked(self, message: messages.ToEngine, id: int) -> Any:
        if self.lost:
            raise EngineGone(LOST)
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[id] = waiting
        try:
            self.send(message)
            return await waiting
        except asyncio.CancelledError:
            self.send(messages.Abandon(id))
            raise
        finally:
            self._waiting.pop(id, None)

    def _ids(self, count: int = 1) -> int:
        first, self._next = self._next, self._next + count
        return first

    # ---- what comes back ----------------------------------------------------------------------------------------

    def receive(self, message: messages.ToFront) -> None:
        """A message has come."""
        if isinstance(message, messages.Refused):
            if message.kind == "missing":
                self._resolve(message.id, None)
            else:
                error = ERRORS.get(message.kind, BillfishError)(message.error)
                waiting = self._waiting.get(message.id)
                if waiting is not None and not waiting.done():
                    waiting.set_exception(error)
        elif isinstance(message, messages.Reply):
            self._resolve(message.id, message.data)

    def lose(self) -> None:
        """The engine's process has ended: whoever waits is told."""
        self.lost, self.send = True, lambda message: None
        for waiting in list(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(EngineGone(LOST))

    def _resolve(self, id: int, value: Any) -> None:
        waiting = self._waiting.get(id)
        if waiting is not None and not waiting.done():
            waiting.set_result(value)


class EngineClient(ServerClient):
    """Asks an engine, too."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """tokenizer: makes text of tokens."""
        super().__init__()
        self._tokenizer = tokenizer
        self._answers: dict[int, Answers] = {}

    async def ask(self, requests: Sequence[Request], grammar: Grammar | None, take: Take) -> Answers:
        """Begin answers, all or none. Raises what the engine does, and SchemaError for the grammar."""
        first = self._ids(len(requests))
        answers = Answers(self, first, requests, take, self._tokenizer)
        for id in range(first, first + len(requests)):
            self._answers[id] = answers
        packed = [messages.packed(request) for request in requests]
        try:
            await self._asked(messages.Ask(first, packed, None if grammar is None else grammar.schema), first)
        except BaseException:
            answers.cancel()
            raise
        return answers

    async def embed(self, texts: Sequence[list[int]]) -> list[NDArray[np.float32]]:
        """As :meth:`billfish.serving.engine.engine.Engine.embed`."""
        id = self._ids()
        vectors = await self._asked(messages.Embed(id, list(texts)), id)
        return [np.frombuffer(vector, np.float32) for vector in vectors]

    async def score(self, texts: Sequence[list[int]], alternatives: int) -> list[list[list[Scored]]]:
        """As :meth:`billfish.serving.engine.engine.Engine.score`."""
        id = self._ids()
        found: list[list[list[Scored]]] = await self._asked(messages.Score(id, list(texts), alternatives), id)
        return found

    def drop(self, id: int, enough: bool) -> None:
        """An answer need not go on in the engine."""
        self.send(messages.Cancel(id, enough))

    def forget(self, first: int) -> None:
        """Nobody takes the tokens of answers from `first` on."""
        answers = self._answers.get(first)
        id = first
        while answers is not None and self._answers.get(id) is answers:
            del self._answers[id]
            id += 1

    def receive(self, message: messages.ToFront) -> None:
        """A message has come."""
        if isinstance(message, messages.Step):
            self._take(message)
        elif isinstance(message, messages.Vectors):
            self._resolve(message.id, message.vectors)
        elif isinstance(message, messages.Scores):
            self._resolve(message.id, message.scores)
        elif isinstance(message, messages.Taken):
            self._resolve(message.id, None)
        else:
            super().receive(message)

    def lose(self) -> None:
        """The engine's process has ended: whoever waits is told."""
        super().lose()
        for id, answers in list(self._answers.items()):
            answers.took(id, Chosen(None, (), "failed", LOST))

    def _take(self, step: messages.Step) -> None:
        found, tokens = self._answers.get, step.tokens
        for id, drafts in step.drafts.items():
            answers = found(id)
            if answers is not None:
                answers.drafted(id, Drafts(*drafts))
        for id, cached in step.cached.items():
            answers = found(id)
            if answers is not None:
                answers.reused(id, cached)
        for id, total, cached, processed, seconds in step.progress:
            answers = found(id)
            if answers is not None:
                answers.progressed(id, Progress(total, cached, processed, seconds))
        for at in range(0, len(tokens), 2):
            answers = found(tokens[at])
            if answers is not None:
                answers.took(tokens[at], Chosen(tokens[at + 1]))
        for id, token, best in step.scored:
            answers = found(id)
            if answers is not None:
                answers.took(id, Chosen(token, best))
        for id, last, best, finished, error, cached in step.ended:
            answers = found(id)
            if answers is not None:
                answers.took(id, Chosen(last, best, finished, error, cached))
