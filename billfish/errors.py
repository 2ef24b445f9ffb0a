"""What billfish raises. Every message names the call, the argument, what it got and what it takes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BillfishError(Exception):
    """The base of all errors that billfish raises on purpose."""


class FormatError(BillfishError, ValueError):
    """An unknown format, or an option that the format does not have."""


class ShapeError(BillfishError, ValueError):
    """An array of the wrong shape."""


class DTypeError(BillfishError, TypeError):
    """An array of the wrong element type."""


class DataError(BillfishError, ValueError):
    """Numbers that cannot be stored, such as NaN, infinity or a scale that overflows."""


class ModelError(BillfishError, ValueError):
    """A model file that cannot be run, or a prompt that it cannot take."""


class CheckpointError(BillfishError, ValueError):
    """A file that is damaged, of a layout that is not supported, or that cannot be written."""


class BackendUnavailable(BillfishError, RuntimeError):
    """No backend, or not the one asked for, can run this problem on this machine."""


def complaint(call: str, argument: str, got: object, takes: str) -> str:
    """The one shape of our messages: ``[call] argument: got X; takes Y``."""
    return f"[{call}] {argument}: got {got}; takes {takes}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest known one, or nothing where none is near."""
    near = difflib.get_close_matches(word.lower(), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
