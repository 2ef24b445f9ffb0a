"""SmolLM2-135M-Instruct: billfish beside llama.cpp, in one process and interleaved; medians. The tables of docs/llm.md.

    pip install llama-cpp-python       (compiled for this machine)
    python benchmarks/llm_speed.py [--threads 2] [--rounds 3] [--json FILE]

Generation is 128 tokens from an empty context, the prompt 512 tokens. A cold start goes from the start of a process to
the first token of a 20-token prompt on its output, with the file in the page cache and Python's modules compiled, as
pip leaves them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import billfish
from billfish.backends.cpu import _cpu
from billfish.bench.limits import cpu_name
from billfish.files import write_atomically
from billfish.llm import Model, default_model, load
from billfish.llm.sampling import Sampling

ACTIVATIONS = ("q8", "q16", "exact")
PROMPT_TOKENS, GENERATED_TOKENS = 512, 128
PROMPT = "One two three four five six seven eight nine ten one two three four five six seven eight nine ten"
COLD_OURS = f"from billfish.cli import main; main(['run', '--raw', '-n', '1', '-p', {PROMPT!r}])"
COLD_THEIRS = """
import sys, llama_cpp
threads = int(sys.argv[2])
llama = llama_cpp.Llama(sys.argv[1], n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)
llama.eval(llama.tokenize(sys.argv[3].encode(), add_bos=False))
print(llama.detokenize([llama.sample(temp=0)]).decode(), flush=True)
"""


class LlamaCpp:
    """llama.cpp through its Python package, at the level of single decode calls."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp

        self._api = llama_cpp
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self._llama = llama_cpp.Llama(
            str(path), n_ctx=1024, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self._memory = llama_cpp.llama_get_memory(self._llama.ctx)

    def decode(self, tokens: list[int]) -> None:
        array = (self._api.llama_token * len(tokens))(*tokens)
        batch = self._api.llama_batch_get_one(array, len(tokens))
        assert self._api.llama_decode(self._llama.ctx, batch) == 0
        self._api.llama_synchronize(self._llama.ctx)

    def prompt(self, tokens: list[int]) -> None:
        self._api.llama_memory_clear(self._memory, True)
        self.decode(tokens)

    def generate(self, tokens: list[int]) -> None:
        self._api.llama_memory_clear(self._memory, True)
        for token in tokens:
            self.decode([token])


class Ours:
    def __init__(self, model: Model, activations: str) -> None:
        self._decoder, self._activations = model.decoder, activations

    def prompt(self, tokens: list[int]) -> None:
        cache = self._decoder.cache(len(tokens))
        self._decoder.go_on(cache, tokens, Sampling().sampler(), self._activations)

    def generate(self, tokens: list[int]) -> None:
        cache = self._decoder.cache()
        for token in tokens:
            self._decoder.logits(self._decoder.run([(cache, [token])], self._activations), self._activations)


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def seconds_to_first_output(arguments: list[str], compiled: str) -> float:
    """Of a Python process; `compiled` is a folder for its modules."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = compiled
    command = [sys.executable, "-c", *arguments]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        elapsed = time.perf_counter() - started
        process.stdout.read()
    assert first
    assert process.returncode == 0
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only",
        choices=("generation", "prompt", "cold start"),
        help="measure one of them, and keep the others' records",
    )
    parser.add_argument("--json", metavar="FILE", help="write the records there")
    arguments = parser.parse_args()
    threads, path = arguments.threads, default_model()
    _cpu.set_threads(threads)
    contenders: dict[str, Any] = {"llama.cpp": LlamaCpp(path, threads)}
    model = load(path, device="cpu")
    contenders |= {f"billfish {a}": Ours(model, a) for a in ACTIVATIONS}
    tokens = np.random.default_rng(0).integers(100, 40000, PROMPT_TOKENS).tolist()
    times: dict[tuple[str, str], list[float]] = {}
    compiled = tempfile.TemporaryDirectory()
    for round_ in range(arguments.rounds + 1):  # the first warms up
        for name, contender in contenders.items():
            work = {
                "generation": lambda c=contender: c.generate(tokens[:GENERATED_TOKENS]),
                "prompt": lambda c=contender: c.prompt(tokens),
            }
            for kind, call in work.items():
                if arguments.only in (None, kind):
                    elapsed = seconds(call)
                    if round_:
                        times.setdefault((kind, name), []).append(elapsed)
        if arguments.only in (None, "cold start"):
            for name, command in {
                "llama.cpp": [COLD_THEIRS, str(path), str(threads), PROMPT],
                "billfish q16": [COLD_OURS],
            }.items():
                elapsed = seconds_to_first_output(command, compiled.name)
                if round_:
                    times.setdefault(("cold start", name), []).append(elapsed)
    count = {"generation": GENERATED_TOKENS, "prompt": PROMPT_TOKENS, "cold start": 1}
    records = []
    for kind in dict.fromkeys(kind for kind, _ in times):
        theirs = statistics.median(times[kind, "llama.cpp"])
        for (k, name), values in times.items():
            if k == kind:
                median = statistics.median(values)
                record = {"what": kind, "who": name, "seconds": median, "ratio": theirs / median}
                records.append({**record, "rounds": arguments.rounds})
                figure = f"{median:.3f} s" if kind == "cold start" else f"{count[kind] / median:.1f} tok/s"
                print(f"{kind:12} {name:16} {figure:>14}   {theirs / median:.2f} times llama.cpp")
    if arguments.json:
        about = {
            "machine": platform.machine(),
            "cpu": f"{platform.machine()} {cpu_name()}",
            "threads": threads,
            "kernels": model.decoder.kernels,
            "billfish": billfish.__version__,
            "peer": contenders["llama.cpp"].version,
            "model": path.name,
        }
        path = Path(arguments.json)
        others = json.loads(path.read_text())["records"] if arguments.only and path.exists() else []
        records = [record for record in others if record["what"] != arguments.only] + records
        write_atomically(path, (json.dumps({"about": about, "records": records}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
