"""HTTP in one process, for models whose engines have processes of their own."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Collection
from types import FrameType

from billfish.serving.http.keys import Keys
from billfish.serving.http.server import HttpServer, ReadKeys, reread
from billfish.serving.models.pool import ModelPool

LOG = logging.getLogger("billfish.serving")


class PoolServer(HttpServer):
    """A signal ends it: what runs is finished, what comes is refused with 503. A second one ends it at once."""

    def __init__(
        self,
        pool: ModelPool,
        keys: Keys,
        announce: Callable[[], object] = lambda: None,
        *,
        access_log: bool = True,
        hosts: Collection[str] = (),
        origins: Collection[str] = (),
        share_prefixes: bool = False,
        read_keys: ReadKeys | None = None,
    ) -> None:
        """As those of :class:`billfish.serving.http.server.Server`."""
        super().__init__(pool, keys, access_log=access_log, hosts=hosts, origins=origins, share_prefixes=share_prefixes)
        self._pool, self._announce, self._read_keys = pool, announce, read_keys
        self._finishing: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        self._loop = asyncio.get_running_loop()
        self._pool.connect()
        await super().startup(sockets)
        if self._read_keys is not None and threading.current_thread() is threading.main_thread():
            self._loop.add_signal_handler(signal.SIGHUP, self._rotate_keys)
        self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the engines, after clients have read their answers."""
        try:
            await super().shutdown(sockets)
        finally:
            self._pool.kill()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come."""
        if self._pool.closing:
            self.should_exit = self.force_exit = True
            return
        self._pool.closing = True
        self._loop.call_soon_threadsafe(self._begin_end)

    def _begin_end(self) -> None:
        left = sum(entry.users for entry in self._pool.entries.values())
        answers = f"finishing {left} answer{'s' * (left > 1)}; Ctrl-C again ends at once"
        LOG.info(answers if left else "stopping")
        self._finishing = asyncio.ensure_future(self._finish())

    async def _finish(self) -> None:
        await self._pool.finish()
        self.should_exit = True

    def _rotate_keys(self) -> None:
        assert self._read_keys is not None
        if (keys := reread(self._read_keys)) is not None:
            self.keys.replace(keys)
