"""Time `billfish serve` for waves of clients: 16, 64 and 256 that stream 128 tokens after prompts of 200, and others.

The model has the sizes of Llama-3-8B and random weights in q4_0; greedy answers do not end. It is written to
--models once (4.6 GB, some seconds). Clients run in eight processes. Each case is three waves: the first one comes
right after the server says that it listens. With --decoder, `generate_batch` of as many prompts is timed first.

Then there are 32 clients in pairs of waves. In the second wave of a pair, one client has a JSON schema, penalties and
log probabilities: `others_of_plain` is what the other 31 keep of their tokens per second.

    python -m benchmarks.serving_waves --device cuda --models /dev/shm --json benchmarks/results/serving_h200.json
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, machine, records
from benchmarks.llm_cuda import model_file
from benchmarks.serving_client import billfish_server
from benchmarks.serving_load import processes, wave
from billfish.llm import load
from billfish.llm.text_model import TextModel

WAVES = 3
# Clients, tokens of a prompt, of them common to all, and tokens of an answer.
CASES = [
    (16, 200, 0, 128),
    (64, 200, 0, 128),
    (256, 200, 0, 128),
    (64, 16, 0, 512),
    (256, 16, 0, 512),
    (64, 2016, 2000, 64),
]
SMALL = [(4, 20, 0, 16), (8, 20, 16, 8)]
MIXED, SMALL_MIXED = (32, 200, 0, 128), (5, 20, 0, 16)  # one of the clients is heavy
FIRST = 300  # tokens from here on are plain ones


def bodies(clients: int, prompt: int, common: int, answer: int, rng: random.Random, vocabulary: int) -> list[Any]:
    """Requests of one wave. No two prompts are equal."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(min(FIRST, vocabulary // 2), vocabulary) for _ in range(count)]

    start = tokens(common)
    told = {"max_tokens": answer, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    return [{"prompt": start + tokens(prompt - common), **told} for _ in range(clients)]


def heavy(body: dict[str, Any]) -> dict[str, Any]:
    """The same request with a JSON schema, penalties and log probabilities. Its answer has as many tokens."""
    marks = {"type": "array", "items": {"type": "integer"}, "minItems": body["max_tokens"]}
    fields = {"name": {"type": "string", "maxLength": 16}, "right": {"type": "boolean"}, "marks": marks}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    asked = {"type": "json_schema", "json_schema": {"name": "marks", "schema": schema}}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5}
    return {**body, **penalties, "logprobs": 5, "response_format": asked}


def rate_of_clients(found: Sequence[dict[str, Any]]) -> float:
    """Tokens per second of all clients, each from its request to its own last token."""
    return float(sum(each["tokens"] / (each["last"] - each["began"]) for each in found))


