"""uvicorn's HTTP/1.1 with limits on what no application sees: heads, chunks, trailers, pipelines, connections."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from billfish.serving.http.limits import BODY_CHUNKS, HEAD_BYTES, HEAD_LINES, HEAD_SECONDS, LINGER_SECONDS

SLICE = 16 * 2**10  # bytes that are parsed before the limits are looked at


class Connections:
    """The connections of a server. Where there are too many, the oldest one that has sent no request makes room."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._all = set[LimitedProtocol]()
        self._waiting: OrderedDict[LimitedProtocol, None] = OrderedDict()  # without a request, the oldest first

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: LimitedProtocol) -> bool:
        """Whether there is room for a new connection."""
        if len(self._all) >= self.most:
            if not self._waiting:
                return False
            oldest, _ = self._waiting.popitem(last=False)
            self._all.discard(oldest)
            oldest.transport.abort()
        self._all.add(connection)
        self._waiting[connection] = None
        return True

    def set_waiting(self, connection: LimitedProtocol, waiting: bool) -> None:
        """waiting: whether nothing of the connection's is answered."""
        if not waiting:
            self._waiting.pop(connection, None)
        elif connection in self._all:
            self._waiting[connection] = None

    def remove(self, connection: LimitedProtocol) -> None:
        """It was closed."""
        self._all.discard(connection)
        self._waiting.pop(connection, None)


class LimitedProtocol(HttpToolsProtocol):
    """One connection of a server."""

    def __init__(self, *arguments: Any, others: Connections, **options: Any) -> None:
        """others: all connections of the server. What else there is, uvicorn gives."""
        super().__init__(*arguments, **options)
        self._others = others
        self._unparsed = bytearray()  # behind a request that waits for the answer to the one before it
        self._refused = False
        self._in_body = False  # behind a head, before the end of its message
        self._head_bytes = self._head_lines = 0  # of the message that is read
        self._chunks = 0  # of the body that is read
        self._exceeds = False
        self._quiet_bytes = 0  # since the parser told something: a long line is all that it may hold
        self._timer: asyncio.TimerHandle | None = None

    # ---- the connection -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._others.add(self):
            self._wait_for_head()
        else:
            self._refuse(503, "Too many connections.")

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.remove(self)
        self._stop_timer()
        self._unparsed.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unparsed += data
        self._parse()

    def _parse(self) -> None:
        """Go on with what has come, up to a request that must wait for another one's answer."""
        while self._unparsed and not self.pipeline and not self._refused and not self.transport.is_closing():
            piece = bytes(self._unparsed[:SLICE])
            del self._unparsed[:SLICE]
            self._quiet_bytes += len(piece)
            super().data_received(piece)
            if self._exceeds or self._head_bytes + self._quiet_bytes > HEAD_BYTES or self._head_lines > HEAD_LINES:
                self._refuse(431, f"The headers exceed {HEAD_LINES} lines or {HEAD_BYTES} bytes.")
            elif self._chunks > BODY_CHUNKS:
                self._refuse(413, f"The body has more than {BODY_CHUNKS} chunks.")
        if self._unparsed:
            self.flow.pause_reading()
        elif not self._in_body and self._timer is None and not self._is_answering:
            self._wait_for_head()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        """Answer in place of the application, and close."""
        self._refused = True
        self._unparsed.clear()
        self._stop_timer()
        begun = self._is_answering and (self.cycle.response_started or self.pipeline)
        if not self.transport.is_closing() and not begun:
            head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            size = b"content-length: %d\r\n\r\n" % len(message)
            self.transport.write(STATUS_LINE[status] + head + size + message.encode())
        self.transport.close()

    # ---- time -----------------------------------------------------------------------------------------------------

    def _wait_for_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        self._timer = None
        if self._is_answering:
            return  # `on_response_complete` starts the time again
        if self._head_bytes or self._quiet_bytes:
            self._refuse(408, f"The headers did not arrive within {HEAD_SECONDS:g} s.")
        else:
            self.transport.close()

    def _body_is_late(self) -> None:
        self._timer = None
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- what the parser tells ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_body = False
        self._head_bytes = self._head_lines = self._quiet_bytes = self._chunks = 0

    def on_url(self, url: bytes) -> None:
        self._quiet_bytes = 0
        self._head_bytes += len(url)
        if self._head_bytes <= HEAD_BYTES:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._quiet_bytes = 0
        self._head_bytes += len(name) + len(value)
        self._head_lines += 1
        if not self._in_body and self._head_lines <= HEAD_LINES:  # a trailer is no header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._quiet_bytes, self._in_body = 0, True
        self._stop_timer()
        self._others.set_waiting(self, False)
        self._exceeds = self._head_bytes > HEAD_BYTES or self._head_lines > HEAD_LINES
        if not self._exceeds:
            super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """The size of a chunk has come, and maybe what is behind a semicolon."""
        self._quiet_bytes = 0
        self._chunks += 1

    def on_body(self, body: bytes) -> None:
        self._quiet_bytes = 0
        if not self._exceeds and self._chunks <= BODY_CHUNKS:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._quiet_bytes, self._in_body = 0, False
        self._head_bytes = self._head_lines = 0
        if not self._exceeds:
            super().on_message_complete()
            self._stop_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._is_answering:  # the next one of a pipeline has begun
            self.loop.call_soon(self._parse)
            return
        self._others.set_waiting(self, True)
        if self._in_body:  # its answer did not need the rest
            self._stop_timer()
            self._timer = self.loop.call_later(LINGER_SECONDS, self._body_is_late)
        if self._unparsed:
            self.loop.call_soon(self._parse)
