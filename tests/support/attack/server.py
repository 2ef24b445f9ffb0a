"""The server under attack: `python tests/support/attack/server.py --requests N [--clients C] [--json FILE]`.

Clients on loopback send what no client should: changed bytes, smuggled and pipelined requests, heads and bodies without
end, slow ones, half-closed connections, odd JSON, schemas and tools that are bombs; they do not read, or go at every
stage. Rounds of that take turns with rounds of quiet, and in both another process asks the same completion again and
again, as an ordinary client does.

`--beside SECONDS` attacks in one way at a time, each for so long between as long a quiet, and says what the ordinary
client's median time and 99th percentile were in both. Valid requests take their share of the engine, as those of other
clients do. So the first kind, "ordinary", is as many ordinary clients, and the others are compared with it, too.
`--model` serves another model than the small one.

An attack has failed if a request is answered with a 500, with what is no HTTP, or not within its time; if an ordinary
answer is another one than before; if the server ends, logs a traceback, keeps descriptors or requests, or grows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import contextvars
import http.client
import json
import os
import random
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent.parent)]

from llm_models import Small, write_model  # noqa: E402

from attack.cases import ODD_VALUES, odd_json  # noqa: E402
from attack.mutated_files import changed  # noqa: E402
from attack.rounds import Rounds  # noqa: E402
from attack.schemas import bomb, grammar_bomb, tool  # noqa: E402

SECONDS = 5.0  # for the answer to a whole request
SCHEMA_SECONDS = 20.0  # for one with a schema, which may wait for others to be compiled
HEAD_SECONDS = 15.0  # for the end of a connection that sends no whole head
WHOLE_SECONDS = 60.0  # for all of an attack, sending included
KNOWN_STATUSES = {200, 400, 401, 404, 405, 408, 413, 415, 421, 426, 429, 431, 503}
GROWTH = 64 << 20  # bytes that the server may have more in the end
QUIET_SECONDS, ROUND = 4.0, 2500  # seconds of a quiet round, and requests of another one
ORDINARY: dict[str, Any] = {"prompt": "the sea is wide", "temperature": 0, "logit_bias": {"1": -100}}
ORDINARY["max_tokens"] = int(os.environ.get("ATTACK_TOKENS", 64))
MESSAGES = [{"role": "user", "content": "hi"}]
KIND: contextvars.ContextVar[str] = contextvars.ContextVar("KIND", default="ordinary")
# An ordinary body for each path.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a b", "max_tokens": 2, "temperature": 0.5, "seed": 1, "stop": ["x"], "n": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2, "logprobs": True, "logit_bias": {"5": 1.5}},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2, "store": False},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 8},
    "/v1/rerank": {"query": "a", "documents": ["b", "c"], "top_n": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2, "system": "s", "stop_sequences": ["x"]},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 2}, "stream": True},
    "/api/generate": {"prompt": "hi", "options": {"num_predict": 2}},
    "/api/embed": {"input": "a"},
    "/tokenize": {"content": "a b"},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/apply-template": {"messages": MESSAGES},
}


def request(path: str, body: bytes = b"", *headers: str, method: str = "") -> bytes:
    """A request as an ordinary client sends it."""
    lines = [f"{method or ('POST' if body else 'GET')} {path} HTTP/1.1", "Host: localhost", *headers]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def posted(rng: random.Random, odd: bool = False, **more: Any) -> bytes:
    """An ordinary request, or one with something odd in its JSON."""
    path = rng.choice(list(BODIES))
    body = odd_json(BODIES[path] | more, rng) if odd else BODIES[path] | more
    return request(path, json.dumps(body).encode("utf-8", "replace"))


@dataclass
class Attacked:
    """A server, and what came of the requests to it."""

    host: str
    port: int
    expected: bytes = b""  # the answer to ORDINARY
    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    worst_seconds: dict[str, float] = field(default_factory=dict)  # from the end of what is sent, by kind of attack

    async def exchange(
        self,
        data: bytes,
        *,
        seconds: float = HEAD_SECONDS,
        pieces: tuple[int, float] = (0, 0.0),
        half: bool = True,
        answers: int = 0,
    ) -> list[tuple[int, bytes]]:
        """Send, and read answers until the server closes; half: this side has said that no more comes. pieces: how many
        there are, and the seconds between them. answers: how many are waited for, if it does not close."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        came, started = b"", time.monotonic()
        try:
            with contextlib.suppress(ConnectionError):
                count, pause = pieces
                size = len(data) // count + 1 if count else len(data)
                for at in range(0, len(data), size or 1):
                    writer.write(data[at : at + size])
                    await writer.drain()
                    await asyncio.sleep(pause)
                if half:
                    writer.write_eof()
                started = time.monotonic()
                while part := await asyncio.wait_for(reader.read(2**16), started + seconds - time.monotonic()):
                    came += part
                    if answers and len(split(came)) >= answers:
                        break
        except asyncio.TimeoutError:
            raise AssertionError(f"no end after {seconds:g} s; sent {data[:200]!r}, came {came[:200]!r}") from None
        finally:
            kind, took = KIND.get(), time.monotonic() - started
            self.worst_seconds[kind] = max(self.worst_seconds.get(kind, 0.0), took)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        found = split(came)
        for status, text in found:
            self.statuses[status] += 1
            assert status in KNOWN_STATUSES, f"status {status}: {text[:300]!r}, sent {data[:300]!r}"
        return found

    async def leave(self, data: bytes, *, wait: float = 0.0, reset: bool = True, room: int = 0) -> None:
        """Send, read nothing, and go. reset: without a farewell. room: bytes of answers that the system keeps."""
        with socket.socket() as client:
            client.setblocking(False)
            if room:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, (self.host, self.port))
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(client, data)
                await asyncio.sleep(wait)
            if reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def split(came: bytes) -> list[tuple[int, bytes]]:
    """The whole answers in these bytes: status and body. Raises AssertionError for what is no HTTP."""
    found = list[tuple[int, bytes]]()
    while came:
        head, end, rest = came.partition(b"\r\n\r\n")
        if not end:
            break
        first = re.match(rb"HTTP/1\.1 (\d{3}) [ -~]*(\r\n|$)", head)
        assert first, f"an answer begins with {head[:100]!r}"
        status = int(first[1])
        if status == 100:
            came = rest
            continue
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        if length:
            if len(rest) < int(length[1]):
                break
            body, came = rest[: int(length[1])], rest[int(length[1]) :]
        elif re.search(rb"(?i)\r\ntransfer-encoding: chunked", head):
            body, done, came = rest.partition(b"0\r\n\r\n")
            if not done:
                break
        else:
            body, came = rest, b""
        found.append((status, body))
    return found


