"""`billfish quantize`: quantize the weights of a checkpoint."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from billfish.cli.convert import LAYOUTS, add_checkpoints, add_writing
from billfish.core.errors import DataError, FormatError, readable

USAGE = "billfish quantize IN OUT --format NAME"
FLOATS = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("f16", "fp16", "float16"), "float16"),
    **dict.fromkeys(("f32", "fp32", "float32"), "float32"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoints(parser).required = False  # `paths_and_text` finds OUT where --calibrate has taken a path
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument(
        "--format",
        metavar="NAME",
        help="format of the weights: a name that `billfish formats` lists, or a mix such as Q4_K_M "
        "(required, unless --bits is given)",
    )
    wanted.add_argument(
        "--bits",
        type=float,
        metavar="B",
        help="target average bits per weight; picks a format per matrix to minimize KL divergence. It runs the model "
        "many times, for minutes to hours (required, unless --format is given)",
    )
    parser.add_argument(
        "--formats", metavar="LIST", help="with --bits: formats to choose from (default: mxfp4,iq4_nl,q5_0,q8_0)"
    )
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help="with --bits: file of the chosen formats; read if it exists, else written (default: print them)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="G",
        help="number of weights that share a scale; -1 is a whole row (default: that of the format)",
    )
    parser.add_argument(
        "--method",
        default="mse",
        metavar="NAME",
        help="rtn: round to nearest, the fastest. mse: search the scale with the least squared error. gptq: also "
        "compensate the error in later columns; it calibrates on a built-in text unless --calibrate FILE is given, or "
        "--imatrix with a file of `billfish calibrate --hessian` (default: mse)",
    )
    known = parser.add_mutually_exclusive_group()
    known.add_argument(
        "--calibrate",
        action=Calibrate,
        nargs="?",
        default=False,
        metavar="FILE",
        help="run the model on a text file first, and weight the quantization error by its activations; without "
        "FILE, on a built-in text (default: off)",
    )
    parser.add_argument(
        "--no-sequential",
        action="store_true",
        help="with --method gptq: calibrate all layers with the inputs of the float model. Otherwise each matrix gets "
        "the inputs that the quantized ones before it give, and makes up for their errors (default: off)",
    )
    known.add_argument(
        "--imatrix",
        metavar="FILE",
        help="like --calibrate, with statistics already collected by `billfish calibrate` or llama-imatrix (default: "
        "none)",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="REGEX=FORMAT",
        help="use FORMAT instead of --format for tensors whose name matches REGEX, such as 'embed_tokens=q8_0' or "
        "'mlp=u4b8:128'; REGEX=keep leaves them unquantized; may be repeated (default: none)",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="REGEX",
        help="quantize only tensors whose name matches REGEX; may be repeated (default: all matrices but embeddings, "
        "LM head, norms and routers)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="DEVICE",
        help="where --calibrate, --bits and --method gptq compute: cpu, cuda, cuda:N, metal, or auto: the first GPU if "
        "it can calibrate the model, else the CPU. GPTQ uses an NVIDIA GPU that is named, with torch, else the CPU "
        "(default: auto)",
    )
    parser.add_argument("--to", metavar="LAYOUT", help=f"{LAYOUTS} (default: billfish, or gguf by the name of OUT)")
    add_writing(
        parser,
        "allow weights that are already quantized to be quantized again, with loss; without it they stay, and it is an "
        "error if there are no others",
    )


class Calibrate(argparse.Action):
    """--calibrate with or without a text. argparse gives it the next word in any case: `paths_and_text` looks whether
    that was IN or OUT."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        namespace.calibrate = values or True
        namespace.calibrate_before_in = namespace.source is None


def paths_and_text(arguments: argparse.Namespace) -> tuple[str, str, bool | str]:
    """IN, OUT and the text of --calibrate. If a path is missing, --calibrate has it and came without a text."""
    source, out, text = arguments.source, arguments.out, arguments.calibrate
    if out is not None:
        return source, out, text
    if source is None or not isinstance(text, str):
        raise DataError(f"quantize: {'IN and OUT are' if source is None else 'OUT is'} missing. Run: {USAGE}")
    return (text, source, True) if arguments.calibrate_before_in else (source, text, True)


def run(arguments: argparse.Namespace) -> None:
    """Write the checkpoint; print what became of each kind of tensors."""
    source, out, calibrate = paths_and_text(arguments)
    float_type = FLOATS.get((arguments.format or "").lower())
    if float_type is not None:
        to = arguments.to or ("gguf" if out.endswith(".gguf") else "plain")
        convert = f"billfish convert {readable(source)} {readable(out)} --to {to} --dtype {float_type}"
        raise FormatError(f"quantize: {arguments.format} is not a quantized format. Run: {convert}")
    if calibrate is True or (arguments.method == "gptq" and not calibrate and arguments.imatrix is None):
        print("Calibrating with the built-in text; --calibrate FILE uses another.", file=sys.stderr)
    rules = dict(map(_rule, arguments.keep))
    options = {
        "group_size": arguments.group_size,
        "method": arguments.method,
        "statistics": arguments.imatrix,
        "calibrate": calibrate,
        "only": arguments.only,
        "to": arguments.to,
        "requantize": arguments.requantize,
        "raw_names": arguments.raw_names,
        "sequential": False if arguments.no_sequential else None,
        "device": arguments.device,
        "overwrite": arguments.force,
    }
    # Here, as it can run models: other commands start without that.
    from billfish.quantizing.quantize_checkpoint import quantize_checkpoint, quantize_to_bits

    if arguments.format is not None:
        for name, value in (("formats", arguments.formats), ("plan", arguments.plan)):
            if value is not None:
                raise FormatError(f"quantize: --{name} needs --bits, not --format.")
        print(quantize_checkpoint(source, out, arguments.format, keep=rules, **options))
        return
    print(quantize_to_bits(source, out, arguments.bits, arguments.formats, arguments.plan, rules, **options))


def _rule(text: str) -> tuple[str, str]:
    """REGEX=FORMAT, REGEX=FORMAT:GROUP, or REGEX=keep."""
    pattern, equals, choice = text.rpartition("=")
    if not equals:
        raise FormatError(f"quantize: --keep {readable(text)} has no '='. Write REGEX=FORMAT[:GROUP], or REGEX=keep.")
    return pattern, choice
