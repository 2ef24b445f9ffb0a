"""The fields of a request's JSON. Each is taken with its type and range; one that nobody takes is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from billfish.core.errors import did_you_mean
from billfish.serving.refusals import Described, Refusal, wrong


def parse(call: str, body: bytes) -> Fields:
    """The fields of a request's body."""
    takes = "a JSON object in UTF-8"
    try:
        text = body.decode()
        value = json.loads(text, parse_constant=_no_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except RecursionError:
        raise wrong(call, "body", Described("JSON that is nested too deeply"), takes) from None
    except ValueError as error:  # what json raises, and a UnicodeError
        raise wrong(call, "body", Described(error), takes) from None
    return Fields(call, "", value)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name}, which JSON does not have")


class Fields:
    """A JSON object. null is as good as no field.

    path: where the object is in the body: "" for the body itself, or "messages[0]".
    """

    def __init__(self, call: str, path: str, value: object) -> None:
        self.call, self.path = call, path
        self.known: list[str] = []  # what was asked for, in order
        if not isinstance(value, dict):
            raise wrong(call, path or "body", value, "a JSON object")
        self._left = {name: each for name, each in value.items() if each is not None}

    def take(self, name: str) -> Any:
        """The value as it is; None where there is none."""
        self.known.append(name)
        return self._left.pop(name, None)

    def done(self) -> None:
        """Refuses what was not taken: nothing that a client asks for is ignored."""
        for name in self._left:
            takes = f"{', '.join(self.known)}{did_you_mean(name, self.known)}"
            raise wrong(self.call, self.at(name), Described("a field that is not served"), takes, "unsupported_field")

    def at(self, name: str) -> str:
        """The field's place in the body."""
        return f"{self.path}.{name}" if self.path else name

    def wrong(self, name: str, got: object, takes: str) -> Refusal:
        """To be raised for a value that is not taken."""
        return wrong(self.call, self.at(name), got, takes)

    def only(self, name: str, *values: object) -> None:
        """A field that is served with these values alone, which ask for what is done anyway."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in values):
            raise self.wrong(name, value, " or ".join(json.dumps(each) for each in values))

    def boolean(self, name: str) -> bool:
        """true or false; false where there is none."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return bool(value)

    def integer(self, name: str, least: int, most: int) -> int | None:
        """A whole number, both limits included."""
        value = self.take(name)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise self.wrong(name, value, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float, least: float, most: float, above: bool = False) -> float:
        """above: `least` itself is not taken."""
        value = self.take(name)
        if value is None:
            return default
        if not is_number(value) or not least <= value <= most or (above and value == least):
            span = f"above {least:g}, up to {most:g}" if above else f"from {least:g} to {most:g}"
            raise self.wrong(name, value, f"a number {span}")
        return float(value)

    def text(self, name: str) -> str | None:
        """Any text."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, value, "a text")
        return value

    def word(self, name: str, words: Sequence[str]) -> str | None:
        """One of several texts."""
        value = self.take(name)
        if value is not None and value not in words:
            raise self.wrong(name, value, ", ".join(words))
        return value

    def items(self, name: str, least: int = 0) -> list[Any] | None:
        """A list of at least so many values."""
        value = self.take(name)
        if value is not None and (not isinstance(value, list) or len(value) < least):
            raise self.wrong(name, value, f"a list of at least {least}" if least else "a list")
        return value

    def inner(self, name: str) -> Fields | None:
        """An object inside this one."""
        value = self.take(name)
        return None if value is None else Fields(self.call, self.at(name), value)

    def needed(self, name: str, value: Any, takes: str) -> Any:
        """A value that must be there."""
        if value is None:
            raise self.wrong(name, Described("nothing"), takes)
        return value


def is_number(value: object) -> bool:
    """Whether a JSON value is a number; 1e999 is read as infinity."""
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))