# ---- what clients do: each sends some requests, and returns how many ------------------------------------------------


async def ordinary(server: Attacked, rng: random.Random) -> int:
    """The answer is what it was before the attack, or that the queue is full."""
    found = await server.exchange(request("/v1/completions", json.dumps(ORDINARY).encode()), half=False, answers=1)
    assert len(found) == 1, found
    assert found[0][0] in (429, 503) or text_of(found[0][1]) == server.expected, f"another answer: {found}"
    return 1


async def changed_bytes(server: Attacked, rng: random.Random) -> int:
    """An ordinary request with bytes flipped, cut, doubled or lost."""
    await server.exchange(changed(posted(rng), rng))
    return 1


async def odd_bodies(server: Attacked, rng: random.Random) -> int:
    """JSON with something odd in it: never a 500, never silence."""
    (found,) = await server.exchange(posted(rng, odd=True), answers=1, half=False)
    assert found[0] != 404
    return 1


async def odd_fields(server: Attacked, rng: random.Random) -> int:
    """A field that other servers know, with an odd value; or a name that nobody knows."""
    name = rng.choice(["temperature", "top_k", "stop", "tools", "response_format", "stream_options", "x" * 5000, "n"])
    more = {name: rng.choice(ODD_VALUES)}
    (_,) = await server.exchange(posted(rng, **more), answers=1, half=False)
    return 1


