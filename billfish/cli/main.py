"""The command line: the table of commands, and how each of them ends."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import billfish
from billfish.core.errors import BillfishError, complaint, did_you_mean, printable

INTERRUPTED = 130  # what a shell expects after Ctrl-C


class Command(NamedTuple):
    """A line of the help. The file of the same name has the arguments, and is imported when the command is used."""

    purpose: str
    example: str
    resumes: bool = False  # whether the same command continues after Ctrl-C where it stopped


GROUPS = {
    "Models": {
        "run": Command(
            "a language model answers: one prompt, or a chat",
            'billfish run model.gguf -p "What is the capital of France?"',
        ),
        "serve": Command(
            "a language model answers many users, by OpenAI's API and on a page",
            "billfish serve model.gguf --port 8080",
        ),
        "eval": Command(
            "how well models predict a text, and what a format costs",
            "billfish eval model.gguf --text FILE --against other.gguf",
        ),
    },
    "Checkpoints": {
        "inspect": Command(
            "list the tensors of a checkpoint: format, shape, bits, size", "billfish inspect model.gguf"
        ),
        "calibrate": Command(
            "collect activation statistics (an imatrix) for `quantize`",
            "billfish calibrate model.gguf --text FILE -o STATS.safetensors",
            resumes=True,
        ),
        "quantize": Command(
            "quantize the weights of a checkpoint",
            "billfish quantize IN OUT --format fp4 --group-size 128",
            resumes=True,
        ),
        "convert": Command(
            "write a checkpoint in another layout, without loss where it can be",
            "billfish convert IN OUT --to mlx",
            resumes=True,
        ),
        "verify": Command("compare two checkpoints, tensor by tensor; 1 if any value differs", "billfish verify A B"),
    },
    "Formats": {
        "formats": Command("list every format: size, group, element, scale, storage", "billfish formats"),
        "explain": Command("walk one code through the bits that decode it", "billfish explain fp4 0b1011 --scale 0.3"),
    },
    "Machines": {
        "info": Command("what was found on this machine, and what will be used", "billfish info"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def module_of(name: str) -> Any:
    """The file of a command."""
    return importlib.import_module(f"billfish.cli.{name}")


def parser_of(name: str) -> argparse.ArgumentParser:
    """The options of a command."""
    parser = argparse.ArgumentParser(
        prog=f"billfish {name}",
        description=COMMANDS[name].purpose,
        epilog=f"example: {COMMANDS[name].example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module_of(name).add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 2 and one line on standard error if its arguments were wrong, 130 after Ctrl-C.

    Without a command: print the help.
    """
    _complete_streams()
    try:
        try:
            return _run_command(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        _drop_output()
        return 0
    except OSError as error:  # such as a full disk behind standard output
        _drop_output()
        where = printable(str(error.filename or "standard output"))
        _tell(f"{where}: {error.strerror or error}")
        return 2


def _run_command(words: list[str]) -> int:
    name = words[0] if words else ""
    try:
        if not words or name.startswith("-"):
            top = _top()
            if words:
                top.parse_args(words)  # --help and --version end here
                top.error("COMMAND is missing")
            top.print_help()
            return 0
        if name not in COMMANDS:
            takes = f"one of {', '.join(COMMANDS)}{did_you_mean(name, COMMANDS)}"
            raise BillfishError(complaint("billfish", "COMMAND", repr(name), takes))
        arguments = parser_of(name).parse_args(words[1:])
        status: int | None = module_of(name).run(arguments)
        return status or 0
    except BillfishError as error:
        _tell(error)
        return 2
    except KeyboardInterrupt:
        resumes = name in COMMANDS and COMMANDS[name].resumes
        _tell("stopped; the same command continues where it was" if resumes else "stopped")
        return INTERRUPTED


def _top() -> argparse.ArgumentParser:
    """What there is without a command: the help of all of them."""
    lines = []
    for title, commands in GROUPS.items():
        lines.append(f"\n{title}")
        for name, command in commands.items():
            lines += [f"  {name:<10}{command.purpose}", f"            {command.example}"]
    top = argparse.ArgumentParser(
        prog="billfish",
        usage="billfish COMMAND ...",
        description=textwrap.fill(billfish.__doc__ or "", 78),
        epilog="\n".join(lines) + "\n\n`billfish COMMAND --help` lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"billfish {billfish.__version__}")
    return top


def _tell(what: object) -> None:
    with contextlib.suppress(OSError):  # nobody listens
        print(f"billfish: {what}", file=sys.stderr)


def _complete_streams() -> None:
    """Streams that the caller has closed get a place where all is lost. Python has None for them, and the next file
    that is opened would get the number of standard output, where libraries print. Names that are no text are printed
    with escapes."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(nowhere, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """What could not be printed is not tried again when the process ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
