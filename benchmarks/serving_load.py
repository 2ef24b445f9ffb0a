"""Clients that load a server, in processes of their own: they stream answers and note when tokens come.

A process of clients reads lines of JSON, {"url", "bodies"}: it sends all bodies at once, and prints a line with what it
measured. Nothing in it is done for a token but reading the socket and counting events.
"""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

PROCESSES = 8
END = b"data: [DONE]"
SECONDS = 600.0  # for a wave


@dataclass
class Answer:
    """One stream. first: seconds to its first token. gaps: seconds between reads that had tokens, and how many tokens
    the later one had. tokens, cached: of the answer, and of the prompt those that were not computed."""

    began: float
    came: bytearray = field(default_factory=bytearray)
    first: float = 0.0
    last: float = 0.0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    tail: bytes = b""
    over: bool = False

    def take(self, data: bytes) -> None:
        """Some bytes have come. An event that is cut counts where it ends."""
        now = time.perf_counter()
        events, _, self.tail = (self.tail + data).rpartition(b"\n\n")
        count = events.count(b'"text":')
        if count and not self.first:
            self.first = now - self.began
        elif count:
            self.gaps.append((now - self.last, count))
        if count:
            self.last = now
        self.came += data
        del self.came[:-4000]
        self.over = END in self.came

    def found(self) -> dict[str, Any]:
        """What is printed. Raises where the answer is not whole."""
        text = bytes(self.came)
        at = text.rfind(b'"usage":{')
        if not self.over or at < 0:
            raise SystemExit(f"an answer without its end: {text[-500:]!r}")
        usage = json.JSONDecoder().raw_decode(text[at + 8 :].decode())[0]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        gaps = [seconds for seconds, _ in self.gaps]
        return {
            "first": self.first,
            "gaps": gaps,
            "tokens": usage["completion_tokens"],
            "cached": cached,
            "began": self.began,
            "last": self.last,
        }


def clients(url: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send all bodies at once, and read all answers to their ends."""
    place = urlsplit(url)
    address = (place.hostname or "", place.port or 80)
    waiting = selectors.DefaultSelector()
    answers = list[Answer]()
    for body in bodies:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
        made = socket.create_connection(address)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answer = Answer(time.perf_counter())
        made.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        made.setblocking(False)
        waiting.register(made, selectors.EVENT_READ, answer)
        answers.append(answer)
    end = time.monotonic() + SECONDS
    while waiting.get_map():
        for key, _ in waiting.select(1.0):
            found: Any = key.fileobj
            data = found.recv(65536)
            if data:
                key.data.take(data)
            if not data or key.data.over:
                waiting.unregister(found)
                found.close()
        if time.monotonic() > end:
            raise SystemExit("the answers take too long")
    return [answer.found() for answer in answers]


@contextmanager
def processes(count: int = PROCESSES) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of clients. They end with their standard input."""
    command = [sys.executable, "-m", "benchmarks.serving_load"]
    with ExitStack() as stack:
        made = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(count)
        ]
        try:
            yield made
        finally:
            for process in made:
                assert process.stdin is not None
                process.stdin.close()


def wave(made: Sequence[subprocess.Popen[str]], url: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send requests from all processes at once. Returns what each client measured, in the order of the bodies."""
    shares = [list(bodies[number :: len(made)]) for number in range(len(made))]
    busy = [(process, share) for process, share in zip(made, shares, strict=True) if share]
    for process, share in busy:
        assert process.stdin is not None
        process.stdin.write(json.dumps({"url": url, "bodies": share}) + "\n")
    for process, _ in busy:
        assert process.stdin is not None
        process.stdin.flush()
    found: list[Any] = [None] * len(bodies)
    for number, (process, _) in enumerate(busy):
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("a process of clients has ended")
        found[number :: len(made)] = json.loads(line)
    return found


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(clients(asked["url"], asked["bodies"])), flush=True)


if __name__ == "__main__":
    main()
