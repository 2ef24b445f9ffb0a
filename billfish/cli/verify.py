"""`billfish verify`: compare two checkpoints, tensor by tensor."""

from __future__ import annotations

import argparse
import sys

from billfish.checkpoints.verification import verify
from billfish.core.tables import terminal_width


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="a .gguf or .safetensors file, or a model's folder")
    parser.add_argument("b", metavar="B", help="another one, in any layout")


def run(arguments: argparse.Namespace) -> int:
    """1 if any value differs."""
    report = verify(arguments.a, arguments.b)
    print(report.text(terminal_width(sys.stdout)))
    return 0 if report.same else 1
