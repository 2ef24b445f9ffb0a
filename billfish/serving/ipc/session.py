"""The engine's side: what a front asks goes to the engine, and what a step gives goes to the front in one message."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from billfish.core.errors import BillfishError, DataError, ModelError, explained
from billfish.llm.grammar import CompiledGrammar, Grammar
from billfish.llm.sampler import Scored
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.requests import Chosen, QueueFull, Request, ServerClosing, Ticket
from billfish.serving.ipc import messages

LOG = logging.getLogger("billfish.serving")
MOST_KEPT, MOST_KEPT_BYTES = 512, 32 * 2**20  # of what fronts keep for each other
# Why something is refused, by the class of the error.
KINDS: tuple[tuple[str, type[BaseException]], ...] = (
    ("full", QueueFull),
    ("closing", ServerClosing),
    ("data", DataError),
    ("model", ModelError),
)


class Kept:
    """Bytes by their keys: the last ones, and no more than MOST_KEPT_BYTES."""

    def __init__(self) -> None:
        self._data: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def put(self, key: str, data: bytes) -> None:
        """The oldest ones go."""
        self.pop(key)
        self._data[key] = data
        self._bytes += len(data)
        while self._data and (len(self._data) > MOST_KEPT or self._bytes > MOST_KEPT_BYTES):
            self._bytes -= len(self._data.popitem(last=False)[1])

    def get(self, key: str) -> bytes | None:
        """What was put, if it is still there."""
        return self._data.get(key)

    def pop(self, key: str) -> bytes | None:
        """What was put, which is forgotten."""
        found = self._data.pop(key, None)
        self._bytes -= len(found or b"")
        return found


class ServerState:
    """What is one for a server, however many processes and models it has.

    answers: HTTP answers by path and status. first_pieces, first_piece_seconds: how many answers had a first piece, and
    after how long together. closing: whether the server shuts down.
    """

    def __init__(self) -> None:
        self.closing = False
        self.answers: Counter[tuple[str, int]] = Counter()
        self.first_pieces, self.first_piece_seconds = 0, 0.0
        self.kept = Kept()


class Host(ServerState):
    """An engine and all of its fronts. Everything but `Session.handle` of different fronts may be called at once.

    metrics: makes the text for Prometheus.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.metrics: Callable[[Host], bytes] = lambda host: b""
        self._sessions: list[Session] = []
        engine.after_step = self._flush

    def open(self, send: Callable[[messages.ToFront], object]) -> Session:
        """A session for one more front. send: called in any thread, and must not block."""
        session = Session(self, send)
        self._sessions = [*self._sessions, session]
        return session

    def close(self, session: Session) -> None:
        """The front has gone: nobody waits for its answers."""
        self._sessions = [each for each in self._sessions if each is not session]
        session.abandon_all()

    def _flush(self) -> None:
        for session in self._sessions:
            session.flush()


class StateSession:
    """What one front asks of the server's state."""

    def __init__(self, state: ServerState, send: Callable[[messages.ToFront], object]) -> None:
        self._state, self._send = state, send
        self.ready = False

    def handle(self, message: messages.ToEngine) -> None:
        """A message has come."""
        state = self._state
        if isinstance(message, messages.Keep):
            state.kept.put(message.key, message.data)
        elif isinstance(message, messages.Fetch):
            found = state.kept.pop(message.key) if message.remove else state.kept.get(message.key)
            missing = messages.Refused(message.id, "missing", "")
            self._send(missing if found is None else messages.Reply(message.id, found))
        elif isinstance(message, messages.Answered):
            state.answers[message.path, message.status] += 1
        elif isinstance(message, messages.FirstPiece):
            state.first_pieces += 1
            state.first_piece_seconds += message.seconds
        elif isinstance(message, messages.Ready):
            self.ready = True


