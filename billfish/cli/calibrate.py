"""`billfish calibrate`: write activation statistics of a model to a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from billfish.cli.model_arguments import DEFAULT, add_threads, set_threads
from billfish.llm.model import default_model
from billfish.quantizing.calibrate_checkpoint import calibrate_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="GGUF file, model folder, or safetensors file with config.json and tokenizer.json beside it "
        f"(default: {DEFAULT})",
    )
    parser.add_argument("--text", metavar="FILE", help="calibration text, in UTF-8 (default: a built-in text)")
    parser.add_argument(
        "-o",
        "--out",
        required=True,
        metavar="STATS",
        help="file to write: .safetensors, or .gguf, which llama.cpp reads as an imatrix (required)",
    )
    parser.add_argument(
        "--hessian", action="store_true", help="also store X^T X, which `quantize --method gptq` needs (default: off)"
    )
    parser.add_argument(
        "--tokens", type=int, default=32768, metavar="N", help="use the first N tokens of the text (default: 32768)"
    )
    parser.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="split the text into windows of N tokens, each run with an empty context "
        "(default: 512, or the model's context length if shorter)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="cpu, cuda, cuda:N, metal, or auto: the first GPU if it can calibrate the model, else the CPU "
        "(default: auto)",
    )
    parser.add_argument("--force", action="store_true", help="replace STATS if it exists (default: off)")
    add_threads(parser)


def run(arguments: argparse.Namespace) -> None:
    """Write the file; print one line about it."""
    set_threads("calibrate", arguments.threads)
    if arguments.text is None:
        print("Calibrating with the built-in text; --text FILE uses another.", file=sys.stderr)
    statistics = calibrate_checkpoint(
        arguments.model or default_model(),
        arguments.out,
        text=arguments.text,
        hessian=arguments.hessian,
        tokens=arguments.tokens,
        window=arguments.window,
        device=arguments.device,
        overwrite=arguments.force,
    )
    out = Path(arguments.out)
    about = f"{len(statistics)} matrices, {statistics.tokens} tokens in windows of {statistics.window}"
    print(f"{out.name}: {about}; {out.stat().st_size / 1e6:.1f} MB")
