"""Many requests to one engine with little memory: none lost, none mixed up, and memory stays flat.

    python -m tests.support.serving_soak [--requests 100000] [--device cpu] [--streams 6] [--json FILE]

Threads send prompts that often begin alike to an engine whose KV cache holds little more than one of the longest, so
that requests are preempted all the time. Some are cancelled, at once or in the middle; some are left by a client whose
callback raises; the queue is often full, and then the client comes again; some ask for vectors. In exact mode, on a GPU
batch-invariant, each answer is compared with what `generate` gives alone. It ends with 1 unless every request ended
once, every answer is right up to where it was cancelled, everything is free in the end and memory has not grown.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

import billfish
from benchmarks.machine import cpu_name
from billfish.core.files import write_atomically
from billfish.core.typing import Activations
from billfish.llm import Model, cuda_kv_cache
from billfish.llm.sampler import Sampling
from billfish.serving.engine import engine as engines
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.requests import Chosen, QueueFull, Request

GROWTH = 0.05  # of memory at most, from the first fifth to the end
PATIENCE = 600  # seconds after which a request that has not ended is lost


def memory_of_this_process() -> int:
    """Bytes (Linux); 0 elsewhere."""
    try:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


@dataclass(frozen=True)
class Known:
    """A request, its answer alone without the model's end, their log probabilities if it asks for these, how the answer
    ends, and the vector of its prompt."""

    request: Request
    tokens: list[int]
    logprobs: list[float]
    finished: str
    vector: NDArray[np.float32]


@dataclass
class Soak:
    """What is sent, and what came of it. ends: requests by how they ended. wrong: what was not right."""

    engine: Engine
    pool: list[Known]
    requests: int
    clients: int
    seed: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refused: int = 0
    memory: list[int] = field(default_factory=list)
    _sent: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        threads = [threading.Thread(target=self._client, args=(number,)) for number in range(self.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        while self._next():
            known, kind = rng.choice(self.pool), rng.random()
            while True:
                try:
                    end = self._vector(known) if kind < 0.03 else self._answer(known, kind, rng)
                    break
                except QueueFull:
                    with self._lock:
                        self.refused += 1
                    time.sleep(0.005)
                except Exception as error:
                    end = f"{type(error).__name__}: {error}"
                    break
            with self._lock:
                self.ends[end] += 1
                if end not in ("stop", "length", "cancelled", "left", "vector"):
                    self.wrong.append(f"{end}: {known.request}")

    def _next(self) -> bool:
        with self._lock:
            if self._sent == self.requests:
                return False
            self._sent += 1
            if self._sent * 10 // self.requests > len(self.memory):
                self.memory.append(memory_of_this_process())
            return True

    def _vector(self, known: Known) -> str:
        [vector] = self.engine.embed([known.request.prompt]).result(PATIENCE)
        return "vector" if np.array_equal(vector, known.vector) else "another vector"

    def _answer(self, known: Known, kind: float, rng: random.Random) -> str:
        """How one request ended: cancelled after some tokens, left by its client, or whole."""
        ended, tokens, logprobs, finishes = threading.Event(), list[int](), list[float](), list[str]()
        leaves_at = rng.randrange(1, 20) if kind > 0.95 else 0
        cancel_at = rng.randrange(20) if 0.75 < kind <= 0.95 else -1

        def take(chosen: Chosen) -> None:
            if chosen.token is not None and chosen.token not in self.engine.model.tokenizer.ends:
                tokens.append(chosen.token)
                logprobs.extend(value for _, value in chosen.scored[:1])
            if chosen.finished:
                finishes.append(chosen.finished + (f" {chosen.error}" if chosen.error else ""))
                ended.set()
            elif leaves_at and len(tokens) >= leaves_at:
                raise OSError("the client has gone")
            elif len(tokens) == cancel_at:
                ticket.cancel()

        sent = threading.Event()
        ticket = self.engine.submit(known.request, lambda chosen: (sent.wait(), take(chosen)))
        sent.set()
        if cancel_at == 0:
            ticket.cancel()
        if not ended.wait(PATIENCE):
            return "lost"
        if len(finishes) != 1:
            return f"ended {len(finishes)} times"
        right = tokens == known.tokens[: len(tokens)] and logprobs == known.logprobs[: len(logprobs)]
        whole = finishes[0] == known.finished and len(tokens) == len(known.tokens)
        cut = finishes[0] == "cancelled" and (leaves_at or cancel_at >= 0)
        if not (right and (whole or cut)):
            return "another answer"
        return "left" if cut and leaves_at else finishes[0]


def exact(model: Model) -> Activations | None:
    """The activations for which an answer has the same bits alone and beside others. On a GPU, x is float16 always."""
    return "exact" if model.decoder.device == "cpu" else None


def known_answers(model: Model, count: int, longest: int, seed: int = 0) -> list[Known]:
    """Requests of random lengths up to `longest` tokens with their answers, alone."""
    rng, vocabulary = random.Random(seed), model.config.vocabulary
    common = [rng.randrange(4, vocabulary) for _ in range(longest // 2)]
    pool = []
    for number in range(count):
        prompt = common[: rng.choice([0, 0, longest // 4, longest // 2])]
        prompt += [rng.randrange(4, vocabulary) for _ in range(rng.randrange(1, longest // 4))]
        how: dict[str, Any] = {"temperature": rng.choice([0.0, 0.8, 1.5]), "top_p": 0.95, "seed": number}
        how["frequency_penalty"], how["min_p"] = rng.choice([0.0, 0.0, 0.4]), rng.choice([0.0, 0.02])
        how["logit_bias"] = dict.fromkeys(sorted(model.tokenizer.ends), 5.0) if rng.random() < 0.3 else {}
        length, logprobs = rng.randint(1, longest // 4), rng.choice([None, None, None, 2])
        answer = model.generate(prompt, max_tokens=length, activations=exact(model), logprobs=logprobs, **how)
        tokens = [token for token in answer.tokens if token not in model.tokenizer.ends]
        request = Request(prompt, len(answer.tokens), Sampling(**how), logprobs=logprobs)
        values = [token.logprob for token in answer.logprobs or () if token.id not in model.tokenizer.ends]
        ended = "stop" if len(answer.tokens) > len(tokens) else "length"
        pool.append(Known(request, tokens, values, ended, model.pool(model.hidden(prompt))))
    return pool


def soak(
    model: Model, requests: int, *, longest: int = 160, streams: int = 6, alone: Model | None = None
) -> tuple[Soak, dict[str, Any]]:
    """Send them; also a record. There are twice as many clients as streams, and one less has room in the queue.
    alone: the same model once more, to answer alone: an engine may use all pages that its model has taken before."""
    pool, started = known_answers(alone or model, 60, longest), time.perf_counter()
    about: dict[str, Any] = {"streams": streams, "context": longest, "queue": streams - 1, "activations": exact(model)}
    # Requests start as soon as there is room for their prompts, so that they are preempted all the time. On a GPU they
    # share pages of prefixes, and need fewer.
    about["cache_tokens"] = max(longest, (longest + 96) * streams // (6 if model.decoder.device == "cpu" else 16))
    with patch.object(engines, "SPARE", 0), Engine(model, **about) as engine:
        if model.decoder.device != "cpu":
            engine._rows_again = 1  # a decode step's rows have other bits than a prompt's, and exact mode knows that
        found = Soak(engine, pool, requests, clients=2 * streams)
        found.run()
        counts, free = engine.counts(), engine._slots.free
        if (counts.running, counts.waiting, free) != (0, 0, engine.streams):
            found.wrong.append(f"not idle: {counts}, {free} slots are free")
    if found.ends.total() != requests:
        found.wrong.append(f"{found.ends.total()} of {requests} requests have ended")
    record = {
        "requests": requests,
        "ends": dict(sorted(found.ends.items())),
        "wrong": len(found.wrong),
        "queue_was_full": found.refused,
        "preemptions": counts.preemptions,
        "cached_tokens": counts.cached_tokens,
        "prompt_tokens": counts.prompt_tokens,
        "generated_tokens": counts.generated_tokens,
        "memory_bytes": found.memory,
        "seconds": round(time.perf_counter() - started, 1),
    }
    return found, record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for a GPU (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=6, help="more are quicker (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the record there")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from llm_models import Small, write_model  # tests find their support without a package

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        if arguments.device == "cpu":
            write_model(path, Small(context=256, hidden=32))
            found, record = soak(billfish.llm.load(path, device="cpu"), arguments.requests, streams=arguments.streams)
        else:
            write_model(path, Small(context=256, hidden=256, heads=8, feed_forward=512))
            billfish.BACKENDS["cuda"].batch_invariant = True
            cuda_kv_cache.SLAB_BYTES = 0  # pages are taken one by one, or there would be more of them than the limit
            model, alone = (billfish.llm.load(path, device=arguments.device) for _ in range(2))
            found, record = soak(model, arguments.requests, streams=arguments.streams, alone=alone)
    for name, value in record.items():
        print(f"{name:18} {value}")
    print(*found.wrong[:20], sep="\n")
    memory = found.memory
    grown = memory[-1] / memory[len(memory) // 5] - 1 if len(memory) >= 5 and memory[0] else 0.0
    print(f"memory has grown by {grown:.1%} since the first fifth")
    if arguments.json:
        about = {
            "device": arguments.device,
            "cpu": f"{platform.machine()} {cpu_name()}",
            "billfish": billfish.__version__,
        }
        written = {"about": about, **record, "memory_growth": grown}
        write_atomically(Path(arguments.json), (json.dumps(written, indent=1) + "\n").encode())
    sys.exit(bool(found.wrong) or grown > GROWTH)


if __name__ == "__main__":
    main()
