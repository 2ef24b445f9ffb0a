"""A process with one model and its engine, and what its parent sees of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

from billfish.backends.cpu import _cpu
from billfish.core.errors import BillfishError, explained
from billfish.core.log_line import logging_to_stderr
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.engine_settings import start_engine
from billfish.serving.http.front import IGNORED
from billfish.serving.http.fronts import SWITCH_SECONDS, WATCH_SECONDS
from billfish.serving.http.metrics import engine_metrics_text
from billfish.serving.http.server import FAILED_SECONDS
from billfish.serving.ipc import messages
from billfish.serving.ipc.link import SocketLink, receive_one, send_one
from billfish.serving.ipc.session import Host

# The path is the parent's: `-I` keeps folders of the user out, as long as they are not in it.
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from billfish.serving.models.engine_process import main; main()"
)
ENDED = "its process has ended"
END_SECONDS = 10.0  # for a process to end that nobody needs any more


class LoadFailed(BillfishError, RuntimeError):
    """A model cannot be loaded."""


class EngineProcess:
    """The process, for its parent. It is the loop's alone.

    send: gives the engine a message. receive: gets those that come. lost: called when the process has ended unasked.
    ended: whether it has.
    """

    def __init__(self, start: messages.StartEngine, lost: Callable[[], object]) -> None:
        self.receive: Callable[[messages.ToFront], object] = lambda message: None
        self._lost, self._stopping, self.ended = lost, False, False
        self._ready = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-c", START, json.dumps(sys.path), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self._link = SocketLink(ours, messages.FromEngine, self._came, self._ended)
        self.send = self._link.send
        self.send(start)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    async def ready(self) -> messages.EngineReady:
        """When the model is loaded. Raises LoadFailed."""
        found: messages.EngineReady = await self._ready
        return found

    async def stop(self) -> None:
        """Its memory is free when this returns."""
        self._stopping = True
        self._link.close()
        wait = asyncio.get_running_loop().run_in_executor
        try:
            await wait(None, self._process.wait, END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await wait(None, self._process.wait)

    def kill(self) -> None:
        """At once."""
        self._stopping = True
        self._link.close()
        self._process.kill()
        self._process.wait()

    def _came(self, message: messages.FromEngine) -> None:
        if isinstance(message, messages.EngineReady):
            self._ready.set_result(message)
        elif isinstance(message, messages.EngineFailed):
            self._ready.set_exception(LoadFailed(message.error))
        else:
            self.receive(message)

    def _ended(self) -> None:
        if not self._ready.done():
            self._ready.set_exception(LoadFailed(ENDED))
        if not self._stopping:
            self.ended = True
            self._process.kill()  # it may not know yet that nobody listens
            self._process.wait()
            self._lost()


# ---- in the process -------------------------------------------------------------------------------------------------


def main() -> None:
    """Argument: the number of the end of the pair to the parent's process."""
    for name in IGNORED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    end = socket.socket(fileno=int(sys.argv[-1]))
    end.set_inheritable(False)  # processes of this one must not keep the pair open
    sys.setswitchinterval(SWITCH_SECONDS)
    with logging_to_stderr(), contextlib.suppress(EOFError, OSError):  # the parent has ended
        told = receive_one(end, messages.StartEngine)
        try:
            if told.settings.threads is not None:
                _cpu.set_threads(told.settings.threads)
            engine = start_engine(told.path, told.adapters, told.settings)
        except Exception as error:
            send_one(end, messages.EngineFailed(str(error) if isinstance(error, BillfishError) else explained(error)))
            return
        try:
            asyncio.run(_serve(engine, end))
        finally:
            engine.close(finish=False)


async def _serve(engine: Engine, end: socket.socket) -> None:
    """Until the parent closes the pair, or the engine fails: then it is told first."""
    over, host = asyncio.Event(), Host(engine)
    host.metrics = engine_metrics_text
    link = SocketLink(end, messages.ToEngine, lambda message: session.handle(message), over.set)
    session = host.open(link.send)
    decoder, counts = engine.model.decoder, engine.counts()
    about = messages.EngineReady(
        engine.streams, engine.context, engine.queue_limit, decoder.nbytes, counts.cache_bytes_bound, decoder.about
    )
    link.send(about)
    while not over.is_set():
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(over.wait(), WATCH_SECONDS)
        if engine.failure:
            await asyncio.sleep(FAILED_SECONDS)
            break
