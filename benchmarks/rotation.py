"""What `billfish rotate` is worth, format by format and method by method.

    pip install --no-deps gensim==4.4.0

SmolLM2-135M-Instruct with its embedding written out once more as the LM head is an ordinary Llama that can be rotated.
It is written in float16 in two forms. `as it is` has the values of its q4_1 file, which are on a grid of 4 bits, an
advantage for what is not rotated. `off the grid` has uniform noise of one step of that grid added to all weights, as if
it had not been quantized yet. Each form is the reference of its own files, plain and rotated, which are written as a
user would. Predictions of news are compared (see quality.py for the texts).

Methods: rtn, mse; weighted, which is mse with the mean squares of the inputs; gptq, with the inputs of the float model.
Statistics are those of the file that is quantized.

The same command goes on where it was stopped. A record for the page is benchmarks/results/rotation.json.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import billfish as bf
from benchmarks import command, pages, records
from benchmarks.quality import calibration_text, test_text
from billfish.checkpoints.conversion import target_named
from billfish.checkpoints.entry import Entry
from billfish.checkpoints.in_memory import HeldArray
from billfish.checkpoints.write.export import TARGETS, export
from billfish.checkpoints.write.plan import OutputSettings
from billfish.core.format import parse_format
from billfish.llm import default_model, load
from billfish.llm.evaluation import Truth, evaluate

RESULTS = records.RESULTS / "rotation.json"
FORMS = ("as it is", "off the grid")
GRID = 32  # weights that share a step in q4_1

Case = dict[str, Any]


def cases(forms: list[str], formats: list[str], methods: list[str]) -> Iterator[Case]:
    """What to measure. The float16 files come first: a rotated one is rounded, too."""
    for form in forms:
        yield {"form": form, "format": "f16", "group_size": 0, "method": "", "rotated": True}
        for method in methods:
            for name in formats:
                found, size = parse_format(name, "--formats")
                about = {"format": found.name, "group_size": size or found.default_group_size, "method": method}
                yield from ({"form": form, **about, "rotated": rotated} for rotated in (False, True))


def off_the_grid(weights: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float64]:
    """The weights with uniform noise of up to half a step of q4_1 to either side."""
    groups = weights.reshape(-1, GRID)
    step = (groups.max(axis=1, keepdims=True) - groups.min(axis=1, keepdims=True)) / 15
    return (groups + step * rng.uniform(-0.5, 0.5, groups.shape)).reshape(weights.shape)


def untied(path: Path, form: str) -> Path:
    """Write a form of SmolLM2 with a head of its own."""
    if path.exists():
        return path
    checkpoint, rng = bf.open_checkpoint(default_model()), np.random.default_rng(0)
    entries: dict[str, Entry] = {}
    for name in checkpoint:
        tensor = checkpoint[name]
        if not isinstance(tensor, bf.QuantizedTensor):
            entries[name] = checkpoint.entry(name)
            continue
        weights = bf.dequantize(tensor)
        if form == "off the grid":
            weights = off_the_grid(weights, rng)
        entries[name] = HeldArray(name, weights.astype(np.float16))
    embedding = entries["token_embd.weight"].read()
    entries["output.weight"] = HeldArray("output.weight", embedding)
    view = checkpoint.view(entries, [*entries])
    view.origins, view.files = {}, []
    export("save", view, path, OutputSettings(target_named("save", "gguf")), False)
    return path


def written(case: Case, folder: Path, tokens: int) -> tuple[Path, Path]:
    """The float file of a case, and the quantized one. A folder may have float files and statistics already. tokens:
    for calibration."""
    source = untied(folder / f"{case['form'].replace(' ', '-')}.gguf", case["form"])
    rotated = source.with_name(f"rotated-{source.name}")
    if case["rotated"] and not rotated.exists():
        bf.rotate_checkpoint(source, rotated, progress=False)
    base = rotated if case["rotated"] else source
    if not case["method"]:
        return source, base
    statistics = base.with_suffix(f".{tokens}.safetensors") if case["method"] in ("weighted", "gptq") else None
    if statistics is not None and not statistics.exists():
        text = folder / "mixed.txt"
        text.write_text(calibration_text("mixed"))
        bf.calibrate_checkpoint(base, statistics, text=text, hessian=True, tokens=tokens, progress=False)
    out = folder / ("quantized.gguf" if case["format"] in TARGETS["gguf"]().formats else "quantized")
    method = "mse" if case["method"] == "weighted" else case["method"]
    settings = {"group_size": case["group_size"], "method": method, "statistics": statistics, "overwrite": True}
    bf.quantize_checkpoint(base, out, case["format"], progress=False, **settings)
    return source, out


def main() -> None:
    parser = command.parser(__spec__, __doc__)
    parser.set_defaults(json=RESULTS)
    parser.option("--tokens", "tokens of news", 4096, command.positive, "N")
    parser.option("--calibration", "tokens for calibration", 8192, command.positive, "N")
    parser.listed("--forms", f"forms of the model: {', '.join(FORMS)}", FORMS[1])
    parser.listed("--formats", "formats", "q4_0,iq4_nl,mxfp4_gguf,nvfp4_gguf,u4b8:128,u4b8:-1")
    parser.listed("--methods", "methods", "mse,gptq")
    parser.option("--device", "cpu, cuda or cuda:N; auto is a GPU if there is one", "auto", str, "D")
    parser.add_argument("--folder", type=Path, help="folder that keeps the float files, 2 GB (default: none)")
    flags = parser.parse_args()
    results, truths = records.Growing(flags.json, records=[]), dict[str, Truth]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(flags.folder or temporary)
        for case in cases(flags.forms, flags.formats, flags.methods):
            if not results.lacks("records", case):
                continue
            source, out = written(case, folder, flags.calibration)
            if case["form"] not in truths:
                original = load(source, device=flags.device, progress=False)
                tokens = original.tokenizer.encode(test_text(), special=False)[: flags.tokens]
                truths = {case["form"]: Truth(original, tokens)}
            truth, model = truths[case["form"]], load(out, device=flags.device, progress=False)
            found = evaluate(model, [token for window in truth.windows for token in window], against=truth)
            about = {
                "bits_per_weight": model.decoder.tensors.bits_per_weight,
                "tokens": found.tokens,
                "calibration_tokens": flags.calibration if case["method"] in ("weighted", "gptq") else 0,
                "divergence": found.divergence,
                "divergence_error": found.divergence_error,
                "same_best": found.same_best,
                "perplexity": found.perplexity,
                "device": model.decoder.device,
            }
            results.add("records", case | about)
            print(f"{case}: {found.divergence:.4f} ± {found.divergence_error:.4f}", flush=True)
    if flags.json == RESULTS:
        pages.main()


if __name__ == "__main__":
    main()
