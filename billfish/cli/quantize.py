"""`billfish quantize`: quantize the weights of a checkpoint."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from billfish.cli.convert import LAYOUTS, add_checkpoints, add_writing
from billfish.core.errors import DataError, FormatError, complaint

USAGE = "billfish quantize IN OUT --format NAME"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoints(parser).required = False  # `paths_and_text` finds OUT where --calibrate has taken a path
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument(
        "--format", metavar="NAME", help="a name that `billfish formats` lists, or a mix such as Q4_K_M"
    )
    wanted.add_argument(
        "--bits",
        type=float,
        metavar="B",
        help="target average bits per weight; picks a format per matrix to minimize KL divergence",
    )
    parser.add_argument(
        "--formats", metavar="LIST", help="with --bits: the formats to pick from (default: mxfp4,iq4_nl,q5_0,q8_0)"
    )
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help="with --bits: the picked formats, as rules for --keep; read if it exists, else written",
    )
    parser.add_argument("--group-size", type=int, metavar="G", help="weights that share a scale; -1: a whole row")
    parser.add_argument("--method", default="mse", metavar="NAME", help="rtn, mse or gptq (default: mse)")
    known = parser.add_mutually_exclusive_group()
    known.add_argument(
        "--calibrate",
        action=Calibrate,
        nargs="?",
        default=False,
        metavar="TEXT",
        help="weight the quantization error by the activations seen in TEXT (default: a built-in text)",
    )
    known.add_argument("--imatrix", metavar="FILE", help="the same with statistics of `calibrate`, or of llama.cpp")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="REGEX=FORMAT",
        help="another format for these tensors, such as 'embed_tokens=q8_0' or 'mlp=u4b8:128'; "
        "'=keep' leaves them alone",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="REGEX", help="quantize no tensors but those that match"
    )
    parser.add_argument("--to", metavar="LAYOUT", help=f"{LAYOUTS} (default: billfish, or gguf by the name of OUT)")
    add_writing(parser)


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
    if calibrate is True or (arguments.method == "gptq" and not calibrate and arguments.imatrix is None):
        print("calibrating with the text that billfish carries; --calibrate TEXT takes another", file=sys.stderr)
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
        "overwrite": arguments.force,
    }
    # Here, as it can run models: other commands start without that.
    from billfish.quantizing.quantize_checkpoint import quantize_checkpoint, quantize_to_bits

    if arguments.format is not None:
        for name, value in (("formats", arguments.formats), ("plan", arguments.plan)):
            if value is not None:
                raise FormatError(complaint("quantize", f"--{name}", f"{value!r} beside --format", "it beside --bits"))
        print(quantize_checkpoint(source, out, arguments.format, keep=rules, **options))
        return
    print(quantize_to_bits(source, out, arguments.bits, arguments.formats, arguments.plan, rules, **options))


def _rule(text: str) -> tuple[str, str]:
    """REGEX=FORMAT, REGEX=FORMAT:GROUP, or REGEX=keep."""
    pattern, equals, choice = text.rpartition("=")
    if not equals:
        raise FormatError(complaint("quantize", "keep", repr(text), "REGEX=FORMAT[:GROUP], or REGEX=keep"))
    return pattern, choice
