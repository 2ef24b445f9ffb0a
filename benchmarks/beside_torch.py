"""Products between loops of torch's, on threads of our own and on those of torch's OpenMP. A table of docs/cpu.md.

    python -m benchmarks.beside_torch [--threads 2] [--json FILE]

Microseconds of a product of MarlinLinear (fp4 in groups of 32, 576 x 3072, q8), of torch's gelu, and of both in turns.
Then tokens per second of SmolLM2-135M-Instruct in transformers, whose layers are ours (fp4 in groups of 32, q8).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import billfish as bf
from benchmarks.products.limits import machine
from billfish.backends.cpu import backend
from billfish.backends.cpu.torch_threads import share_torch_threads
from billfish.core.files import write_atomically
from billfish.llm import default_model
from billfish.nn.transformers import load_model

ROWS = (1, 8, 32)
RUNS, CALLS = 7, 200
TOKENS = 32


def microseconds(run: Callable[[], object]) -> float:
    """Of one call, the median of several runs."""
    found = []
    for _ in range(RUNS + 1):
        started = time.perf_counter()
        for _ in range(CALLS):
            run()
        found.append((time.perf_counter() - started) / CALLS)
    return 1e6 * statistics.median(found[1:])


def products() -> list[dict[str, float]]:
    linear, gelu = torch.nn.Linear(576, 3072, bias=False), torch.nn.functional.gelu
    layer = bf.MarlinLinear.from_linear(linear, "fp4", group_size=32, activations="q8")
    records = []
    for m in ROWS:
        x, h = torch.randn(m, 576), torch.randn(32, 3072)
        times = {
            "product": microseconds(lambda x=x: layer(x)),
            "gelu": microseconds(lambda h=h: gelu(h)),
            "in turns": microseconds(lambda x=x, h=h: (layer(x), gelu(h))),
        }
        records.append({"m": m, **times})
    return records


def tokens_per_second(model: Any) -> float:
    prompt = torch.tensor([[504, 3575, 282, 4649, 314]])
    told: dict[str, Any] = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    rates = []
    for _ in range(4):
        started = time.perf_counter()
        model.generate(prompt, **told)
        rates.append(TOKENS / (time.perf_counter() - started))
    return statistics.median(rates[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where to write the record")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(options.threads)
    bf.set_threads(options.threads)
    report: dict[str, Any] = {"machine": machine(), "threads": options.threads}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        bf.quantize_checkpoint(default_model(), folder, "fp4", group_size=32, requantize=True, progress=False)
        model = load_model(folder, dtype=torch.float32, activations="q8")
        backend.share_torch_threads = lambda: False  # first without; afterwards there is no way back
        for whose in ("own", "torch"):
            report[whose] = {"microseconds": products(), "tokens_per_second": tokens_per_second(model)}
            for record in report[whose]["microseconds"]:
                print(f"{whose:6}", *(f"{name} {value:.0f}" for name, value in record.items()), sep="  ", flush=True)
            print(f"{whose:6}  {report[whose]['tokens_per_second']:.1f} tokens per second", flush=True)
            backend.share_torch_threads = share_torch_threads
    if options.json is not None:
        write_atomically(options.json, json.dumps(report, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