class Session(StateSession):
    """One front's, with an engine."""

    def __init__(self, host: Host, send: Callable[[messages.ToFront], object]) -> None:
        super().__init__(host, send)
        self.host, self._engine = host, host.engine
        self._lock = threading.Lock()  # held for what follows
        self._tickets: dict[int, Ticket | None] = {}  # of answers under way; None while they are submitted
        self._work: dict[int, Future[Any]] = {}  # grammars, texts
        self._tokens: list[int] = []  # the engine's thread alone has these six
        self._scored: list[tuple[int, int, list[Scored]]] = []
        self._ended: list[messages.Ended] = []
        self._drafts: dict[int, tuple[int, int]] = {}
        self._cached: dict[int, int] = {}
        self._progress: list[tuple[int, int, int, int, float]] = []

    # ---- what the front says ------------------------------------------------------------------------------------

    def handle(self, message: messages.ToEngine) -> None:
        """A message has come."""
        host = self.host
        if isinstance(message, messages.Ask):
            self._ask(message)
        elif isinstance(message, messages.Cancel):
            with self._lock:
                ticket = self._tickets.get(message.id)
                if ticket is None:
                    self._tickets.pop(message.id, None)  # `_submit_one` finds that it is not wanted any more
            if ticket is not None:
                ticket.cancel(enough=message.enough)
        elif isinstance(message, messages.Abandon):
            with self._lock:
                work = self._work.pop(message.id, None)
            if work is not None:
                work.cancel()
        elif isinstance(message, messages.Embed):
            self._begin(message.id, partial(self._engine.embed, message.texts), partial(_vectors, message.id))
        elif isinstance(message, messages.Score):
            score = partial(self._engine.score, message.texts, message.alternatives)
            self._begin(message.id, score, lambda scores: messages.Scores(message.id, scores))
        elif isinstance(message, messages.AskState):
            status = "closing" if host.closing else "ok" if self._engine.is_alive else "failed"
            self._send(messages.Reply(message.id, status.encode()))
        elif isinstance(message, messages.AskMetrics):
            self._reply(message.id, lambda: host.metrics(host))
        else:
            super().handle(message)

    def abandon_all(self) -> None:
        """The front has gone."""
        self._send = lambda message: None
        with self._lock:
            tickets, work = list(self._tickets.values()), list(self._work.values())
            self._tickets, self._work = {}, {}
        for ticket in tickets:
            if ticket is not None:
                ticket.cancel()
        for each in work:
            each.cancel()

    def _ask(self, ask: messages.Ask) -> None:
        if ask.grammar is None:
            self._submit(ask, None)
            return
        grammar = Grammar(ask.grammar)

        def compiled(made: CompiledGrammar) -> None:
            self._submit(ask, made)

        self._begin(ask.first, partial(self._engine.compile, grammar), compiled, wrong="schema")

    def _submit(self, ask: messages.Ask, grammar: CompiledGrammar | None) -> None:
        """All of them, or none."""
        tickets = list[Ticket]()
        try:
            requests = [messages.unpacked(each, grammar=grammar) for each in ask.requests]
            for id, request in enumerate(requests, ask.first):
                tickets.append(self._submit_one(id, request))
        except Exception as error:
            for ticket in tickets:
                ticket.cancel()
            self._refuse(ask.first, error)
        else:
            self._send(messages.Taken(ask.first))

    def _submit_one(self, id: int, request: Request) -> Ticket:
        with self._lock:
            self._tickets[id] = None
        try:
            ticket = self._engine.submit(request, partial(self._chosen, id))
        except BaseException:
            with self._lock:
                self._tickets.pop(id, None)
            raise
        with self._lock:
            if id in self._tickets:
                self._tickets[id] = ticket
                return ticket
        ticket.cancel()  # it is over already, or nobody wants it any more
        return ticket

    def _begin(
        self,
        id: int,
        start: Callable[[], Future[Any]],
        made: Callable[[Any], messages.ToFront | None],
        wrong: str = "",
    ) -> None:
        """Start what takes a while. made: its message. wrong: the kind of a DataError."""

        def done(future: Future[Any]) -> None:
            with self._lock:
                wanted = self._work.pop(id, None) is not None
            if future.cancelled():
                if wanted:
                    self._send(messages.Refused(id, "closing", "The server is shutting down. Retry later."))
            elif (problem := future.exception()) is not None:
                self._refuse(id, problem, wrong)
            elif wanted:
                try:
                    answer = made(future.result())
                except Exception as error:
                    self._refuse(id, error)
                else:
                    if answer is not None:
                        self._send(answer)

        try:
            future = start()
        except Exception as error:
            self._refuse(id, error, wrong)
            return
        with self._lock:
            self._work[id] = future
        future.add_done_callback(done)

    def _reply(self, id: int, make: Callable[[], bytes]) -> None:
        try:
            self._send(messages.Reply(id, make()))
        except Exception as error:
            LOG.exception("an answer to a front failed")
            self._send(messages.Refused(id, "error", explained(error)))

    def _refuse(self, id: int, error: BaseException, wrong: str = "") -> None:
        kind = next((kind for kind, kinds in KINDS if isinstance(error, kinds)), "error")
        if kind == "data" and wrong:
            kind = wrong
        if kind == "error" and not isinstance(error, BillfishError):
            LOG.error("a request failed", exc_info=error)
        self._send(messages.Refused(id, kind, str(error)))

    # ---- what the engine's thread says --------------------------------------------------------------------------

    def _chosen(self, id: int, chosen: Chosen) -> None:
        token, scored, finished, error, cached, drafts, progress = chosen
        if progress is not None:
            self._progress.append((id, *progress))
        if drafts is not None:
            self._drafts[id] = drafts
        if cached and not finished:
            self._cached[id] = cached
        if finished:
            with self._lock:
                self._tickets.pop(id, None)
            self._ended.append((id, token, list(scored), finished, error, cached))
        elif scored and token is not None:
            self._scored.append((id, token, list(scored)))
        elif token is not None:
            self._tokens += (id, token)

    def flush(self) -> None:
        """The step is over."""
        if self._tokens or self._scored or self._ended or self._progress:
            step = messages.Step(self._tokens, self._scored, self._ended, self._drafts, self._cached, self._progress)
            self._tokens, self._scored, self._ended, self._progress = [], [], [], []
            self._drafts, self._cached = {}, {}
            self._send(step)


def _vectors(id: int, vectors: Sequence[Any]) -> messages.Vectors:
    return messages.Vectors(id, [np.asarray(vector, np.float32).tobytes() for vector in vectors])
