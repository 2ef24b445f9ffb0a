"""A q4_0 model on the GPU: billfish beside llama.cpp in the same run, and beside transformers in float16 under a graph.

    python -m benchmarks.llm_cuda [--shapes 8b 1b] [--llama FOLDER] [--rounds 3] [--models FOLDER] [--json FILE]

The models have random weights and the sizes of Llama-3-8B and Llama-3.2-1B. --llama names the folder with llama-bench
and llama-batched-bench; docs/cuda.md says how they are built. --models keeps the GGUF files for the next run. billfish
and llama.cpp take turns, billfish first and last, and medians count. Tokens per second:

    generate      128 tokens of one text, from an empty context
    prompt_N      a prompt of N tokens, until the scores after its last
    streams_B     128 tokens of each of B texts together, after prompts of 512 tokens
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import billfish as bf
from benchmarks.llm_peers import GENERATED, PROMPTS, STREAM_PROMPT, STREAMS, LlamaCpp, Rates, Transformers
from benchmarks.random_model import SHAPES, Shape, write_random_model
from billfish.backends.cuda.driver import device
from billfish.core.files import write_atomically

OURS, LLAMA, TRANSFORMERS = "billfish", "llama.cpp", "transformers fp16"
CASES = ("generate", *(f"prompt_{n}" for n in PROMPTS), *(f"streams_{n}" for n in STREAMS))


class Ours:
    """A model that billfish loaded. No token of a random model ends a text: answers have the length that is asked."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rng = np.random.default_rng(0)

    def _random_prompt(self, tokens: int) -> list[int]:
        return self._rng.integers(0, self._model.config.vocabulary, tokens).tolist()

    def generate(self, tokens: int) -> float:
        """Of one text, after a prompt of one token, which the model is fed to choose the first."""
        answer = self._model.generate(self._random_prompt(1), max_tokens=tokens + 1)
        for _ in answer:
            pass
        assert len(answer.tokens) == tokens + 1
        return answer.generation_rate

    def prompt(self, tokens: int) -> float:
        answer = self._model.generate(self._random_prompt(tokens), max_tokens=1)
        for _ in answer:
            pass
        return answer.prompt_rate

    def streams(self, count: int, prompt: int, tokens: int) -> float:
        """All texts together: the time of `tokens` + 1 for each, less the time of one, which the prompts give."""
        prompts = [self._random_prompt(prompt) for _ in range(count)]
        first = seconds(lambda: self._model.generate_batch(prompts, max_tokens=1))
        whole = seconds(lambda: self._model.generate_batch(prompts, max_tokens=tokens + 1))
        return count * tokens / (whole - first)

    def measure(self) -> Rates:
        rates = [self.generate(GENERATED), *(self.prompt(n) for n in PROMPTS)]
        rates += [self.streams(n, STREAM_PROMPT, GENERATED) for n in STREAMS]
        return {case: [rate] for case, rate in zip(CASES, rates, strict=True)}


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def records_of(shape: str, rates: dict[str, Rates]) -> list[dict[str, Any]]:
    """Medians of what was measured: one record for each case, with the peers that have it."""
    peers = {name: cases for name, cases in rates.items() if name != OURS}
    return [
        {
            "shape": shape,
            "case": case,
            "tok_per_s": median(rates[OURS][case]),
            "peers": {name: median(cases[case]) for name, cases in peers.items() if case in cases},
        }
        for case in CASES
    ]


def row(record: dict[str, Any]) -> str:
    """A line of the table: tokens per second, and how many times each peer's they are."""
    ours = record["tok_per_s"]
    peers = "".join(f"   {name} {rate:10,.0f} ({ours / rate:.2f} times)" for name, rate in record["peers"].items())
    return f"{record['shape']:4} {record['case']:12} {OURS} {ours:10,.0f}{peers}"


def measure(shape: Shape, path: Path, llama: Path | None, rounds: int) -> tuple[dict[str, Rates], dict[str, str]]:
    """Of billfish and its peers, the rates by name, and the peers' versions."""
    rates: dict[str, Rates] = {}
    versions: dict[str, str] = {}

    def add(name: str, measured: Rates) -> None:
        for case, values in measured.items():
            rates.setdefault(name, {}).setdefault(case, []).extend(values)

    ours = Ours(bf.llm.load(path, device="cuda"))
    ours.measure()  # compiles kernels and captures graphs
    for _ in range(rounds):
        add(OURS, ours.measure())
        if llama is not None:
            peer = LlamaCpp(llama, path)
            add(LLAMA, peer.measure())
            versions[LLAMA] = peer.version
    add(OURS, ours.measure())
    del ours
    gc.collect()
    try:
        dense = Transformers(shape)
        for _ in range(rounds + 1):
            add(TRANSFORMERS, dense.measure())
        versions["transformers"] = dense.version
    except (ImportError, RuntimeError) as error:  # not installed, or too little memory
        print(f"transformers: {error}; left out")
    return rates, versions


def model_file(name: str, folder: Path) -> Path:
    """The GGUF file of a shape, written if it is not there."""
    path = folder / f"random_{name}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        took = seconds(lambda: write_random_model(path, SHAPES[name]))
        print(f"{path.name}: {path.stat().st_size / 1e9:.2f} GB, written in {took:.1f} s")
    return path


def about_machine() -> dict[str, object]:
    gpu = device()
    about = {"gpu": gpu.name, "arch": gpu.arch, "multiprocessors": gpu.multiprocessors}
    return about | {"date": time.strftime("%Y-%m-%d")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--llama", type=Path, metavar="FOLDER", help="with llama-bench and llama-batched-bench")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="where the GGUF files stay (5.2 GB)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    arguments = parser.parse_args()
    llama = arguments.llama
    if llama is None or not (llama / "llama-bench").exists():
        print(f"llama.cpp: no llama-bench in {llama or '--llama FOLDER'}; left out")
        llama = None
    versions = {"billfish": bf.__version__, "torch": torch.__version__, "numpy": np.__version__}
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as passing:
        for name in arguments.shapes:
            path = model_file(name, arguments.models or Path(passing))
            rates, peers = measure(SHAPES[name], path, llama, arguments.rounds)
            versions |= peers
            found = records_of(name, rates)
            print(*map(row, found), sep="\n")
            records += found
            if arguments.json is not None:
                content = {"machine": about_machine(), "versions": versions, "records": records}
                write_atomically(arguments.json, (json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
