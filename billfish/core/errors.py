"""The exceptions of billfish, and the two shapes of their messages: `bad_argument` and `failure`."""

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


class DeviceLost(BillfishError, RuntimeError):
    """A device that this process cannot use any more, as after a fault in a kernel. Only another process can."""


class MissingPackage(BackendUnavailable):
    """A Python package that this part of billfish needs is not installed."""


def explained(error: BaseException) -> str:
    """Return the message of an error, with the name of its class unless the error is ours."""
    return str(error) if isinstance(error, BillfishError) else f"{type(error).__name__}: {error}"


LONGEST = 400  # characters of each part of a message
NEAR = 0.6  # similarity from which a word is suggested


def bad_argument(call: str, argument: str, value: object, expected: str) -> str:
    """The message for a wrong argument: ``quantize: group_size is 33; expected 16, 32, 64 or 128.``"""
    return f"{call}: {readable(argument)} is {readable(value)}; expected {_ended(readable(expected, 4 * LONGEST))}"


def failure(call: str, problem: object, fix: str = "") -> str:
    """The message for any other error, what went wrong and what to do: ``save: a.gguf exists. Choose another name.``"""
    return f"{call}: {_ended(readable(problem, 4 * LONGEST))} {readable(fix, 4 * LONGEST)}".rstrip()


def _ended(text: str) -> str:
    """A text as a sentence, with a full stop."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def type_of(value: object) -> str:
    """The type of a value, with its article: "a list", "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' or name == 'ndarray' else 'a'} {name}"


def readable(text: object, longest: int = LONGEST) -> str:
    """Make a text safe to print: escape control characters, and cut the middle of a long text."""
    return _cut(printable(_cut(str(text), longest)), longest)  # an escape has up to ten characters


def _cut(text: str, longest: int) -> str:
    """A text without its middle, if it is too long."""
    half = (longest - 3) // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"


def printable(text: str) -> str:
    """Escape control characters. Names come from files, and a terminal obeys them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the sentence " Did you mean 'x'?" with the known word nearest to `word`, or "" if none is near."""
    matcher = difflib.SequenceMatcher(b=word.lower())

    def likeness(one: str) -> float:
        matcher.set_seq1(one.lower())
        return matcher.ratio()

    nearest = max(known, key=likeness, default="")  # the first of several that are equally near
    return f" Did you mean {nearest!r}?" if likeness(nearest) >= NEAR else ""
