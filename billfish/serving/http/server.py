"""uvicorn, with an end of its own: what runs is finished first."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn

from billfish.core.errors import DataError, readable
from billfish.serving.api.models import Models, OneModel
from billfish.serving.api.service import Service
from billfish.serving.http.app import make_app
from billfish.serving.http.keys import Keys
from billfish.serving.http.limits import ACCEPTED_AT_ONCE, BODIES_BYTES, most_connections
from billfish.serving.http.metrics import metrics_text
from billfish.serving.http.protocol import Connections, LimitedProtocol
from billfish.serving.ipc.link import connect_here
from billfish.serving.ipc.session import Host

LOG = logging.getLogger("billfish.serving")
READER_SECONDS = 10  # for slow clients to read what was finished
FAILED_SECONDS = 2.0  # for clients to read errors, and for monitors to see /health, when the engine has ended by one
SWITCH_SECONDS = 0.0001  # the engine's thread waits so long at most for Python code of requests, several times a token
ReadKeys = Callable[[], Keys]


class HttpServer(uvicorn.Server):
    """Answers HTTP until `should_exit` is set. Clients then have some time to read what was answered."""

    def __init__(
        self,
        models: Models,
        keys: Keys,
        *,
        access_log: bool = True,
        hosts: Collection[str] = (),
        origins: Collection[str] = (),
        share_prefixes: bool = False,
        fronts: int = 1,
    ) -> None:
        """access_log: whether to log a line for each request. hosts: further names of the server. origins: of pages
        that may use it. share_prefixes: among keys. fronts: processes that share
        connections, and what limits these have together."""
        connections = Connections(max(1, most_connections() // fronts))
        app = make_app(
            models,
            keys,
            access_log=access_log,
            hosts=hosts,
            origins=origins,
            share_prefixes=share_prefixes,
            most_bytes=BODIES_BYTES // fronts,
        )
        config = uvicorn.Config(
            app,
            http=partial(LimitedProtocol, others=connections),  # type: ignore[arg-type]
            # asyncio accepts so many connections at a time. One that comes to several processes goes to one that waits.
            backlog=ACCEPTED_AT_ONCE if fronts == 1 else 1,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=READER_SECONDS,
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_is_error)
        self.models, self.keys = models, keys

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(ACCEPTED_AT_ONCE)  # those that wait in the system


def _is_error(record: logging.LogRecord) -> bool:
    """Not that an answer was given up, as all are after a second signal: uvicorn logs that with a traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class Server(HttpServer):
    """An engine and HTTP in one process. A signal ends it: what runs is finished, what comes is refused with 503. A
    second signal ends it at once."""

    def __init__(
        self,
        host: Host,
        service: Service,
        keys: Keys,
        announce: Callable[[], object] = lambda: None,
        *,
        access_log: bool = True,
        hosts: Collection[str] = (),
        origins: Collection[str] = (),
        share_prefixes: bool = False,
        read_keys: ReadKeys | None = None,
    ) -> None:
        """announce: called when it listens and minds signals. read_keys: called by SIGHUP; what it returns replaces
        `keys`. Others are those of HttpServer."""
        super().__init__(
            OneModel(service), keys, access_log=access_log, hosts=hosts, origins=origins, share_prefixes=share_prefixes
        )
        self.host, self.service, self._announce, self._read_keys = host, service, announce, read_keys
        self._failed = False
        host.metrics = metrics_text

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Until a signal comes."""
        with switching_after(SWITCH_SECONDS):
            super().run(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        connect_here(self.host, self.service.client)
        await super().startup(sockets)
        if self._read_keys is not None and threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.rotate_keys)
        self._announce()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: a server whose engine has failed ends."""
        if self.host.engine.failure and not self._failed:
            self._failed = True
            asyncio.get_running_loop().call_later(FAILED_SECONDS, self._end)
        return await super().on_tick(counter)

    def _end(self) -> None:
        self.should_exit = True

    def rotate_keys(self) -> None:
        """Read the keys again. Where they cannot be read, the old ones stay."""
        assert self._read_keys is not None
        if (keys := reread(self._read_keys)) is not None:
            self.keys.replace(keys)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come."""
        if self.host.closing:
            self.should_exit = self.force_exit = True
            return
        self.host.closing = self.models.closing = True
        threading.Thread(target=self._finish, name="billfish-closing", daemon=True).start()

    def _finish(self) -> None:
        finish(self.host)
        self.should_exit = True


@contextmanager
def switching_after(seconds: float) -> Iterator[None]:
    """Let a thread that wants to run Python code wait so long at most while another one does; 5 ms is usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(usual, seconds))
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def finish(host: Host) -> None:
    """Wait for all answers. Not in a signal's handler, which may interrupt a line that has a lock."""
    counts = host.engine.counts()
    left = counts.running + counts.waiting
    answers = f"finishing {left} answer{'s' * (left > 1)}; Ctrl-C again ends at once"
    LOG.info(answers if left else "stopping")
    host.engine.close(finish=True)


def reread(read_keys: ReadKeys) -> Keys | None:
    """The keys that SIGHUP asks for; None where they cannot be read."""
    try:
        keys = read_keys()
    except DataError as error:
        LOG.error("SIGHUP: the API keys stay as they were. %s", error)
        return None
    LOG.info("SIGHUP: read %d API keys", len(keys))
    return keys


class FrontServer(HttpServer):
    """HTTP alone. Signals are for the engine's process, which tells when to end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """The socket of an address; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not 0 <= port < 65536:
        raise DataError(f"serve: --port {port} is no port. Choose one from 1 to 65535, or 0 for any free one.")
    try:
        return socket.create_server((host, port), family=family, backlog=ACCEPTED_AT_ONCE)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what = f"Port {port} of {host} is in use. Choose another with --port, or --port 0 for any free one."
        elif error.errno == errno.EACCES:
            what = f"Port {port} needs more rights than this user has. Choose a --port from 1024 on."
        else:
            why = str(error.strerror or error).partition(" (while")[0]
            what = f"--host {readable(host)} is no address of this machine ({why})."
        raise DataError(f"serve: {what}") from None


def address(listening: socket.socket) -> str:
    """The URL that clients use."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
