"""Does the time to the first token tell one API key what another has asked?

    python -m benchmarks.serving_tenants [MODEL] [--rounds 100] [--json FILE]

One key asks a prompt. Then another key asks the same prompt, or one that nobody has asked: if the second key shared the
first one's KV cache, its first token would come earlier. `cached_tokens` are taken from the answers; times are compared
by their medians and by a permutation test, the share of random divisions of all times into two halves whose medians
differ as much. With --share-prefixes the same script sees the difference.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks import command, machine, records
from benchmarks.serving_client import billfish_server, events

WORDS = ["the", "sea", "is", "wide", "and", "old", "ships", "sail", "far", "out", "where", "no", "bird", "sings"]
KEYS = ("first-key", "second-key")
DIVISIONS = 2000


def asked(url: str, key: str, prompt: str) -> tuple[float, int]:
    """Seconds to the first event of a stream, and how many tokens of the prompt were in the KV cache."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    try:
        started = time.perf_counter()
        text = json.dumps(body | {"stream_options": {"include_usage": True}})
        connection.request("POST", "/v1/completions", text, headers)
        answer, seconds, cached = connection.getresponse(), 0.0, 0
        if answer.status != 200:
            raise SystemExit(f"status {answer.status}: {answer.read()[:300]!r}")
        for event in events(answer):
            seconds = seconds or time.perf_counter() - started
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        return seconds, cached
    finally:
        connection.close()


def prompt_of(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def measure(url: str, rounds: int, words: int, seed: int = 0) -> dict[str, list[tuple[float, int]]]:
    """The second key's times and cached tokens, for prompts that the first key has asked and for new ones, in turns."""
    rng = random.Random(seed)
    found: dict[str, list[tuple[float, int]]] = {"same": [], "new": []}
    for _ in range(rounds):
        for kind in rng.sample([*found], 2):
            prompt = prompt_of(rng, words)
            asked(url, KEYS[0], prompt)
            found[kind].append(asked(url, KEYS[1], prompt if kind == "same" else prompt_of(rng, words)))
    return found


def by_chance(a: list[float], b: list[float], rng: random.Random) -> float:
    """The share of random divisions of all times whose medians differ at least as much."""
    seen, every = abs(statistics.median(a) - statistics.median(b)), [*a, *b]
    count = 0
    for _ in range(DIVISIONS):
        rng.shuffle(every)
        count += abs(statistics.median(every[: len(a)]) - statistics.median(every[len(a) :])) >= seen
    return count / DIVISIONS


def summary(found: dict[str, list[tuple[float, int]]]) -> dict[str, object]:
    times = {kind: [seconds for seconds, _ in pairs] for kind, pairs in found.items()}
    quarters = statistics.quantiles(times["new"], n=4)
    return {
        "rounds": len(found["new"]),
        "cached_tokens": {kind: max(cached for _, cached in pairs) for kind, pairs in found.items()},
        "first_token_median": {kind: statistics.median(each) for kind, each in times.items()},
        "difference": statistics.median(times["same"]) - statistics.median(times["new"]),
        "noise": quarters[2] - quarters[0],  # half of the times for new prompts are that far apart
        "by_chance": by_chance(times["same"], times["new"], random.Random(0)),
    }


def main() -> None:
    parser = command.parser(__spec__, __doc__, rounds=100)
    parser.add_argument("model", nargs="?", type=Path, help="(default: SmolLM2-135M)")
    parser.option("--words", "words of a prompt", 120, command.positive, "N")
    arguments = parser.parse_args()
    model = [str(arguments.model)] if arguments.model else []
    record: dict[str, object] = {"about": machine.machine() | machine.versions()}
    with tempfile.NamedTemporaryFile("w") as keys:
        keys.write("\n".join(KEYS))
        keys.flush()
        words = (
            "--device",
            "cpu",
            "--streams",
            "4",
            "--context",
            "512",
            "--api-key-file",
            keys.name,
            "--no-access-log",
        )
        for name, more in (("apart", ()), ("shared", ("--share-prefixes",))):
            with billfish_server(*model, *words, *more) as server:
                asked(server.url, KEYS[0], "warm up")
                record[name] = summary(measure(server.url, arguments.rounds, arguments.words))
            print(name, json.dumps(record[name], indent=1), flush=True)
    records.write(arguments.json, record)


if __name__ == "__main__":
    main()
