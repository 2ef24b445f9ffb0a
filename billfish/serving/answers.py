"""Answers on their way from the engine's thread to the event loop, for as long as the client is there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from starlette.types import Receive

from billfish.core.errors import complaint
from billfish.serving.grammar import Grammar
from billfish.serving.refusals import Refusal
from billfish.serving.requests import Piece, QueueFull, Request, ServerClosing, Ticket

if TYPE_CHECKING:
    from billfish.serving.grammar_compiler import CompiledGrammar
    from billfish.serving.service import Service


class ClientGone(Exception):
    """Nobody waits for the answer."""


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


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What an engine that takes nothing more raises becomes an HTTP answer."""
    try:
        yield
    except QueueFull as error:
        raise Refusal(429, str(error), None, "queue_full", retry_after="1") from None
    except ServerClosing as error:
        raise Refusal(503, str(error), None, "server_closing", retry_after="5") from None


def stopped() -> Refusal:
    """For an answer that the server's end has cancelled."""
    message = complaint("serve", "the answer", "the server's end", "another try, at a server that runs")
    return Refusal(503, message, None, "server_closing")


async def gone(receive: Receive) -> None:
    """Returns when the client has closed its connection. The request's body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def compiled(service: Service, grammar: Grammar, receive: Receive) -> CompiledGrammar:
    """The engine's grammar. One that still waits is given up when the client goes."""
    with refusals():
        compiling = asyncio.wrap_future(service.engine.compile(grammar))
        watch = asyncio.ensure_future(gone(receive))
        both: list[asyncio.Future[Any]] = [compiling, watch]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not compiling.done():
                raise ClientGone
            return compiling.result()
        finally:
            watch.cancel()
            compiling.cancel()


class Answers:
    """The answers to the engine's requests of one HTTP request.

    Inside `async with` they run; an iteration gives what has come since the last one, as (number of the answer, piece).
    Leaving it cancels what still runs. ClientGone is raised when the client has closed its connection.
    """

    def __init__(self, service: Service, requests: Sequence[Request], receive: Receive) -> None:
        self.tickets: list[Ticket] = []
        self._service, self._requests = service, requests
        self._running = len(requests)
        self._came: list[tuple[int, Piece]] = []
        self._something = asyncio.Event()
        self._watch = asyncio.ensure_future(gone(receive))
        self._watch.add_done_callback(lambda _: self._something.set())
        self._started, self._is_first = time.perf_counter(), True

    async def __aenter__(self) -> Answers:
        try:
            await self._service.read(self._submit, self._service.mailbox.put)  # it may wait for the engine
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> list[tuple[int, Piece]]:
        if not self._running and not self._came:
            raise StopAsyncIteration
        await self._something.wait()
        self._something.clear()
        if self._watch.done():
            raise ClientGone
        came, self._came = self._came, []
        for _, piece in came:
            if piece.finished == "failed":
                raise Refusal(500, piece.error, None, "generation_failed")
            if piece.finished == "cancelled":
                raise stopped()
        return came

    def _submit(self, put: Callable[[Callable[[Piece], None], Piece], None]) -> None:
        with refusals():
            for index, request in enumerate(self._requests):
                ticket = self._service.engine.submit(request, partial(put, partial(self._take, index)))
                self.tickets.append(ticket)

    def _take(self, index: int, piece: Piece) -> None:
        if self._is_first:
            self._is_first = False
            self._service.watch.first_token(time.perf_counter() - self._started)
        self._running -= bool(piece.finished)
        self._came.append((index, piece))
        self._something.set()

    def _end(self) -> None:
        """The engine ignores it for answers that are over."""
        self._watch.cancel()
        for ticket in self.tickets:
            ticket.cancel()
