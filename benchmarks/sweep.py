"""A model in every format, by every method: size, perplexity and KL divergence from the model itself.

    python -m benchmarks.sweep MODEL --text NEWS --calibrate TEXT --json FILE

Each file is written with `billfish quantize`, as a user would, and its predictions of NEWS are compared with MODEL's:
mean KL divergence, that of the token at the 99.9 percentile, and how often both have the same most likely token. TEXT
is for calibration. It should not be NEWS. With --llama-quantize PATH, llama.cpp's program writes its own mixes, which
are compared alike, and --imatrix is for it.

Methods: rtn, mse; weighted, which is mse with --calibrate; gptq; tune, which is gptq and then `billfish tune`.

The same command goes on where it was stopped. A record for the page is benchmarks/results/sweep.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import billfish as bf
from benchmarks import command, pages, records
from billfish.checkpoints.write.export import TARGETS
from billfish.core.format import parse_format
from billfish.llm import default_model, load
from billfish.llm.evaluation import Truth, evaluate

RESULTS = records.RESULTS / "sweep.json"
FORMATS = "mxfp4,u4b8:128,q4_0,nvfp4,iq4_nl,q4_1,q5_0,q5_1,q8_0"
MIXES = "Q3_K_M,IQ4_XS,Q4_0,Q4_K_S,Q4_K_M,Q5_K_M,Q6_K,Q8_0"
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
    if flags.llama_quantize is not None:
        yield from ({"by": "llama.cpp", "format": mix, "method": "imatrix"} for mix in flags.mixes)


def write(case: Case, model: Path, folder: Path, flags: argparse.Namespace) -> Path:
    """The file or folder of a case."""
    if case["by"] == "llama.cpp":
        out = folder / "theirs.gguf"
        imatrix = ["--imatrix", str(flags.imatrix)] if flags.imatrix else []
        words = [str(flags.llama_quantize), "--allow-requantize", *imatrix, str(model), str(out), case["format"]]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return out
    method = case["method"]
    in_gguf = parse_format(case["format"], "--formats")[0].name in TARGETS["gguf"]().formats
    out = folder / ("ours.gguf" if in_gguf and model.suffix == ".gguf" else "ours")
    calibrated = {"calibrate": flags.calibrate or True} if method in ("weighted", "gptq", "tune") else {}
    how = "gptq" if method == "tune" else "mse" if method == "weighted" else method
    settings = {"requantize": True, "overwrite": True, **calibrated}
    bf.quantize_checkpoint(model, out, case["format"], method=how, **settings)  # type: ignore[arg-type]
    if method != "tune":
        return out
    tuned = out.with_name(f"tuned{out.suffix}")
    bf.tune_checkpoint(out, tuned, against=model, text=flags.calibrate, device=flags.device, overwrite=True)
    return tuned


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
    parser.option("--device", "cpu, cuda or cuda:N; auto is a GPU if there is one", "auto", str, "D")
    flags = parser.parse_args()
    model = flags.model or default_model()
    reference = load(model, device=flags.device, progress=False)
    text = Path(flags.text or news()).read_text()
    truth = Truth(reference, reference.tokenizer.encode(text, special=False)[: flags.tokens])
    about = {"model": reference.config.name, "bits_per_weight": reference.decoder.tensors.bits_per_weight}
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        path = flags.json or Path(temporary) / "sweep.json"
        results = records.Growing(path, about=about, records=[])
        for case in cases(flags):
            if results.lacks("records", case):
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                results.add("records", measured(case, write(case, model, folder, flags), truth, flags.device))
                stack.pop_all().close()
                print(line(results.content["records"][-1]), flush=True)
    if flags.json == RESULTS:
        pages.main()


def line(record: Case) -> str:
    what = f"{record['by']}, {record['format']}, {record['method']}"
    return (
        f"{what}: {record['bits_per_weight']:.2f} bits, {record['divergence']:.4f} ± {record['divergence_error']:.4f}"
    )


if __name__ == "__main__":
    main()
