"""Columns of text: whole in a pipe, where somebody may look for a name; fitted to the width of a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TextIO

LEAST = 12  # columns that a shortened name keeps


def terminal_width(stream: TextIO) -> int | None:
    """How many columns a line may have; None where nobody counts them, as in a pipe or a file."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def shortened(text: str, width: int) -> str:
    """A text of at most `width` columns, but no fewer than LEAST: both ends of it, with "..." between them."""
    width = max(width, LEAST)
    if len(text) <= width:
        return text
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Lines of aligned columns, two spaces apart. Where they take more than `width`, the widest are shortened."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > LEAST:
        widths[widths.index(max(widths))] -= 1
    return [
        "  ".join(shortened(cell, wide).ljust(wide) for cell, wide in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
