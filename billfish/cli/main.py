"""The command line: the table of commands, and how each of them ends."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import billfish
from billfish.cli.parser import Parser
from billfish.core.errors import BillfishError, printable, readable
from billfish.core.log_line import logging_to_stderr

INTERRUPTED = 130  # what a shell expects after Ctrl-C
NO_THREAD = "can't start new thread"  # what Python says where there is no memory for its stack


class Command(NamedTuple):
    """A line of the help. The file of the same name has the arguments, and is imported when the command is used."""

    purpose: str
    usage: str
    example: str
    resumes: bool = False  # whether the same command continues after Ctrl-C where it stopped
    note: str = ""  # more about it, in its own help


GROUPS = {
    "Models": {
        "run": Command(
            "answer a prompt, or chat (`billfish chat` is the same)",
            "[MODEL] [PROMPT] [options]",
            'billfish run model.gguf "What is the capital of France?"',
        ),
        "serve": Command(
            "serve models: APIs of OpenAI, Anthropic and Ollama, a chat page",
            "[MODEL ...] [options]",
            "billfish serve model.gguf --port 8080",
            note="A request without temperature is sampled as the model's files recommend, else at 0.8 with top-p "
            "0.95; one without max_tokens may fill the context.",
        ),
        "eval": Command(
            "measure perplexity on a text, and KL divergence from another model",
            "[MODEL ...] --text FILE [options]",
            "billfish eval model.gguf --text FILE --against other.gguf",
        ),
    },
    "Checkpoints": {
        "inspect": Command(
            "show architecture, context, tokenizer and tensors of a checkpoint",
            "PATH [options]",
            "billfish inspect model.gguf",
        ),
        "calibrate": Command(
            "collect activation statistics (an imatrix) for `quantize`",
            "[MODEL] -o STATS [options]",
            "billfish calibrate model.gguf --text FILE -o STATS.safetensors",
            resumes=True,
        ),
        "rotate": Command(
            "fold a random rotation into float weights, before `quantize`",
            "IN OUT [options]",
            "billfish rotate FLOATS ROTATED",
            resumes=True,
            note="Logits stay the same, up to rounding. It helps GPTQ with one scale per row; formats in small groups "
            "lose more afterwards. The model needs RMSNorm before each part, and an LM head that is not its embedding.",
        ),
        "quantize": Command(
            "quantize the weights of a checkpoint",
            "IN OUT (--format NAME | --bits B) [options]",
            "billfish quantize IN OUT --format fp4 --group-size 128",
            resumes=True,
        ),
        "tune": Command(
            "train the scales of a quantized model, by KL divergence",
            "IN OUT --against MODEL [options]",
            "billfish tune IN OUT --against FLOATS --text FILE",
            resumes=True,
            note="It needs torch. Formats, sizes and codes stay as they are.",
        ),
        "convert": Command(
            "convert a checkpoint to another layout, without loss where possible",
            "IN OUT --to LAYOUT [options]",
            "billfish convert IN OUT --to mlx",
            resumes=True,
            note="A format says which bits a number becomes (q4_0); a layout, how a program stores tensors in files "
            "(gptq).",
        ),
        "verify": Command(
            "compare two checkpoints tensor by tensor (exit status 1: different)",
            "A B [options]",
            "billfish verify A B",
        ),
    },
    "Formats": {
        "formats": Command(
            "list all formats: bits per weight, group size, element, scale",
            "[options]",
            "billfish formats",
        ),
        "explain": Command(
            "decode one code of a format, bit by bit",
            "FORMAT CODE [options]",
            "billfish explain fp4 0b1011 --scale 0.3",
        ),
    },
    "Machines": {
        "info": Command(
            "show the CPU, the backends and the packages that billfish finds",
            "[options]",
            "billfish info",
        ),
        "doctor": Command(
            "check all kernels against NumPy, and a model on each device",
            "[MODEL] [options]",
            "billfish doctor model.gguf --report report.json",
        ),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
ALIASES = {"chat": "run"}


def module_of(name: str) -> Any:
    """The file of a command."""
    return importlib.import_module(f"billfish.cli.{name}")


def parser_of(name: str) -> Parser:
    """The options of a command."""
    command = COMMANDS[name]
    parser = Parser(
        prog=f"billfish {name}",
        usage=f"billfish {name} {command.usage}",
        description=textwrap.fill(f"{command.purpose[0].upper()}{command.purpose[1:]}. {command.note}", 78),
        epilog=f"example: {command.example}",
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
    if words in ([], ["help"]):
        _top().print_help()
        return 0
    name, *rest = [*words[1:2], "--help"] if words[0] == "help" else words
    if words[0] == "help" and name in ALIASES:
        print(f"`{name}` is another name for `{ALIASES[name]}`: see `billfish help {ALIASES[name]}`.")
        return 0
    name = ALIASES.get(name, name)
    try:
        if name.startswith("-"):
            top = _top()
            top.parse_args([name, *rest])  # --help and --version end here
            top.error("COMMAND is missing")
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise BillfishError(f"unknown command {readable(repr(name))}.{hint} `billfish help` lists all.")
        arguments = parser_of(name).parse_args(rest)
        with logging_to_stderr():
            status: int | None = module_of(name).run(arguments)
        return status or 0
    except BillfishError as error:
        _tell(error)
        return 2
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and str(error) != NO_THREAD:
            raise
        _tell("the system gives this process no more memory. Use a smaller model or context.")
        return 2
    except KeyboardInterrupt:
        resumes = name in COMMANDS and COMMANDS[name].resumes
        _tell("stopped. The same command continues from here." if resumes else "stopped")
        return INTERRUPTED


def _top() -> Parser:
    """What there is without a command: the help of all of them."""
    lines = []
    for title, commands in GROUPS.items():
        lines.append(f"\n{title}")
        for name, command in commands.items():
            lines += [f"  {name:<11}{command.purpose}", f"             {command.example}"]
    top = Parser(
        prog="billfish",
        usage="billfish COMMAND ...",
        description="Quantize neural networks to 2 to 8 bits, and run them on CPUs and GPUs.",
        epilog="\n".join(lines) + "\n\n`billfish help COMMAND` lists the options of a command.",
    )
    version = f"billfish {billfish.__version__}"
    top.add_argument("-v", "--version", action="version", version=version, help="show the version and exit")
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
