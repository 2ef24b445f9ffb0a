"""Time `billfish serve` for waves of clients: 16, 64 and 256 that stream 128 tokens after prompts of 200, and others.

The model has the sizes of Llama-3-8B and random weights in q4_0; nothing in it ends an answer. It is written to
--models once (4.6 GB, some seconds). Clients run in eight processes. Each case is three waves: the first one comes
right after the server says that it listens. With --decoder, `generate_batch` of as many prompts is timed first.

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
FIRST = 300  # tokens from here on are plain ones


def bodies(clients: int, prompt: int, common: int, answer: int, rng: random.Random, vocabulary: int) -> list[Any]:
    """Requests of one wave. No two prompts are equal."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(min(FIRST, vocabulary // 2), vocabulary) for _ in range(count)]

    start = tokens(common)
    told = {"max_tokens": answer, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    return [{"prompt": start + tokens(prompt - common), **told} for _ in range(clients)]


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


def load_vocabulary(path: Path) -> int:
    """Tokens of a model."""
    return TextModel.open(path).config.vocabulary


def row(record: dict[str, Any]) -> str:
    """A line of the table; times as median / 99th percentile."""
    found = record
    asked = f"{found['clients']:4} clients, {found['prompt']:4} in ({found['common']} common), {found['answer']:4} out"
    first = f"first token {found['first_token_p50_ms']:7.1f} / {found['first_token_p99_ms']:7.1f} ms"
    gap = f"gap {found['gap_p50_ms']:6.2f} / {found['gap_p99_ms']:6.2f} ms, {found['cached_tokens']:g} cached"
    return f"{asked}, wave {found['wave']}: {found['tok_per_s']:9.1f} tok/s, {first}, {gap}"


def main() -> None:
    parser = command.parser(__spec__, __doc__)
    parser.option("--device", "device of the server", "cuda", str, "DEVICE")
    parser.option("--shape", "sizes of the model, of benchmarks/random_model.py", "8b", str, "NAME")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="folder that keeps the GGUF file")
    parser.add_argument("--model", type=Path, metavar="FILE", help="a model to use instead (default: a random one)")
    parser.add_argument("--small", action="store_true", help="few clients and tokens, to try the command")
    parser.add_argument("--decoder", action="store_true", help="time generate_batch, too")
    parser.add_argument("--fronts", default=None, metavar="N", help="front processes (default: the server's)")
    flags = parser.parse_args()
    cases = SMALL if flags.small else CASES
    with tempfile.TemporaryDirectory() as passing:
        path = flags.model or model_file(flags.shape, flags.models or Path(passing))
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
        measure(path, flags.device, cases, *more, save=save)


if __name__ == "__main__":
    main()
