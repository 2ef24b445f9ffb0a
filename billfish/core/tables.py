"""Columns of text: whole in a pipe, where somebody may look for a name; fitted to the width of a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TextIO

from billfish.core.errors import printable
from billfish.core.terminal import Style

GAP = 2  # spaces between two columns
LEAST = 12  # columns that a shortened name keeps


def terminal_width(stream: TextIO) -> int | None:
    """How many columns a line may have; None where nobody counts them, as in a pipe or a file."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def shortened(text: str, width: int) -> str:
    """A text of at most `width` columns, but no fewer than LEAST: both ends of it, with "..." between them."""
    text, width = printable(text), max(width, LEAST)
    if len(text) <= width:
        return text
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Lines of aligned columns, two spaces apart. Where they take more than `width`, the widest are shortened."""
    if not rows:
        return []
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > LEAST:
        widths[widths.index(max(widths))] -= 1
    return [
        "  ".join(shortened(cell, wide).ljust(wide) for cell, wide in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def folded(rows: Sequence[Sequence[str]], width: int | None, keys: int) -> list[list[int]]:
    """Which columns of a table stand side by side, so that no line is longer than `width`.

    The first `keys` columns say what a row is about, so each part begins with them. A column that is too wide by
    itself has a part to itself.
    """
    widths = [max(map(len, column)) + GAP for column in zip(*rows, strict=True)]
    room = sum(widths) if width is None else width - sum(widths[:keys]) + GAP
    parts: list[list[int]] = []
    used = room
    for column in range(keys, len(widths)):
        used += widths[column]
        if used > room:
            parts.append([*range(keys)])
            used = widths[column]
        parts[-1].append(column)
    return parts


def print_table(rows: Sequence[Sequence[str]], out: TextIO, *, left: int, keys: int = 1) -> None:
    """A head and its rows; the first `left` columns to the left, the others to the right.

    A table that is wider than the terminal goes on below, after its first `keys` columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    style = Style(out)
    for number, part in enumerate(folded(rows, terminal_width(out), keys)):
        if number:
            print(file=out)
        for i, row in enumerate(rows):
            cells = [row[j].ljust(widths[j]) if j < left else row[j].rjust(widths[j]) for j in part]
            line = (" " * GAP).join(cells).rstrip()
            print(style(line, "bold") if i == 0 else line, file=out)