async def large(server: Attacked, rng: random.Random) -> int:
    """Very many prompts, messages, names or stop texts, or very long ones: counted before they are used."""
    many = rng.choice([100, 2000, 50_000, 300_000])
    path, body = rng.choice(
        [
            ("/v1/completions", {"prompt": ["a"] * many}),
            ("/v1/completions", {"prompt": [[5]] * many}),
            ("/v1/completions", {"prompt": ["a" * many] * 9}),
            ("/v1/completions", {"prompt": "a", "max_tokens": 3, "stop": ["b" + " " * many] * 15}),
            ("/v1/completions", {"prompt": "a", "max_tokens": 3, "logit_bias": {str(i): 1 for i in range(many)}}),
            ("/v1/completions", {"prompt": "a", "max_tokens": 1, "x" * many: 1}),
            ("/v1/chat/completions", {"messages": MESSAGES * many}),
            ("/v1/embeddings", {"input": ["a"] * many}),
            ("/v1/rerank", {"query": "a", "documents": ["a"] * many}),
            ("/tokenize", {"content": "a" * many}),
        ]
    )
    data = json.dumps(body).encode()
    if rng.random() < 0.2:  # a name that occurs again and again
        data = data[:-1] + b', "n": 1' * many + b"}"
    found = await server.exchange(request(path, data), seconds=SCHEMA_SECONDS, answers=1, half=False)
    assert len(data) > 4_000_000 or len(found) == 1  # the answer to one that is too large may be lost
    return 1


async def foreign(server: Attacked, rng: random.Random) -> int:
    """A page of another site, whose name leads here."""
    name = rng.choice(["example.com", "localhost.example.com", "127.0.0.1.example.com", "\u00e9.com", "[::1].a.com"])
    data = posted(rng).replace(b"Host: localhost", f"Host: {name}:{server.port}".encode(), 1)
    (found,) = await server.exchange(data, answers=1, half=False)
    assert found[0] in (400, 421), found
    return 1


async def smuggled(server: Attacked, rng: random.Random) -> int:
    """Requests whose end two readers could see in different places. A second request hides behind it."""
    hidden = request("/v1/models/hidden")
    body = b'5\r\n{"a":\r\n0\r\n\r\n' + hidden
    lines = rng.choice(
        [
            ["Content-Length: 4", "Transfer-Encoding: chunked"],
            ["Transfer-Encoding: chunked", "Content-Length: 6"],
            ["Content-Length: 3", "Content-Length: 5"],
            ["Content-Length: +5"],
            ["Content-Length: 5,5"],
            ["Content-Length: 0x5"],
            ["Content-Length: -1"],
            ["Content-Length: 99999999999999999999999"],
            ["Transfer-Encoding: chunked, identity"],
            ["Transfer-Encoding: xchunked"],
            ["Transfer-Encoding : chunked"],
            ["Transfer-Encoding:\x0bchunked"],
            ["X: y\n Transfer-Encoding: chunked"],
            ["X: y\r\n folded: 1"],
            ["Transfer-Encoding: chunked\r\nTransfer-Encoding: identity"],
            ["X: a\0b"],
            ["Host: a", "Host: b"],
            ["\xff\xfe: x"],
            ["Connection: upgrade", "Upgrade: h2c", "HTTP2-Settings: AA"],
            ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: x"],
            ["Expect: 100-continue", "Content-Length: 9"],
        ]
    )
    head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lines, "", ""]
    end = rng.choice(["\r\n", "\r\n", "\n"])
    found = await server.exchange(end.join(head).encode("latin-1", "replace") + body)
    assert sum(status == 200 for status, _ in found) == 0, found
    return 2


async def chunks(server: Attacked, rng: random.Random) -> int:
    """Sizes of chunks that are none, and extensions and trailers."""
    size = rng.choice(["-1", "+2", "0x2", "ffffffffffffffff", "fffffffffffffffff", "2 ", "2;x=" + "y" * 500, "", "g"])
    head = request(
        "/v1/completions", b"", "Content-Type: application/json", "Transfer-Encoding: chunked", method="POST"
    )
    await server.exchange(head + f"{size}\r\n{{}}\r\n0\r\nx: y\r\n\r\n".encode())
    return 1


async def pipelined(server: Attacked, rng: random.Random) -> int:
    """Answered in their order."""
    paths = [rng.choice(["/health", "/v1/models", "/api/version", "/nothing"]) for _ in range(rng.choice([2, 5, 40]))]
    found = await server.exchange(b"".join(map(request, paths)), answers=len(paths), half=False)
    assert [status for status, _ in found] == [404 if path == "/nothing" else 200 for path in paths], found
    return len(paths)


