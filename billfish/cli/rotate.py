"""`billfish rotate`: fold a random rotation into the weights of a model."""

from __future__ import annotations

import argparse

from billfish.cli.convert import add_checkpoints
from billfish.quantizing.rotate_checkpoint import rotate_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoints(parser).help = "folder, or .gguf file, to write"
    parser.add_argument(
        "--dtype",
        metavar="TYPE",
        help="bfloat16, float16 or float32: type of all matrices (default: as in IN; float32 for what is dequantized)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the rotation (default: 0)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists (default: off)")


def run(arguments: argparse.Namespace) -> None:
    """Write the checkpoint; print what is in it."""
    report = rotate_checkpoint(
        arguments.source, arguments.out, seed=arguments.seed, dtype=arguments.dtype, overwrite=arguments.force
    )
    print(report)
