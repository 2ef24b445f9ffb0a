"""The engine's process: it starts front processes, starts those again that end, and ends all of them with itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from billfish.core.errors import BillfishError
from billfish.serving.http.metrics import metrics_text
from billfish.serving.http.server import FAILED_SECONDS, READER_SECONDS, ReadKeys, finish, reread, switching_after
from billfish.serving.ipc import messages
from billfish.serving.ipc.link import SocketLink
from billfish.serving.ipc.session import Host, Session

LOG = logging.getLogger("billfish.serving")
# The path is this process's: `-I` keeps folders of the user out, as long as they are not in it.
START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from billfish.serving.http.front import main; main()"
START_SECONDS = 120.0  # for the imports and the tokenizer of a front
MOST_ENDS, ENDS_SECONDS = 5, 60.0  # so many fronts may end unasked in so many seconds
WATCH_SECONDS = 0.1  # between looks at the engine's health
SWITCH_SECONDS = 0.0005  # the engine's thread waits so long at most for a message that is read


class FrontFailed(BillfishError, RuntimeError):
    """Front processes end as often as they are started."""


class _Front:
    """One process."""

    def __init__(self, process: subprocess.Popen[bytes], session: Session, link: SocketLink) -> None:
        self.process, self.session, self.link = process, session, link


class Fronts:
    """Runs an engine behind several front processes until a signal comes."""

    def __init__(
        self,
        host: Host,
        listening: socket.socket,
        told: messages.Configure,
        announce: Callable[[], object] = lambda: None,
        read_keys: ReadKeys | None = None,
    ) -> None:
        """told: to each front; `told.fronts` are started. announce: called when all listen. read_keys: called by
        SIGHUP."""
        self.host, self._listening, self._told, self._read_keys = host, listening, told, read_keys
        self._announce = announce
        self._fronts: list[_Front] = []
        self._ends: deque[float] = deque(maxlen=MOST_ENDS)  # when fronts ended unasked
        self._announced = False
        self._failed: str | None = None
        host.metrics = metrics_text

    def run(self) -> None:
        """Until a signal comes. Raises FrontFailed where no front stays."""
        with switching_after(SWITCH_SECONDS):
            asyncio.run(self._run())
        if self._failed is not None:
            raise FrontFailed(self._failed)

    @property
    def processes(self) -> list[int]:
        """Of the fronts that run."""
        return [front.process.pid for front in self._fronts]

    async def _run(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        for name, handle in (("SIGINT", self._stop), ("SIGTERM", self._stop), ("SIGHUP", self._rotate)):
            if name != "SIGHUP" or self._read_keys is not None:
                self._loop.add_signal_handler(getattr(signal, name), handle)
        try:
            for _ in range(self._told.fronts):
                self._start()
            late = self._loop.call_later(START_SECONDS, self._is_late)
            watch = asyncio.ensure_future(self._watch())
            await self._over.wait()
            late.cancel()
            watch.cancel()
        finally:
            self._kill()

    async def _watch(self) -> None:
        """A server whose engine has failed ends, after its clients were told."""
        while not self.host.engine.failure:
            await asyncio.sleep(WATCH_SECONDS)
        await asyncio.sleep(FAILED_SECONDS)
        self.host.closing = True
        self._exit()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        numbers = self._listening.fileno(), theirs.fileno()
        command = [sys.executable, "-I", "-c", START, json.dumps(sys.path), *map(str, numbers)]
        with theirs:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=numbers)
        front: _Front
        link = SocketLink(ours, messages.ToEngine, lambda message: self._handle(front, message), lambda: ended())

        def ended() -> None:
            self._ended(front)

        front = _Front(process, self.host.open(link.send), link)
        self._fronts.append(front)
        link.send(self._told)

    def _handle(self, front: _Front, message: messages.ToEngine) -> None:
        front.session.handle(message)
        if isinstance(message, messages.Ready) and not self._announced:
            self._announced = all(each.session.ready for each in self._fronts)
            if self._announced:
                self._announce()

    def _is_late(self) -> None:
        if not self._announced:
            self._fail(f"The front processes did not start within {START_SECONDS:g} s.")

    def _ended(self, front: _Front) -> None:
        """A front has gone, with its clients."""
        self._fronts.remove(front)
        self.host.close(front.session)
        front.process.kill()
        code = front.process.wait()
        if self.host.closing:
            if not self._fronts:
                self._over.set()
            return
        now = time.monotonic()
        often = len(self._ends) == MOST_ENDS and now - self._ends[0] < ENDS_SECONDS
        if often or not front.session.ready:
            self._fail(f"A front process ended with {code}.")
            return
        self._ends.append(now)
        LOG.error("a front process ended with %d; its requests are lost, and another one is started", code)
        self._start()

    def _fail(self, why: str) -> None:
        self._failed = why
        self.host.closing = True
        self._over.set()

    def _kill(self) -> None:
        self.host.closing = True
        for front in list(self._fronts):
            front.link.close()

    # ---- signals ------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """What runs is finished, what comes is refused. A second signal ends all at once."""
        if self.host.closing:
            self._over.set()
            return
        self.host.closing = True
        self._tell(messages.Closing())
        threading.Thread(target=self._finish, name="billfish-closing", daemon=True).start()

    def _finish(self) -> None:
        finish(self.host)
        with contextlib.suppress(RuntimeError):  # a second signal has ended the loop
            self._loop.call_soon_threadsafe(self._exit)

    def _exit(self) -> None:
        self._listening.close()  # nobody accepts what would come
        self._tell(messages.Exit())
        self._loop.call_later(2 * READER_SECONDS, self._over.set)

    def _rotate(self) -> None:
        assert self._read_keys is not None
        if (keys := reread(self._read_keys)) is not None:
            self._told = replace(self._told, keys=keys.digests)
            self._tell(messages.Rotate(keys.digests))

    def _tell(self, message: messages.ToFront) -> None:
        for front in self._fronts:
            front.link.send(message)
