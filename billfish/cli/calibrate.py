"""`billfish calibrate`: statistics of a model's activations, to a file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from billfish.cli.model_arguments import add_threads, set_threads
from billfish.llm.model import default_model
from billfish.quantizing.calibrate_checkpoint import DEFAULT_NAME, calibrate_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as `billfish run` takes it; it runs on the CPU")
    parser.add_argument("--text", metavar="FILE", help="what runs through it, in UTF-8 (default: a built-in text)")
    parser.add_argument(
        "-o", "--out", required=True, metavar="STATS", help="a file to create: .safetensors, or .gguf for an imatrix"
    )
    parser.add_argument("--hessian", action="store_true", help="keep X^T X too, for `quantize --method gptq`")
    parser.add_argument(
        "--tokens", type=int, default=32768, metavar="N", help="at most the first N tokens (default: 32768)"
    )
    parser.add_argument(
        "--window", type=int, metavar="N", help="context length of each window (default: 512, or the model's)"
    )
    add_threads(parser)


def run(arguments: argparse.Namespace) -> None:
    """Write the file; print one line about it."""
    set_threads("calibrate", arguments.threads)
    if arguments.text is None:
        print(f"calibrating with {DEFAULT_NAME}; --text FILE takes another", file=sys.stderr)
    statistics = calibrate_checkpoint(
        arguments.model or default_model(),
        arguments.out,
        text=arguments.text,
        hessian=arguments.hessian,
        tokens=arguments.tokens,
        window=arguments.window,
    )
    out = Path(arguments.out)
    about = f"{len(statistics)} matrices, {statistics.tokens} tokens in windows of {statistics.window}, on the CPU"
    print(f"{out.name}: {about}; {out.stat().st_size / 1e6:.1f} MB")