async def endless(server: Attacked, rng: random.Random) -> int:
    """What has no end is cut: up to 9 MB of it."""
    begin = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunked = begin + b"Transfer-Encoding: chunked\r\n\r\n"
    first, more = rng.choice(
        [
            (begin, b"x: y\r\n" * 1000),
            (begin + b"x: ", b"y" * 9000),
            (b"GET /", b"x" * 9000),
            (chunked + b"1\r\n{\r\n0\r\n", b"x: y\r\n" * 1000),
            (chunked, b"2000\r\n" + b" " * 8192 + b"\r\n"),
            (chunked, b"1\r\n \r\n" * 1500),
            (chunked + b"1;", b"x" * 9000),
        ]
    )
    await server.exchange(first + more * (9_000_000 // len(more)))
    return 1


async def slow(server: Attacked, rng: random.Random) -> int:
    """Whole requests in pieces, with pauses."""
    found = await server.exchange(posted(rng), pieces=(rng.randrange(2, 12), rng.random() / 4), half=False, answers=1)
    assert len(found) == 1
    return 1


async def half_closed(server: Attacked, rng: random.Random) -> int:
    """The client says that no more comes, and waits for the answer."""
    await server.exchange(posted(rng, stream=rng.random() < 0.5), seconds=SECONDS)
    return 1


async def unread(server: Attacked, rng: random.Random) -> int:
    """A stream that nobody reads, for a while."""
    body = BODIES["/v1/completions"] | {"max_tokens": 100, "stream": True, "logprobs": 5}
    await server.leave(request("/v1/completions", json.dumps(body).encode()), wait=rng.random(), room=2048)
    return 1


async def vanishes(server: Attacked, rng: random.Random) -> int:
    """At any byte of a request, or of its answer."""
    data = posted(rng, stream=rng.random() < 0.5)
    cut = rng.choice([0, 1, rng.randrange(len(data)), len(data) - 1, len(data), len(data)])
    await server.leave(data[:cut], wait=rng.choice([0, 0, 0.002, 0.02]), reset=rng.random() < 0.5)
    return 1


async def prompts(server: Attacked, rng: random.Random) -> int:
    """Ordinary requests with long prompts, of which no cache holds any."""
    body = {"prompt": "".join(rng.choices("abcd efgh", k=200)), "max_tokens": 2}
    (_,) = await server.exchange(request("/v1/completions", json.dumps(body).encode()), answers=1, half=False)
    return 1


async def texts(server: Attacked, rng: random.Random) -> int:
    """What is read apart from answers: vectors of several texts, documents to rank, probabilities of a long prompt."""
    some = ["a b " * rng.randrange(1, 20) for _ in range(rng.choice([1, 4, 16]))]
    path, body = rng.choice(
        [
            ("/v1/embeddings", {"input": some}),
            ("/v1/rerank", {"query": "a", "documents": some}),
            ("/v1/completions", {"prompt": "a b " * 60, "echo": True, "logprobs": 5, "max_tokens": 0}),
        ]
    )
    (_,) = await server.exchange(request(path, json.dumps(body).encode()), answers=1, half=False)
    return 1


async def bombs(server: Attacked, rng: random.Random) -> int:
    """A schema, a grammar or tools that should be refused or harmless."""
    chat: dict[str, Any] = BODIES["/v1/chat/completions"] | {"max_tokens": 4}
    kind = rng.random()
    if kind < 0.15:
        chat["grammar"] = grammar_bomb(rng)
    elif kind < 0.7:
        named = {"name": "a", "strict": True, "schema": bomb(rng)}
        chat["response_format"] = {"type": "json_schema", "json_schema": named}
    else:
        chat |= {"tools": [tool(rng) for _ in range(rng.choice([1, 3, 40]))], "tool_choice": "required"}
    data = request("/v1/chat/completions", json.dumps(chat).encode("utf-8", "replace"))
    if rng.random() < 0.2:
        await server.leave(data, wait=rng.random() / 10)
    else:
        (_,) = await server.exchange(data, seconds=SCHEMA_SECONDS, answers=1, half=False)
    return 1


async def silent(server: Attacked, rng: random.Random) -> int:
    """Connections that send nothing, or the beginning of a head, and wait to be closed."""
    with contextlib.suppress(ConnectionError):
        await server.exchange(rng.choice([b"", b"G", b"GET / HTTP/1.1\r\nX-a: "]), half=False)
    return 1


Attack = Callable[[Attacked, random.Random], Awaitable[int]]
# How many of a thousand attacks are of each kind.
KINDS: dict[Attack, int] = {
    ordinary: 40,
    changed_bytes: 240,
    odd_bodies: 200,
    odd_fields: 80,
    large: 4,
    foreign: 16,
    smuggled: 100,
    chunks: 60,
    pipelined: 10,
    endless: 3,
    slow: 30,
    half_closed: 60,
    unread: 10,
    vanishes: 120,
    prompts: 10,
    texts: 10,
    bombs: 4,
    silent: 3,
}


def text_of(body: bytes) -> bytes:
    """The text of a completion, whose id and time differ."""
    return str(json.loads(body)["choices"][0]["text"]).encode()


async def send(
    server: Attacked,
    requests: float,
    clients: int,
    rng: random.Random,
    kinds: dict[Attack, int] | None = None,
    until: float = float("inf"),
) -> None:
    """So many requests, of so many clients at once; none begins after `until`."""
    left, kinds = requests, kinds or KINDS

    async def client() -> None:
        nonlocal left
        while left > 0 and time.monotonic() < until:
            seed, kind = rng.randrange(2**32), rng.choices(list(kinds), list(kinds.values()))[0]
            left -= 1
            name = kind.__name__
            KIND.set(name)
            try:
                count = await asyncio.wait_for(kind(server, random.Random(seed)), WHOLE_SECONDS)
            except Exception as error:
                count = 1
                server.failures.append(f"{name} {seed}: {type(error).__name__}: {str(error)[:500]}")
            left -= count - 1
            server.sent[name] += count

    await asyncio.gather(*(client() for _ in range(clients)))


# ---- the ordinary client, in a process of its own -------------------------------------------------------------------


def ask_again_and_again(host: str, port: int) -> None:
    """A line for each answer: when it was asked (on the machine's clock), how long it took, and its status."""
    while True:
        started = time.monotonic()
        connection = http.client.HTTPConnection(host, port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(ORDINARY), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        print(json.dumps([started, time.monotonic() - started, answer.status]), flush=True)
        time.sleep(0.02)


@contextlib.contextmanager
def neighbor(server: Attacked) -> Iterator[Path]:
    """The process, and the file that its lines go to."""
    command = [sys.executable, __file__, "--neighbor", server.host, str(server.port)]
    with tempfile.NamedTemporaryFile("w") as out, subprocess.Popen(command, stdout=out) as process:
        try:
            yield Path(out.name)
        finally:
            process.kill()


# ---- the attack -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(model: Path, log: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], Attacked]]:
    """`billfish serve` on a free port."""
    command = [sys.executable, "-m", "billfish", "serve", str(model), *words, "--device", "cpu", "--port", "0"]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+:\d+", process.stdout.readline())
            assert found, log.read_text()
            url = urlsplit(found[0])
            yield process, Attacked(str(url.hostname), int(url.port or 0))
        finally:
            process.kill()


def held(process: int) -> dict[str, int]:
    """Bytes and descriptors of a process and of all that it has started."""
    found = {"bytes": 0, "descriptors": 0, "processes": 0}
    waiting = [process]
    while waiting:
        one = waiting.pop()
        with contextlib.suppress(OSError, TypeError):
            said = Path(f"/proc/{one}/status").read_text()
            found["bytes"] += 1024 * int(re.search(r"VmRSS:\s+(\d+)", said)[1])  # type: ignore[index]
            found["descriptors"] += len(os.listdir(f"/proc/{one}/fd"))
            found["processes"] += 1
            for task in os.listdir(f"/proc/{one}/task"):
                waiting += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
    return found


async def is_idle(server: Attacked, seconds: float = 30.0) -> bool:
    """Whether nothing runs or waits any more."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ((_, said),) = await server.exchange(request("/metrics"), answers=1, half=False)
        counts = dict(line.rsplit(b" ", 1) for line in said.splitlines() if not line.startswith(b"#"))
        if float(counts[b"billfish_requests_running"]) == float(counts[b"billfish_requests_waiting"]) == 0:
            return True
        await asyncio.sleep(0.1)
    return False


def attack(
    requests: int,
    seed: int = 0,
    clients: int = 16,
    with_neighbor: bool = True,
    beside: float = 0.0,
    kinds: list[str] | None = None,
    model: Path | None = None,
    more: tuple[str, ...] = (),
    seconds: float = float("inf"),
) -> tuple[Attacked, dict[str, Any]]:
    """So many requests in rounds, or so many seconds of each attack; the server, and a record of what happened.
    seconds: no round begins later."""
    sys.setrecursionlimit(50_000)  # for `json`, which writes schemas in schemas
    with tempfile.TemporaryDirectory(prefix="billfish-attack-") as place:
        log, rng = Path(place, "log"), random.Random(seed)
        if model is None:
            model = Path(place, "small.gguf")
            write_model(model, Small(context=256, hidden=256, layers=4, feed_forward=512))
        words = ("--streams", "8", "--queue", "32", "--context", "256", "--no-access-log", "--threads", "1", *more)
        with served(model, log, *words) as (process, server):
            attacking = (
                _beside(server, beside, rng, clients, ways_of(kinds))
                if beside
                else _attack(server, process.pid, requests, rng, clients, with_neighbor, seconds)
            )
            record = dict[str, Any]()
            try:
                record = asyncio.run(attacking)
                process.send_signal(signal.SIGTERM)
            except ConnectionError as error:
                server.failures.append(f"{error}; {server.sent.total()} requests were sent")
            try:
                status = process.wait(30)
            except subprocess.TimeoutExpired:
                status = -1
            if status:
                server.failures.append(f"the server ended with {status}")
        said = log.read_text()
        if "Traceback" in said:
            server.failures.append(f"a traceback in the log: {said[said.index('Traceback') :][:1500]}")
    record |= {"failures": server.failures[:20], "failed": len(server.failures)}
    return server, record


async def _attack(
    server: Attacked,
    process: int,
    requests: int,
    rng: random.Random,
    clients: int,
    with_neighbor: bool,
    seconds: float,
) -> dict[str, Any]:
    await send(server, clients, clients, rng, {odd_bodies: 1})  # the first of all come at once
    first = await server.exchange(request("/v1/completions", json.dumps(ORDINARY).encode()), answers=1, half=False)
    server.expected = text_of(first[0][1])
    for kind in KINDS:  # what is allocated once, and processes that start once
        await send(server, 20 if kind is not silent else 1, clients, rng, {kind: 1})
    before, started = held(process), time.monotonic()
    quiet, attacked = list[tuple[float, float]](), list[tuple[float, float]]()
    with neighbor(server) if with_neighbor else contextlib.nullcontext() as lines:
        while lines is not None and not lines.stat().st_size:
            await asyncio.sleep(0.1)
        memory = [[server.sent.total(), before["bytes"]]]
        while server.sent.total() < requests and time.monotonic() < started + seconds:
            if lines is not None:
                begin = time.monotonic()
                await asyncio.sleep(QUIET_SECONDS)
                quiet.append((begin, time.monotonic()))
            begin = time.monotonic()
            await send(server, min(ROUND, requests - server.sent.total()), clients, rng)
            attacked.append((begin, time.monotonic()))
            memory.append([server.sent.total(), held(process)["bytes"]])
        asked = [json.loads(line) for line in lines.read_text().splitlines()] if lines is not None else []
    if not await is_idle(server):
        server.failures.append("requests are left")
    await asyncio.sleep(1.0)
    after = held(process)
    if after["bytes"] > before["bytes"] + GROWTH:
        server.failures.append(f"the server has grown from {before} to {after}")
    if after["descriptors"] > before["descriptors"] + 8:
        server.failures.append(f"descriptors are left: {before} and {after}")
    await ordinary(server, rng)
    return {
        "requests": dict(sorted(server.sent.items())),
        "statuses": {str(status): count for status, count in sorted(server.statuses.items())},
        "clients": clients,
        "seconds": time.monotonic() - started,
        "worst_seconds": server.worst_seconds,
        "held_before": before,
        "held_after": after,
        "memory": memory,
        "neighbor": {"quiet": _times(asked, quiet), "attacked": _times(asked, attacked)},
    }


def ways_of(kinds: list[str] | None) -> dict[str, dict[Attack, int]]:
    """Attacks of each kind, and of all together."""
    ways = {kind.__name__: {kind: 1} for kind in KINDS} | {"all": KINDS}
    return {name: ways[name] for name in kinds or ways}


async def _beside(
    server: Attacked, seconds: float, rng: random.Random, clients: int, ways: dict[str, dict[Attack, int]]
) -> dict[str, Any]:
    """How long the ordinary client waits beside each attack, and before and after it. ways: to attack."""
    first = await server.exchange(request("/v1/completions", json.dumps(ORDINARY).encode()), answers=1, half=False)
    server.expected = text_of(first[0][1])
    spans, sent = dict[str, list[tuple[float, float]]](), dict[str, int]()
    with neighbor(server) as lines:
        while not lines.stat().st_size:
            await asyncio.sleep(0.1)
        os.nice(19)  # clients are usually on other machines
        for name, kinds in ways.items():
            begin = time.monotonic()
            await asyncio.sleep(seconds / 2)
            middle = time.monotonic()
            before = server.sent.total()
            await send(server, float("inf"), clients, rng, kinds, middle + seconds)
            sent[name] = server.sent.total() - before
            end = time.monotonic()
            if not await is_idle(server):
                server.failures.append("requests are left")
            calm = time.monotonic()
            await asyncio.sleep(seconds / 2)
            spans[name] = [(begin, middle), (middle, end), (calm, time.monotonic())]
        asked = [json.loads(line) for line in lines.read_text().splitlines()]
    found = dict[str, dict[str, Any]]()
    for name, (before, attacked, after) in spans.items():
        quiet, beside = _times(asked, [before, after]), _times(asked, [attacked])
        found[name] = {"requests": sent[name], "quiet": quiet, "attacked": beside}
        usual = {"alone": quiet, "beside as many ordinary clients": found.get("ordinary", {}).get("attacked", {})}
        for what, times in usual.items():
            if "median" in beside and "median" in times:
                found[name][f"ratio to {what}"] = {which: beside[which] / times[which] for which in ("median", "p99")}
    return {"clients": clients, "worst_seconds": server.worst_seconds, "neighbor": found}


def _times(asked: list[tuple[float, float, int]], spans: list[tuple[float, float]]) -> dict[str, float]:
    """Of the answers that were asked within these spans."""
    inside = [one for one in asked if any(first <= one[0] < last for first, last in spans)]
    times = sorted(seconds for _, seconds, status in inside if status == 200)
    if len(times) < 2:
        return {"answers": len(times)}
    return {
        "answers": len(times),
        "refused": len(inside) - len(times),
        "median": statistics.median(times),
        "p99": times[int(0.99 * (len(times) - 1))],
        "worst": times[-1],
    }


def server(count: int, seed: int = 0) -> Rounds:
    """A row of the attack's table. Who sends no whole head is left alone for 10 s: its time is not the server's."""
    attacked, record = attack(count, seed, clients=24, with_neighbor=False)
    good = sum(n for status, n in attacked.statuses.items() if status == 200)
    row = Rounds("http requests", attacked.sent.total(), good, attacked.statuses.total() - good)
    row.failures = list(map(str, attacked.failures))
    row.worst_seconds = max(took for kind, took in attacked.worst_seconds.items() if kind != "silent")
    row.worst_memory = max(0, record["held_after"]["bytes"] - record["held_before"]["bytes"])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--beside", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after so long")
    parser.add_argument("--alone", action="store_true", help="no ordinary client beside the attack")
    parser.add_argument("--kinds", nargs="+", help="of --beside: all, or names of attacks")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--fronts", default="0")
    parser.add_argument("--neighbor", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.neighbor:
        return ask_again_and_again(arguments.neighbor[0], int(arguments.neighbor[1]))
    _, record = attack(
        arguments.requests,
        arguments.seed,
        arguments.clients,
        with_neighbor=not arguments.alone,
        beside=arguments.beside,
        kinds=arguments.kinds,
        seconds=arguments.seconds,
        model=arguments.model,
        more=("--fronts", arguments.fronts),
    )
    text = json.dumps({"seed": arguments.seed, **record}, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    sys.exit(1 if record["failed"] else 0)


if __name__ == "__main__":
    main()
