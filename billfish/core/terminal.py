"""Colour and emphasis in the terminal."""

from __future__ import annotations

import os
from typing import TextIO


class Style:
    """ANSI colours where the stream is a terminal that wants them; plain text elsewhere."""

    CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}

    def __init__(self, stream: TextIO) -> None:
        wanted = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self.enabled = wanted and stream.isatty()

    def __call__(self, text: str, style: str) -> str:
        return f"\x1b[{self.CODES[style]}m{text}\x1b[0m" if self.enabled else text
