"""How messages travel: over a socket pair between processes, or straight between objects of one process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from billfish.serving.ipc import messages
from billfish.serving.ipc.client import EngineClient
from billfish.serving.ipc.session import Host, Session

Received = TypeVar("Received")
HEAD = struct.Struct("<I")  # bytes of the message behind it
MOST_BYTES = 2**30  # of a message
MOST_WAITING = 512 * 2**20  # bytes that a process which reads too slowly may be owed, before it is given up
READ_BYTES = 2**18


class SocketLink:
    """One end of a socket pair. The other process has the other end, and nobody else: when it ends, this one is told.

    A message is its length and its MessagePack. Whatever is not one closes the link.
    """

    def __init__(
        self, end: socket.socket, kind: Any, receive: Callable[[Any], object], lost: Callable[[], object]
    ) -> None:
        """kind: of the messages that come. receive, lost: called in the loop that runs."""
        self._socket, self._receive, self._lost = end, receive, lost
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._loop = asyncio.get_running_loop()
        self._came = bytearray()
        self._lock = threading.Lock()  # held for what follows
        self._waiting = bytearray()
        self._closed = False
        end.setblocking(False)
        self._loop.add_reader(end, self._read)

    def send(self, message: Any) -> None:
        """Any thread may call this. It does not wait."""
        data = self._encode(message)
        frame = HEAD.pack(len(data)) + data
        with self._lock:
            if self._closed:
                return
            if not self._waiting:
                try:
                    frame = frame[self._socket.send(frame) :]
                except BlockingIOError:
                    pass
                except OSError:
                    return  # the loop reads the end
                if not frame:
                    return
                self._call(self._watch)
            self._waiting += frame
            if len(self._waiting) > MOST_WAITING:
                self._call(self.close)

    def close(self) -> None:
        """Called in the loop. Tells `lost`, once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._waiting.clear()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._lost()

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def _watch(self) -> None:
        if not self._closed:
            self._loop.add_writer(self._socket, self._write)

    def _write(self) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                del self._waiting[: self._socket.send(self._waiting)]
            except BlockingIOError:
                return
            except OSError:
                self._waiting.clear()
            if not self._waiting:
                self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._came += data
        at = 0
        try:
            while len(self._came) - at >= HEAD.size:
                (size,) = HEAD.unpack_from(self._came, at)
                if size > MOST_BYTES:
                    raise ValueError("no message is so long")
                if len(self._came) - at < HEAD.size + size:
                    break
                start, at = at + HEAD.size, at + HEAD.size + size
                message = self._decode(memoryview(self._came)[start:at])
                self._receive(message)
        except (ValueError, msgspec.MsgspecError):
            data = b""
        finally:
            del self._came[:at]
        if not data:
            self.close()


def send_one(end: socket.socket, message: Any) -> None:
    """Send a message before there is a loop. Raises OSError where the other process has ended."""
    data = msgspec.msgpack.encode(message)
    end.sendall(HEAD.pack(len(data)) + data)


def receive_one(end: socket.socket, kind: type[Received]) -> Received:
    """Wait for a message of this kind before there is a loop. Raises EOFError where the other process has ended."""

    def read(count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = end.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    (size,) = HEAD.unpack(read(HEAD.size))
    return msgspec.msgpack.decode(read(size), type=kind)


def connect_here(host: Host, client: EngineClient) -> Session:
    """Connect a client with an engine of the same process. Called in the client's loop."""
    loop = asyncio.get_running_loop()

    def send(message: messages.ToFront) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(client.receive, message)

    session = host.open(send)
    client.connect(session.handle)
    return session
