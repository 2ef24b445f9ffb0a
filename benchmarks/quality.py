"""What calibration buys, format by format and method by method: the tables of docs/quality.md.

    pip install --no-deps gensim==4.4.0
    python benchmarks/quality.py [--tokens 20480] [--formats q4_0,fp4:32] [--json FILE]

Every matrix of SmolLM2-135M-Instruct's layers is requantized, and its predictions of a text are compared with those of
the file as it is. The text is news, the corpus `lee_background.cor` in gensim's wheel. The text for calibration is
documentation, that of Python itself (`pydoc_data`). A run takes long; with --json, the same command continues where it
was stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import billfish as bf
from billfish.files import write_atomically
from billfish.llm import default_model, load
from billfish.llm.evaluation import Truth, evaluate

FORMATS = "q4_0,fp4:32,u4b8:128,u4:128,nvfp4,mxfp4,iq4_nl"
METHODS = "rtn,mse"


def test_text() -> str:
    """News. The file is found without importing gensim, which would need more packages."""
    spec = importlib.util.find_spec("gensim")
    if spec is None or spec.origin is None:
        raise SystemExit("the text to predict is in gensim's wheel: pip install --no-deps gensim==4.4.0")
    return (Path(spec.origin).parent / "test" / "test_data" / "lee_background.cor").read_text()


def cases(formats: str, methods: str) -> Iterator[dict[str, Any]]:
    """What to measure, each as the beginning of its record."""
    for method in methods.split(","):
        for format in formats.split(","):
            name, _, size = format.partition(":")
            group_size = int(size) if size else bf.get_format(name).default_group_size
            yield {"format": name, "group_size": group_size, "method": method}


def requantized(case: dict[str, Any]) -> Callable[[str, Any], Any]:
    """A function that puts the matrices of layers into another format."""

    def convert(name: str, tensor: Any) -> Any:
        if not name.startswith("blk.") or not isinstance(tensor, bf.QuantizedTensor):
            return tensor
        return bf.quantize(bf.dequantize(tensor), case["format"], group_size=case["group_size"], method=case["method"])

    return convert


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    arguments = parser.parse_args()
    original = load(device=arguments.device)
    tokens = original.tokenizer.encode(test_text(), special=False)[: arguments.tokens]
    truth = Truth(original, tokens)
    records: list[dict[str, Any]] = []
    if arguments.json and arguments.json.exists():
        records = json.loads(arguments.json.read_text())["records"]
    print("| format | method | bits per weight | KL divergence | same best token | perplexity |")
    print("|---|---|---|---|---|---|")
    for case in cases(arguments.formats, arguments.methods):
        if any(case.items() <= record.items() for record in records):
            continue
        started = time.perf_counter()
        model = load(default_model(), device=arguments.device, convert=requantized(case))
        quantized = time.perf_counter()
        found = evaluate(model, tokens, against=truth)
        record = case | {
            "bits_per_weight": bf.get_format(case["format"]).bits_per_weight(case["group_size"]),
            "tokens": found.tokens,
            "divergence": found.divergence,
            "divergence_error": found.divergence_error,
            "same_best": found.same_best,
            "perplexity": found.perplexity,
            "perplexity_error": found.perplexity_error,
            "seconds_to_quantize": quantized - started,
        }
        records.append(record)
        print(row(record), flush=True)
        if arguments.json:
            write_atomically(arguments.json, (json.dumps({"records": records}, indent=1) + "\n").encode())


def row(record: dict[str, Any]) -> str:
    """A line of the table."""
    name = f"{record['format']}, {record['group_size']}"
    kl = f"{record['divergence']:.4f} ± {record['divergence_error']:.4f}"
    perplexity = f"{record['perplexity']:.2f} ± {record['perplexity_error']:.2f}"
    cells = (name, record["method"], f"{record['bits_per_weight']:.2f}", kl, f"{record['same_best']:.1%}", perplexity)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
