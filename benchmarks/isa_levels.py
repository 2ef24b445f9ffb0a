"""Prompts of a random model of Llama-3.2-1B's sizes under two ISA levels, in turns.

Each level has a process of its own, with BILLFISH_ISA. They take turns, prompt by prompt: a time counts only beside its
neighbour's. --model keeps the GGUF file for other runs.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import command, machine, records
from benchmarks.random_model import SHAPES, write_random_model

LENGTHS = ((512, "q8"), (2048, "q8"), (512, "q16"))  # tokens of a prompt, activations
WORKER = """
import sys, time
import numpy as np
from billfish import set_threads
from billfish.llm import load
set_threads(int(sys.argv[2]))
decoder = load(sys.argv[1], device="cpu").decoder
cache = decoder.cache(int(sys.argv[3]))
for line in sys.stdin:
    length, activations = line.split()
    tokens = np.random.default_rng(0).integers(4, 260, int(length)).tolist()
    started = time.perf_counter()
    for at in range(0, len(tokens), decoder.chunk):
        rows = decoder.run([(cache, tokens[at : at + decoder.chunk])], activations)
    decoder.logits(rows[-1:], activations)
    print(time.perf_counter() - started, flush=True)
    cache.rollback(0)
"""


class Level:
    """A process whose kernels are those of a level."""

    def __init__(self, name: str, path: Path, threads: int) -> None:
        words = [sys.executable, "-c", WORKER, str(path), str(threads), str(max(length for length, _ in LENGTHS))]
        environment = os.environ | {"BILLFISH_ISA": name}
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def prompt(self, length: int, activations: str) -> float:
        """Seconds of a prompt and its logits."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(length, activations, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def record(levels: dict[str, Level], length: int, activations: str, rounds: int) -> dict[str, Any]:
    """The tokens per second of the best prompts, and the median of the ratios of neighbours."""
    for level in levels.values():
        level.prompt(length, activations)
    taken = [[level.prompt(length, activations) for level in levels.values()] for _ in range(rounds)]
    return {
        "tokens": length,
        "activations": activations,
        "rounds": rounds,
        "tok_per_s": {name: length / min(times) for name, times in zip(levels, zip(*taken, strict=True), strict=True)},
        "ratio": statistics.median(second / first for first, second in taken),
    }


def main() -> None:
    parser = command.parser(__spec__, __doc__, threads=2, rounds=7)
    parser.listed("--levels", "two ISA levels", "amx,avx512_vnni")
    parser.add_argument("--model", type=Path, metavar="FILE", help="file of the model (default: a temporary one)")
    flags = parser.parse_args()
    if len(flags.levels) != 2:
        parser.error("--levels takes two levels, such as amx,avx512_vnni")
    with tempfile.TemporaryDirectory() as folder:
        path = flags.model or Path(folder) / "random.gguf"
        if not path.exists():
            write_random_model(path, SHAPES["1b"])
        levels = {name: Level(name, path, flags.threads) for name in flags.levels}
        found = []
        for length, activations in LENGTHS:
            found.append(record(levels, length, activations, flags.rounds))
            print(found[-1], flush=True)
        for level in levels.values():
            level.close()
    about = machine.machine() | machine.today() | {"threads": flags.threads} | machine.versions()
    records.write(flags.json, {"machine": about, "records": found})


if __name__ == "__main__":
    main()
