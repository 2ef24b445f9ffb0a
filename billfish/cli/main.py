"""The command line: what each command does, and how it ends."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import billfish
from billfish.cli.parser import EXAMPLES, parser
from billfish.core.errors import BillfishError, complaint, did_you_mean

INTERRUPTED = 130  # what a shell expects after Ctrl-C

# Each command imports what it needs, and no other waits for that.


def _formats(arguments: argparse.Namespace) -> None:
    from billfish.cli.explain import print_formats

    print_formats(sys.stdout, arguments.markdown)


def _info(arguments: argparse.Namespace) -> None:
    from billfish.cli.info import print_info

    print_info(sys.stdout, arguments.json)


def _explain(arguments: argparse.Namespace) -> None:
    from billfish.cli.explain import explain

    format = billfish.get_format(arguments.format, "explain")
    explain(format, arguments.code, arguments.scale, arguments.offset, sys.stdout)


def _run(arguments: argparse.Namespace) -> None:
    from billfish.cli import run

    run.run(arguments)


def _serve(arguments: argparse.Namespace) -> None:
    from billfish.cli import serve

    serve.serve(arguments)


def _eval(arguments: argparse.Namespace) -> None:
    from billfish.cli import eval

    eval.evaluate_models(arguments)


def _inspect(arguments: argparse.Namespace) -> None:
    from billfish.cli import checkpoint_commands

    checkpoint_commands.inspect(arguments.path, arguments.json, sys.stdout)


def _calibrate(arguments: argparse.Namespace) -> None:
    from billfish.cli import calibrate

    with _told_how_to_continue():
        calibrate.calibrate(arguments)


def _quantize(arguments: argparse.Namespace) -> None:
    from billfish.cli import checkpoint_commands

    with _told_how_to_continue():
        checkpoint_commands.quantize_and_print(**_options(arguments))


def _convert(arguments: argparse.Namespace) -> None:
    from billfish.cli import checkpoint_commands

    with _told_how_to_continue():
        checkpoint_commands.convert_and_print(**_options(arguments))


def _verify(arguments: argparse.Namespace) -> None:
    from billfish.cli import checkpoint_commands

    if not checkpoint_commands.verify_and_print(arguments.a, arguments.b):
        sys.stdout.flush()
        raise SystemExit(1)


@contextlib.contextmanager
def _told_how_to_continue() -> Iterator[None]:
    """After Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        _tell("stopped; the same command continues where it was")
        raise SystemExit(INTERRUPTED) from None


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name != "command"}


def _bench(arguments: argparse.Namespace) -> None:
    from benchmarks import products

    settings = products.Settings.parse(**_options(arguments))
    if settings.report is not None:
        from benchmarks.products import report

        if not report.run(settings, sys.stdout).complete:
            raise SystemExit(1)
        return
    try:
        complete = products.run(settings).complete
    except KeyboardInterrupt:  # before the first measurement
        complete = False
    if not complete:
        raise SystemExit(INTERRUPTED)


def _profile(arguments: argparse.Namespace) -> None:
    from benchmarks import metal_profile

    metal_profile.run(metal_profile.Settings.parse(**_options(arguments)))


COMMANDS = {
    "formats": _formats,
    "info": _info,
    "explain": _explain,
    "run": _run,
    "serve": _serve,
    "eval": _eval,
    "inspect": _inspect,
    "calibrate": _calibrate,
    "quantize": _quantize,
    "convert": _convert,
    "verify": _verify,
    "bench": _bench,
    "profile": _profile,
}


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
        where = str(error.filename or "standard output")
        _tell(complaint("billfish", where, error.strerror or error, "a place with room that can be written to"))
        return 2


def _run_command(words: list[str]) -> int:
    try:
        if not words:
            parser().print_help()
            return 0
        if not words[0].startswith("-") and words[0] not in EXAMPLES:
            takes = f"one of {', '.join(EXAMPLES)}{did_you_mean(words[0], EXAMPLES)}"
            raise BillfishError(complaint("billfish", "COMMAND", repr(words[0]), takes))
        arguments = parser().parse_args(words)
        COMMANDS[arguments.command](arguments)
    except BillfishError as error:
        _tell(error)
        return 2
    except KeyboardInterrupt:
        _tell("stopped")
        return INTERRUPTED
    return 0


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
