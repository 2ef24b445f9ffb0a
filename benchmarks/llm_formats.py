"""What each 4-bit format costs a model: the table of docs/llm.md.

    python benchmarks/llm_formats.py [--tokens 800] [--json FILE]

Every matrix of SmolLM2-135M-Instruct's layers is requantized, plainly and with method="mse", and the predictions on a
text are compared with those of the file as it is. The file itself is q4_1, the only form that PyPI has the model in, so
that its own format costs nothing here, and formats with evenly spaced levels and an offset are at an advantage. q4_k
needs rows of a multiple of 256, and this model's have 576. A run takes long; with --json, the same command continues
where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import billfish as bf
from billfish.files import write_atomically
from billfish.llm import default_model, evaluate, load

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from llm_text import samples

FORMATS = (
    ("q4_1", None),
    ("q4_0", None),
    ("iq4_nl", None),
    ("mxfp4", None),
    ("nvfp4", None),
    ("fp4", 32),
    ("fp4", 64),
    ("u4", 32),
    ("u4", 64),
    ("u4b8", 32),
    ("u4b8", 64),
    ("affine4", 32),
    ("affine4", 64),
)


def requantized(format: str, group_size: int | None, method: str) -> Callable[[str, Any], Any]:
    """A function that puts the matrices of layers into another format."""

    def convert(name: str, tensor: Any) -> Any:
        if not name.startswith("blk.") or not isinstance(tensor, bf.QuantizedTensor):
            return tensor
        return bf.quantize(bf.dequantize(tensor), format, group_size=group_size, method=method)

    return convert


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--json", metavar="FILE", help="write the records there")
    arguments = parser.parse_args()
    original = load(device="cpu")
    tokens = [t for text in samples() for t in original.tokenizer.encode(text, special=False)][: arguments.tokens]
    base = evaluate(original, tokens, activations="exact")
    print(f"the file as it is: perplexity {base.perplexity:.2f} ± {base.perplexity * base.loss_error:.2f}")
    records = []
    if arguments.json and Path(arguments.json).exists():  # go on where an earlier run stopped
        records = json.loads(Path(arguments.json).read_text())["records"]
    print("| format | bits per weight | method | KL divergence | same best token | perplexity |")
    print("|---|---|---|---|---|---|")
    for method in ("rtn", "mse"):
        for format, group_size in FORMATS:
            started = time.perf_counter()
            size = group_size or bf.get_format(format).default_group_size
            if any((r["format"], r["group_size"], r["method"]) == (format, size, method) for r in records):
                continue
            model = load(default_model(), device="cpu", convert=requantized(format, group_size, method))
            found = evaluate(model, tokens, against=original, activations="q16")
            chosen = bf.get_format(format)
            record = {
                "format": format,
                "group_size": size,
                "bits_per_weight": chosen.bits_per_weight(size),
                "method": method,
                "divergence": found.divergence,
                "same_best": found.same_best,
                "perplexity": found.perplexity,
                "seconds": time.perf_counter() - started,
            }
            records.append(record)
            label = format if group_size is None else f"{format}, groups of {group_size}"
            print(
                f"| {label} | {record['bits_per_weight']:.2f} | {method} | {found.divergence:.4f} | "
                f"{found.same_best:.1%} | {found.perplexity:.2f} |",
                flush=True,
            )
            if arguments.json:  # after each, because all take a while
                about = {"machine": platform.machine(), "billfish": bf.__version__, "model": default_model().name}
                about |= {"tokens": base.tokens, "perplexity": base.perplexity}
                content = json.dumps({"about": about, "records": records}, indent=1) + "\n"
                write_atomically(arguments.json, content.encode())


if __name__ == "__main__":
    main()
