"""Looks for marks in a text that is still growing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Functions = Mapping[str, Mapping[str, Any]]  # JSON schemas of parameters, by the function's name
WAIT = -1


def matched(mark: str, text: str) -> int | None:
    """Where `mark` ends, if the text begins with it. White space counts little. None if it does not, WAIT if it may."""
    at = 0
    for part in mark.split():
        while at < len(text) and text[at].isspace():
            at += 1
        if not text.startswith(part, at):
            return WAIT if part.startswith(text[at:]) else None
        at += len(part)
    return at


def may_begin(mark: str, text: str) -> int:
    """The character from which on the text may be the mark."""
    if mark in text:
        return text.index(mark)
    return next(
        (len(text) - n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), len(text)
    )
