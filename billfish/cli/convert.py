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
        help="bfloat16, float16 or float32. --to plain and gguf: the type of all matrices; quantized ones are "
        "dequantized. --to gptq, gptq_v2 and awq: the type of unquantized matrices, and of embeddings, LM head and "
        "routers, which are dequantized; the others stay quantized. Other layouts do not take it (default: as in IN; "
        "float32 for what is dequantized)",
    )
    add_writing(
        parser, "allow weights that LAYOUT cannot hold to be quantized again, with loss; without it they are an error"
    )


def add_checkpoints(parser: argparse.ArgumentParser) -> argparse.Action:
    """IN and OUT; returns the latter."""
    parser.add_argument("source", metavar="IN", help="checkpoint to read: GGUF file, safetensors file or model folder")
    return parser.add_argument("out", metavar="OUT", help="folder to write, or a .gguf or .safetensors file")


def add_writing(parser: argparse.ArgumentParser, requantize: str) -> None:
    """What is allowed of the checkpoint that is written. requantize: the help of --requantize."""
    parser.add_argument(
        "--requantize",
        action="store_true",
        help=requantize + " (default: off)",
    )
    parser.add_argument(
        "--raw-names",
        action="store_true",
        help="write GGUF even for an unknown architecture, with the tensor names of IN; only billfish opens "
        "such a file (default: off)",
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
