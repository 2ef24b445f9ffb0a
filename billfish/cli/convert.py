"""`billfish convert`: write a checkpoint in another layout."""

from __future__ import annotations

import argparse

from billfish.checkpoints.conversion import convert

LAYOUTS = "billfish, compressed-tensors, mlx, gptq, gptq_v2, awq or gguf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoints(parser)
    parser.add_argument("--to", required=True, metavar="LAYOUT", help=f"{LAYOUTS}, or plain for no quantized weights")
    parser.add_argument(
        "--dtype",
        metavar="TYPE",
        help="bfloat16, float16 or float32 for matrices that are written unquantized: all of them in plain and gguf, "
        "embeddings and the last layer in gptq and awq",
    )
    add_writing(parser)


def add_checkpoints(parser: argparse.ArgumentParser) -> argparse.Action:
    """IN and OUT; returns the latter."""
    parser.add_argument("source", metavar="IN", help="a .gguf or .safetensors file, or a model's folder")
    return parser.add_argument("out", metavar="OUT", help="a folder to create, or a file: .gguf or .safetensors")


def add_writing(parser: argparse.ArgumentParser) -> None:
    """What is allowed of the checkpoint that is written."""
    parser.add_argument(
        "--requantize",
        action="store_true",
        help="weights that the layout cannot hold as they are may be quantized again",
    )
    parser.add_argument(
        "--raw-names",
        action="store_true",
        help="write GGUF even for unknown architectures; only billfish can read the file",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists, once the new one is whole")


def run(arguments: argparse.Namespace) -> None:
    report = convert(
        arguments.source,
        arguments.out,
        arguments.to,
        dtype=arguments.dtype,
        requantize=arguments.requantize,
        raw_names=arguments.raw_names,
        overwrite=arguments.force,
    )
    print(report)
