"""A part of the attack on the server, and whether the attack sees what is wrong."""

from __future__ import annotations

import asyncio
import random
import sys

import pytest
from attack import server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts memory and descriptors as Linux does")
SLOW = (server.silent, server.endless, server.bombs, server.large)  # they take seconds; tests/serving has them


@pytest.mark.promise(
    "server",
    "malformed, smuggled, slow, half-closed and abandoned requests are answered or closed, never a 500",
)
def test_the_server_withstands_a_small_attack(monkeypatch):
    monkeypatch.setattr(server, "KINDS", {kind: 1 for kind in server.KINDS if kind not in SLOW})
    attacked, record = server.attack(250, with_neighbor=False)
    assert record["failures"] == []
    assert attacked.sent.keys() == {kind.__name__ for kind in server.KINDS}
    assert {200, 400, 404} <= attacked.statuses.keys()


def failures_beside(answer: bytes, kind: server.Attack) -> list[str]:
    """What one attack says of a server that answers everything with this; None: not at all."""

    async def run() -> list[str]:
        ended = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(2**20)
            writer.write(answer)
            if not answer:
                await asyncio.sleep(0.5)
            writer.close()
            ended.set()

        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with listening:
            host, port = listening.sockets[0].getsockname()
            attacked = server.Attacked(host, port, expected=b"x")
            await server.send(attacked, 1, 1, random.Random(0))
            await ended.wait()
            return attacked.failures

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "KINDS", {kind: 1})
        patch.setattr(server, "SECONDS", 0.2)
        return asyncio.run(run())


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: "


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (b"HTTP/1.1 500 Error\r\ncontent-length: 0\r\n\r\n", server.odd_bodies, "status 500"),
        (b"hello\r\n\r\n", server.changed_bytes, "begins with"),
        (HEAD + b"0\r\n\r\n", server.smuggled, "200"),
        (HEAD + b'32\r\n\r\n{"choices": [{"text": "other"}]}', server.ordinary, "another answer"),
        (HEAD + b"0\r\n\r\n", server.pipelined, "200"),
        (b"", server.half_closed, "no end after"),
        (HEAD + b"0\r\n\r\n", server.foreign, "200"),
    ],
)
def test_harm_is_noticed(answer, kind, said):
    (failure,) = failures_beside(answer, kind)
    assert said in failure
