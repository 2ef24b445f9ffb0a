"""What calibration buys, format by format and method by method: the table of docs/calibration.md.

    pip install --no-deps gensim==4.4.0
    python benchmarks/quality.py [--tokens 20480] [--formats q4_0,fp4:32] [--json FILE]

Every matrix of SmolLM2-135M-Instruct's layers is requantized, and its predictions of a text are compared with those of
the file as it is. The text is news, the corpus `lee_background.cor` in gensim's wheel. The text for calibration is
documentation, that of Python itself (`pydoc_data`). With --ggml FOLDER, the shared libraries of llama-cpp-python, its
quantizer has the same statistics. A run takes long; with --json, the same command continues where it was stopped.

Methods: rtn, mse; weighted, which is mse with the mean squares of the inputs; gptq; ggml.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

import billfish as bf
from billfish.bench.peers.ggml import TYPES
from billfish.calibration import InputStatistics, Statistics
from billfish.calibration.running import calibrate_checkpoint
from billfish.files import write_atomically
from billfish.llm import default_model, load
from billfish.llm.evaluation import Truth, evaluate
from billfish.llm.model import Model

FORMATS = "q4_0,fp4:32,u4b8:128,u4:128,nvfp4,mxfp4,iq4_nl"
METHODS = "rtn,mse,weighted,gptq"
FEW, MANY = 2048, 32768  # tokens for calibration


def test_text() -> str:
    """News. The file is found without importing gensim, which would need more packages."""
    spec = importlib.util.find_spec("gensim")
    if spec is None or spec.origin is None:
        raise SystemExit("the text to predict is in gensim's wheel: pip install --no-deps gensim==4.4.0")
    return (Path(spec.origin).parent / "test" / "test_data" / "lee_background.cor").read_text()


def statistics_of(folder: Path, tokens: int) -> Statistics:
    """Of SmolLM2's inputs, from the first tokens of Python's documentation. A folder may have them already."""
    text, made = folder / "calibration.txt", folder / f"{tokens}.safetensors"
    if made.exists():
        return Statistics.load(made)
    text.write_text("\n\n".join(topics[name] for name in sorted(topics)))
    return calibrate_checkpoint(default_model(), made, text=text, hessian=True, tokens=tokens)


def cases(formats: str, methods: str) -> Iterator[dict[str, Any]]:
    """What to measure, each as the beginning of its record. The few tokens are for one format."""
    for format in formats.split(","):
        name, _, size = format.partition(":")
        group_size = int(size) if size else bf.get_format(name).default_group_size
        for method in methods.split(","):
            calibrated = method not in ("rtn", "mse")
            counts = (MANY, FEW) if calibrated and name == "fp4" else (MANY,) if calibrated else (0,)
            for tokens in counts:
                if method != "ggml" or name in ("q4_0", "iq4_nl"):
                    yield {"format": name, "group_size": group_size, "method": method, "calibration_tokens": tokens}


def requantized(case: dict[str, Any], statistics: Statistics | None, ggml: Path | None) -> Callable[[str, Any], Any]:
    """A function that puts the matrices of layers into another format."""

    def convert(name: str, tensor: Any) -> Any:
        if not name.startswith("blk.") or not isinstance(tensor, bf.QuantizedTensor):
            return tensor
        w, known = bf.dequantize(tensor), None if statistics is None else statistics[name]
        if case["method"] == "ggml":
            assert ggml is not None
            assert known is not None
            return by_ggml(ggml, w, case["format"], known.importance())
        return bf.quantize(w, case["format"], group_size=case["group_size"], **_known(case["method"], name, known))

    return convert


def _known(method: str, name: str, known: InputStatistics | None) -> dict[str, Any]:
    """The arguments of bf.quantize for a method."""
    if known is None:
        return {"method": method}
    if method == "weighted":
        return {"method": "mse", "importance": known.importance()}
    return {"method": method, "hessian": known.hessian(name)}


def by_ggml(folder: Path, w: Any, format: str, importance: Any) -> bf.QuantizedTensor:
    """The same matrix by ggml_quantize_chunk, with the same importance."""
    library = ctypes.CDLL(str(folder / "libggml-base.so"))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    (n, k), chosen = w.shape, bf.get_format(format)
    spec = next(iter(chosen.storage_spec(n, k, chosen.default_group_size).values()))
    blocks = np.zeros(spec.shape, spec.dtype)
    w, importance = (np.ascontiguousarray(array, np.float32) for array in (w, importance))
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (w, blocks, importance)]
    counts = [ctypes.c_int64(count) for count in (0, n, k)]
    written = library.ggml_quantize_chunk(TYPES[format], pointers[0], pointers[1], *counts, pointers[2])
    assert written == blocks.nbytes
    return bf.QuantizedTensor.from_storage(format, {chosen.storage_names[0]: blocks})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, help="where statistics are kept; 400 MB (nowhere)")
    parser.add_argument("--ggml", type=Path, metavar="FOLDER", help="with libggml-base.so: measure its quantizer, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    arguments = parser.parse_args()
    original = load(device=arguments.device)
    tokens = original.tokenizer.encode(test_text(), special=False)[: arguments.tokens]
    records: list[dict[str, Any]] = []
    if arguments.json and arguments.json.exists():
        records = json.loads(arguments.json.read_text())["records"]
    methods = arguments.methods + (",ggml" if arguments.ggml else "")
    missing = [
        case for case in cases(arguments.formats, methods) if not any(case.items() <= r.items() for r in records)
    ]
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or stack.enter_context(tempfile.TemporaryDirectory())
        counts = sorted({case["calibration_tokens"] for case in missing} - {0})
        started = time.perf_counter()
        statistics = {count: statistics_of(Path(folder), count) for count in counts}
        print(f"statistics of {counts} tokens: {time.perf_counter() - started:.0f} s")
        measure(missing, original, tokens, statistics, records, arguments)


def measure(
    missing: list[dict[str, Any]],
    original: Model,
    tokens: list[int],
    statistics: dict[int, Statistics],
    records: list[dict[str, Any]],
    arguments: argparse.Namespace,
) -> None:
    """Add a record for each case that is missing, and write all after each."""
    truth = Truth(original, tokens)
    print(
        "| format | method | tokens for calibration | bits per weight | KL divergence | same best token | perplexity |"
    )
    print("|---|---|---|---|---|---|---|")
    for case in missing:
        started = time.perf_counter()
        convert = requantized(case, statistics.get(case["calibration_tokens"]), arguments.ggml)
        model = load(default_model(), device=arguments.device, convert=convert)
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
            "device": model.decoder.device,
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
    tokens, bits = str(record["calibration_tokens"] or ""), f"{record['bits_per_weight']:.2f}"
    cells = (name, record["method"], tokens, bits, kl, f"{record['same_best']:.1%}", perplexity)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