def summary(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of one wave: tokens per second from the first request to the last token, and percentiles in milliseconds."""
    seconds = max(each["last"] for each in found) - min(each["began"] for each in found)
    first = 1000 * np.array([each["first"] for each in found])
    gaps = 1000 * np.array([gap for each in found for gap in each["gaps"]] or [0.0])
    return {
        "tok_per_s": round(sum(each["tokens"] for each in found) / seconds, 1),
        "first_token_p50_ms": round(float(np.percentile(first, 50)), 1),
        "first_token_p99_ms": round(float(np.percentile(first, 99)), 1),
        "gap_p50_ms": round(float(np.percentile(gaps, 50)), 2),
        "gap_p99_ms": round(float(np.percentile(gaps, 99)), 2),
        "cached_tokens": round(statistics.mean(each["cached"] for each in found), 1),
    }


def decoder_rates(path: Path, device: str, cases: Sequence[tuple[int, int, int, int]]) -> dict[tuple[int, int], float]:
    """Tokens per second of generate_batch, by the number of prompts and the length of answers."""
    rates, rng = {}, random.Random(1)
    with load(path, device=device, progress=False) as model:
        for clients, prompt, common, answer in cases:
            if prompt > 100:
                continue
            for _ in range(2):  # the first one warms up
                asked = [b["prompt"] for b in bodies(clients, prompt, common, answer, rng, model.config.vocabulary)]
                began = time.perf_counter()
                model.generate_batch(asked, max_tokens=answer)
                rates[clients, answer] = clients * answer / (time.perf_counter() - began)
    return rates


def measure(
    path: Path,
    device: str,
    cases: Sequence[tuple[int, int, int, int]],
    *more: str,
    save: Callable[[list[dict[str, Any]]], object] = lambda found: None,
) -> list[dict[str, Any]]:
    """Records of all waves. more: words for the server. save: called after each case with all records so far."""
    most, rng, made = max(case[0] for case in cases), random.Random(0), list[dict[str, Any]]()
    context = max(case[1] + case[3] for case in cases) + 16
    vocabulary = load_vocabulary(path)
    for case in cases:  # a server for each: its first wave is a first one
        clients, prompt, common, answer = case
        words = f"--device {device} --streams {most} --queue {most} --context {context} --no-access-log".split()
        with billfish_server(str(path), *words, *more) as server, processes(min(8, clients)) as loaders:
            for number in range(1, WAVES + 1):
                found = wave(loaders, server.url, bodies(*case, rng, vocabulary))
                about = {"clients": clients, "prompt": prompt, "common": common, "answer": answer, "wave": number}
                made.append(about | summary(found))
                print(row(made[-1]), flush=True)
        save(made)
    return made


def measure_mixed(path: Path, device: str, case: tuple[int, int, int, int], *more: str) -> list[dict[str, Any]]:
    """Records of pairs of waves: without a heavy client, and where the first of the clients is one (`heavy` is 1)."""
    rng, made, vocabulary = random.Random(0), list[dict[str, Any]](), load_vocabulary(path)
    clients, prompt, common, answer = case
    context = prompt + answer + 16
    words = f"--device {device} --streams {clients} --queue {clients} --context {context} --no-access-log".split()
    with billfish_server(str(path), *words, *more) as server, processes(min(8, clients)) as loaders:
        for number in range(1, WAVES + 1):
            rates = list[float]()
            for count in (0, 1):
                asked = bodies(*case, rng, vocabulary)
                found = wave(loaders, server.url, [*map(heavy, asked[:count]), *asked[count:]])
                if any(each["tokens"] != answer for each in found):
                    raise SystemExit("an answer has ended before its last token")
                rates.append(rate_of_clients(found[1:]))
                about = {"clients": clients, "prompt": prompt, "common": common, "answer": answer, "wave": number}
                others = {"heavy": count, "others_tok_per_s": round(rates[-1], 1)}
                made.append(about | summary(found) | others)
            made[-1]["others_of_plain"] = round(rates[1] / rates[0], 3)
            print(*map(row, made[-2:]), sep="\n", flush=True)
    return made


def load_vocabulary(path: Path) -> int:
    """Tokens of a model."""
    return TextModel.open(path).config.vocabulary


def row(record: dict[str, Any]) -> str:
    """A line of the table; times as median / 99th percentile."""
    found = record
    asked = f"{found['clients']:4} clients, {found['prompt']:4} in ({found['common']} common), {found['answer']:4} out"
    first = f"first token {found['first_token_p50_ms']:7.1f} / {found['first_token_p99_ms']:7.1f} ms"
    gap = f"gap {found['gap_p50_ms']:6.2f} / {found['gap_p99_ms']:6.2f} ms, {found['cached_tokens']:g} cached"
    line = f"{asked}, wave {found['wave']}: {found['tok_per_s']:9.1f} tok/s, {first}, {gap}"
    if "heavy" in found:
        line += f", {found['heavy']} heavy: the others {found['others_tok_per_s']:.1f} tok/s"
    return line + (f", {found['others_of_plain']:.1%} of before" if "others_of_plain" in found else "")


def main() -> None:
    parser = command.parser(__spec__, __doc__)
    parser.option("--device", "device of the server", "cuda", str, "DEVICE")
    parser.option("--shape", "sizes of the model, of benchmarks/random_model.py", "8b", str, "NAME")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="folder that keeps the GGUF file")
    parser.add_argument("--model", type=Path, metavar="FILE", help="a model to use instead (default: a random one)")
    parser.add_argument("--small", action="store_true", help="few clients and tokens, to try the command")
    parser.add_argument("--mixed", action="store_true", help="nothing but the waves with a heavy client")
    parser.add_argument("--decoder", action="store_true", help="time generate_batch, too")
    parser.add_argument("--fronts", default=None, metavar="N", help="front processes (default: the server's)")
    flags = parser.parse_args()
    cases, mixed = (SMALL, SMALL_MIXED) if flags.small else (CASES, MIXED)
    cases = [] if flags.mixed else cases
    with tempfile.TemporaryDirectory() as passing:
        path = flags.model or model_file(flags.shape, flags.models or Path(passing), end=True)
        rates = decoder_rates(path, flags.device, cases) if flags.decoder else {}
        for (clients, answer), rate in rates.items():
            print(f"{clients:4} prompts, {answer} out, generate_batch: {rate:.1f} tok/s")

        def save(found: list[dict[str, Any]]) -> None:
            for record in found:
                rate = rates.get((record["clients"], record["answer"]))
                if rate is not None and record["prompt"] <= 100:
                    record["of_decoder"] = round(record["tok_per_s"] / rate, 3)
            about = machine.machine() if flags.device == "cpu" else machine.gpu()
            told = {"machine": about, "versions": machine.versions("numpy"), "model": path.name, "records": found}
            records.write(flags.json, told)

        more = [] if flags.fronts is None else ["--fronts", flags.fronts]
        found = measure(path, flags.device, cases, *more, save=save) if cases else []
        save(found + measure_mixed(path, flags.device, mixed, *more))


if __name__ == "__main__":
    main()
