"""`billfish formats`: the table of all formats."""

from __future__ import annotations

import argparse
import sys
from typing import TextIO

from billfish.core.formats import FORMATS, aliases_of
from billfish.core.tables import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table (default: off)")


def run(arguments: argparse.Namespace) -> None:
    print_formats(sys.stdout, arguments.markdown)


COLUMNS = ("format", "bits/weight", "group", "element", "scale", "offset", "codes mean", "also called", "storage")


def format_rows() -> list[tuple[str, ...]]:
    """One row of text for each format."""
    rows: list[tuple[str, ...]] = []
    for format in FORMATS.values():
        groups = ", ".join(map(str, sorted(format.group_sizes))) + (", K" if format.whole_row_groups else "")
        if format.block_size > max(format.group_sizes):
            groups += f" (blocks of {format.block_size})"
        element = format.element
        rows.append(
            (
                format.name,
                f"{format.bits_per_weight(format.default_group_size):.6g}",
                groups,
                element.name,
                format.scale,
                format.offset,
                f"{element.low:g} .. {element.high:g}",
                ", ".join(aliases_of(format)),
                format.layout,
            )
        )
    return rows


def print_formats(out: TextIO, markdown: bool = False) -> None:
    """The table of all formats; bits/weight at the default group size."""
    rows = [COLUMNS, *format_rows()]
    if not markdown:
        print_table(rows, out, left=len(COLUMNS))
        return
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for row in (rows[0], ["-" * width for width in widths], *rows[1:]):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |", file=out)
