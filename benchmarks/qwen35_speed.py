"""Time a hybrid model: Qwen3.5-0.8B's shape in q4_0, billfish beside llama.cpp, in one process and in turns.

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python        (compiles for this machine)

Weights are random: 18 of 24 layers are gated delta nets, and the LM head has 248,320 rows. llama.cpp and billfish, with
int8 activations, take turns in each round, and the medians of rounds count. --model keeps the GGUF file for other runs.
With --json, what the file has of other machines stays there.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command, machine, records
from benchmarks.llm_speed import Timing, generate, records_of
from benchmarks.peers.llama_cpp import Contender, LlamaCpp, Ours
from benchmarks.random_model import QWEN35, write_random_architecture
from benchmarks.timing import timed
from billfish.backends.cpu import _cpu
from billfish.llm import load

SHORT, PROMPT, GENERATED = 16, 512, 64  # tokens
ACTIVATIONS = "q8"


def measure(contender: Contender, tokens: list[int]) -> Iterator[Timing]:
    contender.forget(0)
    contender.feed(tokens[:SHORT])
    yield "generation", GENERATED, generate(contender, tokens[:GENERATED])
    contender.forget(0)
    yield f"prompt of {PROMPT}", PROMPT, timed(lambda: contender.feed(tokens[:PROMPT]))


def lines(found: list[dict[str, Any]]) -> Iterator[str]:
    """Each record, and how many times as fast as llama.cpp it is."""
    theirs = {record["what"]: record["seconds"] for record in found if record["who"] == LlamaCpp.name}
    for record in found:
        what, took = record["what"], record["seconds"]
        ratio = f"{theirs[what] / took:5.2f} times llama.cpp" if record["who"] != LlamaCpp.name else ""
        yield f"{what:16} {record['who']:12} {record['tokens'] / took:7.1f} tok/s   {ratio}"


def main() -> None:
    parser = command.parser(__spec__, __doc__, threads=2, rounds=5)
    kept = "file of the model, made if it is not there (default: a temporary one)"
    parser.add_argument("--model", type=Path, metavar="FILE", help=kept)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = flags.model or Path(folder) / "random.gguf"
        if not path.exists():
            write_random_architecture(path, QWEN35, "qwen2")
        run(path, flags.threads, flags.rounds, flags.json)


def run(path: Path, threads: int, rounds: int, to: Path | None) -> None:
    _cpu.set_threads(threads)
    model, peer = load(path, device="cpu"), LlamaCpp(path, threads, PROMPT + GENERATED)
    contenders: list[Contender] = [peer, Ours(model, ACTIVATIONS, PROMPT + GENERATED)]
    tokens = np.random.default_rng(0).integers(300, 200000, PROMPT).tolist()
    times: dict[tuple[str, str, int], list[float]] = {}
    for round in range(rounds + 1):  # the first does not count
        for contender in contenders:
            for what, count, seconds in measure(contender, tokens):
                times.setdefault((what, contender.name, count), []).extend([seconds] if round else [])
    found = records_of(times)
    print("\n".join(lines(found)))
    about = {"cpu": machine.cpu_name(), "threads": threads, "kernels": model.decoder.kernels, **machine.versions()}
    about |= {peer.name: peer.version} | machine.today()
    old = json.loads(to.read_text()) if to is not None and to.exists() else {"machines": []}
    records.write(to, with_machine(old, about | {"records": found}))


def with_machine(results: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Results with a machine's, in the place of older ones of the same CPU and number of threads."""
    others = [each for each in results["machines"] if (each["cpu"], each["threads"]) != (own["cpu"], own["threads"])]
    return {"machines": sorted([*others, own], key=lambda each: (each["cpu"], each["threads"]))}


if __name__ == "__main__":
    main()
