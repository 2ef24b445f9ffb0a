"""`billfish tune`: train the scales of a quantized model."""

from __future__ import annotations

import argparse
import sys

from billfish.cli.convert import add_checkpoints
from billfish.cli.model_arguments import add_threads, set_threads
from billfish.quantizing.tune_checkpoint import tune_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoints(parser)
    parser.add_argument(
        "--against", required=True, metavar="MODEL", help="model to match, such as the float model of IN (required)"
    )
    parser.add_argument("--text", metavar="FILE", help="text to train with, in UTF-8 (default: a built-in text)")
    parser.add_argument(
        "--tokens", type=int, default=32768, metavar="N", help="use the first N tokens of the text (default: 32768)"
    )
    parser.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="split the text into windows of N tokens, each a step of the training "
        "(default: 512, or the model's context length if shorter)",
    )
    parser.add_argument("--epochs", type=int, default=2, metavar="N", help="read the text N times (default: 2)")
    parser.add_argument(
        "--rate",
        type=float,
        default=0.001,
        metavar="R",
        help="step size of Adam: about the relative change of a scale in a step; it falls to zero (default: 0.001)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="cpu, cuda, cuda:N, or auto: a GPU if torch has one (default: auto)",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists (default: off)")
    add_threads(parser)


def run(arguments: argparse.Namespace) -> None:
    """Write the checkpoint; print what is in it."""
    set_threads("tune", arguments.threads)
    if arguments.text is None:
        print("Tuning with the built-in text; --text FILE uses another.", file=sys.stderr)
    report = tune_checkpoint(
        arguments.source,
        arguments.out,
        against=arguments.against,
        text=arguments.text,
        tokens=arguments.tokens,
        window=arguments.window,
        epochs=arguments.epochs,
        rate=arguments.rate,
        device=arguments.device,
        overwrite=arguments.force,
    )
    print(report)
