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


class MissingPackage(BackendUnavailable):
    """A Python package that this part of billfish needs is not installed."""


def explained(error: BaseException) -> str:
    """An error in a sentence: our messages say all, others' need the name of their class."""
    return str(error) if isinstance(error, BillfishError) else f"{type(error).__name__}: {error}"


LONGEST = 400  # characters of each part of a message
NEAR = 0.6  # the likeness of words that may be meant for each other


def complaint(call: str, argument: str, got: object, takes: str) -> str:
    """The one shape of our messages: ``[call] argument: got X; takes Y``.

    Files put names into X, and even into Y: each part is readable, whatever it is made of.
    """
    return f"[{call}] {readable(argument)}: got {readable(got)}; takes {readable(takes, 4 * LONGEST)}"


def readable(text: object, longest: int = LONGEST) -> str:
    """A text as it may be printed: control characters are escaped, and the middle of a long one is left out."""
    shown = str(text)
    if len(shown) > longest:
        half = (longest - 3) // 2
        shown = f"{shown[:half]}...{shown[-half:]}"
    return printable(shown)


def printable(text: str) -> str:
    """A text with its control characters escaped: names come from files, and a terminal obeys."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest known one, or nothing where none is near."""
    matcher = difflib.SequenceMatcher(b=word.lower())

    def likeness(one: str) -> float:
        matcher.set_seq1(one)
        return matcher.ratio()

    nearest = max(known, key=likeness, default="")  # the first of several that are equally near
    return f"; did you mean {nearest!r}?" if likeness(nearest) >= NEAR else ""
