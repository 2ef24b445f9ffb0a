"""`billfish convert`: write a checkpoint in another layout."""

from __future__ import annotations

import argparse

from billfish.checkpoints.conversion import convert

LAYOUTS = "billfish, compressed-tensors, mlx, gptq, gptq_v2, awq or gguf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoints(parser)
    parser.add_argument(
        "--to", required=True, metavar="LAYOUT", help=f"{LAYOUTS}, or plain, which dequantizes all weights (required)"
    )
    parser.add_argument(
        "--dtype",
        metavar="TYPE",
        help="type of unquantized matrices: bfloat16, float16 or float32. With --to plain or gguf, all matrices are "
        "written so; with gptq and awq, embeddings and the LM head (default: as in IN)",
    )
    add_writing(parser)


def add_checkpoints(parser: argparse.ArgumentParser) -> argparse.Action:
    """IN and OUT; returns the latter."""
    parser.add_argument("source", metavar="IN", help="checkpoint to read: GGUF file, safetensors file or model folder")
    return parser.add_argument("out", metavar="OUT", help="folder to write, or a .gguf or .safetensors file")


def add_writing(parser: argparse.ArgumentParser) -> None:
    """What is allowed of the checkpoint that is written."""
    parser.add_argument(
        "--requantize",
        action="store_true",
        help="requantize quantized weights where that is needed, with loss (default: off)",
    )
    parser.add_argument(
        "--raw-names",
        action="store_true",
        help="write GGUF even for an unknown architecture; only billfish reads such a file (default: off)",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists (default: off)")


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
