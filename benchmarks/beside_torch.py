"""Products between loops of torch's, on threads of our own and on those of torch's OpenMP. A table of docs/cpu.md.

Microseconds of a product of MarlinLinear (fp4 in groups of 32, 576 x 3072, q8), of torch's gelu, and of both in turns.
Then tokens per second of SmolLM2-135M-Instruct in transformers, whose layers are ours (fp4 in groups of 32, q8).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

import billfish as bf
from benchmarks import command, machine, records
from benchmarks.timing import medians
from billfish.backends.cpu import backend
from billfish.backends.cpu.torch_threads import share_torch_threads
from billfish.llm import default_model
from billfish.nn.transformers import load_model

ROWS, CALLS, TOKENS = (1, 8, 32), 200, 32


def products(rounds: int) -> list[dict[str, float]]:
    """Microseconds."""
    linear, gelu = torch.nn.Linear(576, 3072, bias=False), torch.nn.functional.gelu
    layer = bf.MarlinLinear.from_linear(linear, "fp4", group_size=32, activations="q8")
    found = []
    for m in ROWS:
        x, h = torch.randn(m, 576), torch.randn(32, 3072)
        runs: dict[str, Any] = {"product": lambda x=x: layer(x), "gelu": lambda h=h: gelu(h)}
        runs["in turns"] = lambda x=x, h=h: (layer(x), gelu(h))
        each = {name: medians({name: run}, rounds, CALLS)[name] for name, run in runs.items()}
        found.append({"m": m} | {name: 1e6 * seconds for name, seconds in each.items()})
    return found


def tokens_per_second(model: Any) -> float:
    prompt = torch.tensor([[504, 3575, 282, 4649, 314]])
    told: dict[str, Any] = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    return TOKENS / medians({"": lambda: model.generate(prompt, **told)}, 3)[""]


def main() -> None:
    flags = command.parser(__spec__, __doc__, threads=2, rounds=7).parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(flags.threads)
    bf.set_threads(flags.threads)
    report: dict[str, Any] = {"machine": machine.machine(), "threads": flags.threads}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        bf.quantize_checkpoint(default_model(), folder, "fp4", group_size=32, requantize=True, progress=False)
        model = load_model(folder, dtype=torch.float32, activations="q8")
        backend.share_torch_threads = lambda: False  # first without; afterwards there is no way back
        for whose in ("own", "torch"):
            report[whose] = {"microseconds": products(flags.rounds), "tokens_per_second": tokens_per_second(model)}
            for record in report[whose]["microseconds"]:
                print(f"{whose:6}", *(f"{name} {value:.0f}" for name, value in record.items()), sep="  ", flush=True)
            print(f"{whose:6}  {report[whose]['tokens_per_second']:.1f} tokens per second", flush=True)
            backend.share_torch_threads = share_torch_threads
    records.write(flags.json, report)


if __name__ == "__main__":
    main()
