"""Many clients at once, some of them rude: is every answer the right one, and does the server forget them all?

    python -m tests.support.serving_storm [--model FILE] [--requests 5000] [--clients 32] [--json FILE]

A pool of prompts with seeds and lengths is first answered by `generate` alone, in exact mode. Then clients send them to
`billfish serve` at random: whole, as streams, several answers at once, read slowly, left half-way, as vectors, or with
broken bodies. A full queue answers 429, and the client comes again. It ends with 1 unless every answer that was not
left is what it is alone, every broken body is refused with 400, nothing runs in the end, and memory has not grown.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import billfish
from benchmarks.machine import cpu_name
from benchmarks.serving_client import ServerProcess, billfish_server, events, posted
from billfish.core.files import write_atomically
from billfish.llm import Model, default_model, load

COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
WORDS = ["the", "sea", "is", "wide", "and", "old", "ships", "sail", "far", "out", "where", "no", "bird", "sings"]
BROKEN = [
    b"",
    b"{",
    b"[1]",
    b'{"prompt": "\xff"}',
    b'{"prompt": "a", "n": 1e9}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": ' + b"[" * 50000,
    b'{"prompt": 5}',
]
PAUSE = 0.02  # seconds between two events that a slow client reads
GROWTH = 0.05  # of memory at most, from the first fifth of the storm to its end


@dataclass(frozen=True)
class Known:
    """A request, its answers alone (with its seed, and with the next one), and the vector of its prompt."""

    body: dict[str, Any]
    texts: list[str]
    vector: np.ndarray


class QueueWasFull(Exception):
    """The client comes again."""


def whole(url: str, known: Known, rng: random.Random, n: int = 1) -> bool:
    """Whether an answer in one piece is right; so do all kinds of requests below."""
    found = fetched(url, COMPLETIONS, known.body | {"n": n})
    return [choice["text"] for choice in found["choices"]] == known.texts[:n]


def several(url: str, known: Known, rng: random.Random) -> bool:
    return whole(url, known, rng, 2)


def stream(url: str, known: Known, rng: random.Random, pause: float = 0.0) -> bool:
    with posted(url, COMPLETIONS, known.body | {"stream": True}) as answer:
        check(answer.status)
        text = ""
        for event in events(answer):
            text += event["choices"][0]["text"]
            time.sleep(pause)
        return text == known.texts[0]


def slow(url: str, known: Known, rng: random.Random) -> bool:
    return stream(url, known, rng, PAUSE)


def left(url: str, known: Known, rng: random.Random) -> bool:
    """The client reads some events and goes; up to there they are right."""
    with posted(url, COMPLETIONS, known.body | {"stream": True}) as answer:
        check(answer.status)
        text, count = "", rng.randrange(6)
        for read, event in enumerate(events(answer)):
            text += event["choices"][0]["text"]
            if read == count:
                break
        return known.texts[0].startswith(text)


def left_early(url: str, known: Known, rng: random.Random) -> bool:
    """The client sends its request and does not wait."""
    with posted(url, COMPLETIONS, known.body, wait=False):
        time.sleep(rng.random() * 0.1)
    return True


def vector(url: str, known: Known, rng: random.Random) -> bool:
    found = fetched(url, EMBEDDINGS, {"input": known.body["prompt"]})
    return np.array_equal(np.float32(found["data"][0]["embedding"]), known.vector)


def broken(url: str, known: Known, rng: random.Random) -> bool:
    with posted(url, COMPLETIONS, rng.choice(BROKEN)) as answer:
        return answer.status == 400 and "message" in json.loads(answer.read())["error"]


KINDS = {whole: 5, stream: 5, several: 1, slow: 1, left: 3, left_early: 2, vector: 1, broken: 2}


def fetched(url: str, path: str, body: dict[str, Any]) -> Any:
    """The JSON of an answer in one piece."""
    with posted(url, path, body) as answer:
        check(answer.status)
        return json.loads(answer.read())


def check(status: int) -> None:
    if status == 429:
        raise QueueWasFull
    if status != 200:
        raise ConnectionError(f"status {status}")


@dataclass
class Storm:
    """What is sent, and what came of it. done: requests by kind. wrong: what was not right. refused: how often a
    client had to come again."""

    url: str
    pool: list[Known]
    requests: int
    clients: int
    seed: int = 0
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refused: int = 0

    def run(self, watch: Callable[[int], object] = lambda count: None) -> None:
        """Send all requests. watch: called with the number of those that were sent."""
        rng = random.Random(self.seed)
        kinds = rng.choices(list(KINDS), list(KINDS.values()), k=self.requests)
        todo = list(enumerate(kinds))
        turn = threading.Lock()

        def client() -> None:
            while True:
                with turn:
                    if not todo:
                        return
                    number, kind = todo.pop()
                    watch(self.requests - len(todo))
                self._send(kind, random.Random(self.seed * self.requests + number))

        threads = [threading.Thread(target=client) for _ in range(self.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _send(self, kind: Callable[..., bool], rng: random.Random) -> None:
        """One request, as often as the queue is full."""
        known, problem = rng.choice(self.pool), ""
        while True:
            try:
                if not kind(self.url, known, rng):
                    problem = f"not what was expected for {known.body}"
                break
            except QueueWasFull:
                self.refused += 1
                time.sleep(0.05)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                break
        self.done[kind.__name__] += 1
        if problem:
            self.wrong.append(f"{kind.__name__}: {problem}")


def known_answers(model: Model, count: int, seed: int = 0) -> list[Known]:
    """Requests of random lengths, answered alone."""
    rng = random.Random(seed)
    pool = []
    for number in range(count):
        prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 30)))
        settings = {"max_tokens": rng.randint(1, 40), "temperature": rng.choice([0, 0.8, 1.5]), "top_p": 0.95}
        texts = [
            "".join(model.generate(prompt, raw=True, seed=number + i, activations="exact", **settings))
            for i in range(2)
        ]
        pool.append(Known({"prompt": prompt, "seed": number, **settings}, texts, model.embed_text(prompt)))
    return pool


def gauges(url: str) -> dict[str, float]:
    """What /metrics says."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def settled(url: str, seconds: float = 60.0) -> bool:
    """Whether nothing runs or waits, after a while."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = gauges(url)
        if not found["billfish_requests_running"] and not found["billfish_requests_waiting"]:
            return True
        time.sleep(0.05)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="(SmolLM2)")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--pool", type=int, default=50, help="different requests")
    parser.add_argument("--json", metavar="FILE", help="write the record there")
    arguments = parser.parse_args()
    path = arguments.model or default_model()
    pool = known_answers(load(path, device="cpu", progress=False), arguments.pool)
    words = ("--device", "cpu", "--activations", "exact", "--streams", "8", "--queue", "16", "--context", "512")
    started = time.perf_counter()
    with billfish_server(str(path), *words) as server:
        storm = Storm(server.url, pool, arguments.requests, arguments.clients)
        memory = watched_memory(storm, server)
        calm = settled(server.url)
        counts = gauges(server.url)
    growth = memory[-1] / memory[0] - 1 if memory[0] else 0.0
    about = {"cpu": f"{platform.machine()} {cpu_name()}", "billfish": billfish.__version__, "model": path.name}
    record = {
        "requests": dict(sorted(storm.done.items())),
        "clients": arguments.clients,
        "wrong": len(storm.wrong),
        "came_again": storm.refused,
        "settled": calm,
        "memory_bytes": memory,
        "memory_growth": growth,
        "generated_tokens": counts["billfish_generated_tokens_total"],
        "cancelled": counts['billfish_requests_finished_total{reason="cancelled"}'],
        "seconds": time.perf_counter() - started,
    }
    for name, value in record.items():
        print(f"{name:18} {value}")
    print(*storm.wrong[:20], sep="\n")
    if arguments.json:
        write_atomically(Path(arguments.json), (json.dumps({"about": about, **record}, indent=1) + "\n").encode())
    if storm.wrong or not calm or growth > GROWTH or storm.done.total() != arguments.requests:
        sys.exit(1)


def memory_of(process: int) -> int:
    """Bytes that a process holds (Linux); 0 elsewhere."""
    try:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def watched_memory(storm: Storm, server: ServerProcess) -> list[int]:
    """Run the storm: the server's memory after each fifth of it."""
    memory: list[int] = []

    def watch(count: int) -> None:
        if count >= (len(memory) + 1) * storm.requests // 5:
            memory.append(memory_of(server.process.pid))
            print(f"{count} of {storm.requests} requests, {memory[-1] / 1e6:.0f} MB", flush=True)

    storm.run(watch)
    return memory


if __name__ == "__main__":
    main()
