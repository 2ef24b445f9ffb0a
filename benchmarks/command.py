"""What the command lines of all benchmarks share: option names, the types of their values, and how errors end."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path

from billfish.core.errors import BillfishError


class Parser(argparse.ArgumentParser):
    """Options whose help ends with the default."""

    def option(self, name: str, help: str, default: object, type: Callable[[str], object], metavar: str) -> None:
        self.add_argument(name, type=type, default=default, metavar=metavar, help=f"{help} (default: {default})")

    def listed(self, name: str, help: str, default: str, type: Callable[[str], object] | None = None) -> None:
        """An option with a comma-separated list, of words unless `type` makes something else of it."""
        self.option(name, help, default, type or words, "LIST")


def parser(
    module: ModuleSpec | None, about: str | None, *, threads: int | None = None, rounds: int | None = None
) -> Parser:
    """The parser of a module that is run with `python -m`, with --json; and with --threads or --rounds, by default so
    many. `module` and `about` are its `__spec__` and `__doc__`."""
    name = module.name if module is not None else "benchmarks"
    made = Parser(f"python -m {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=new_file, metavar="FILE", help="file to write the record to (default: none)")
    if threads is not None:
        made.option("--threads", "CPU threads", threads, positive, "N")
    if rounds is not None:
        made.option("--rounds", "rounds, whose medians count", rounds, positive, "N")
    return made


@contextmanager
def errors_end(made: Parser) -> Iterator[None]:
    """Errors of billfish end the process with the usage, the message and status 2."""
    try:
        yield
    except BillfishError as error:
        made.error(str(error))


# ---- types of values --------------------------------------------------------------------------------------------


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def words(text: str) -> list[str]:
    return text.split(",")


def positives(text: str) -> list[int]:
    return [positive(word) for word in words(text)]


def shapes(text: str) -> list[tuple[int, int]]:
    """K and N of matrices."""
    sizes = [shape.split("x") for shape in words(text)]
    if not all(len(size) == 2 and all(number.isdecimal() and int(number) for number in size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not KxN, such as 4096x4096,4096x14336")
    return [(int(k), int(n)) for k, n in sizes]


def new_file(text: str) -> Path:
    """Checked before the work: nobody wants to learn it after ten minutes."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists")
    return path
