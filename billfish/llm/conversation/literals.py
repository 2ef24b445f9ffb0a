"""Values as models write them: JSON, Python's literals, and strings in marks of the template's own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
CLOSING = {"(": ")", "{": "}", "[": "]"}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
WORD = re.compile(r"[^\s\[\]{}(),:='\"]+")
DEEPEST = 64


class NotALiteral(ValueError):
    """The text is no value."""


class Literals:
    """Reads `key=value, key=value)` from a text, behind its opening bracket.

    equals: between a key and its value, such as = or :. quote: around strings, beside " and '.
    """

    def __init__(self, text: str, equals: str, quote: str) -> None:
        self._text, self._equals, self._at = text, equals.strip(), 0
        self._quotes = sorted({quote, '"', "'"} - {""}, key=len, reverse=True)

    def arguments(self, closing: str) -> tuple[dict[str, Any], int] | None:
        """The arguments and where they end; None where the text is too short to tell. Raises NotALiteral."""
        try:
            found = self._members(closing, self._equals, 0)
        except IndexError:
            return None
        return found, self._at

    def value(self) -> Any:
        """The one value that the text is. Raises NotALiteral."""
        try:
            found = self._value(0)
        except IndexError:
            raise NotALiteral from None
        if self._text[self._at :].strip():
            raise NotALiteral
        return found

    def _members(self, closing: str, equals: str, depth: int) -> dict[str, Any]:
        made = dict[str, Any]()
        while not self._take(closing):
            if made and not self._take(","):
                raise NotALiteral
            if made and self._take(closing):
                break
            key = self._value(depth + 1) if self._quote() else self._word()
            if not self._take(equals) and not self._take(":"):
                raise NotALiteral
            made[str(key)] = self._value(depth + 1)
        return made

    def _value(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise NotALiteral
        if quote := self._quote():
            return self._string(quote)
        if self._take("{"):
            return self._members("}", ":", depth)
        for opening in "[(":
            if self._take(opening):
                return self._items(CLOSING[opening], depth)
        word = self._word()
        if word in CONSTANTS:
            return CONSTANTS[word]
        try:
            return json.loads(word)
        except ValueError:
            raise NotALiteral from None

    def _items(self, closing: str, depth: int) -> list[Any]:
        made = list[Any]()
        while not self._take(closing):
            if made and not self._take(","):
                raise NotALiteral
            if made and self._take(closing):
                break
            made.append(self._value(depth + 1))
        return made

    def _quote(self) -> str:
        self._skip()
        rest = self._text[self._at : self._at + len(self._quotes[0])]
        found = next((quote for quote in self._quotes if rest.startswith(quote)), "")
        if not found and any(quote.startswith(rest) for quote in self._quotes):
            raise IndexError  # it may become one
        return found

    def _string(self, quote: str) -> str:
        self._at += len(quote)
        if len(quote) > 1:  # a mark, inside of which nothing is escaped
            end = self._text.find(quote, self._at)
            if end < 0:
                raise IndexError
            found, self._at = self._text[self._at : end], end + len(quote)
            return found
        made = []
        while (character := self._text[self._at]) != quote:
            self._at += 1
            if character == "\\":
                character = self._text[self._at]
                self._at += 1
                if character == "u":
                    digits, self._at = self._text[self._at : self._at + 4], self._at + 4
                    self._text[self._at - 1]  # raises where the text ends
                    made.append(chr(int(digits, 16)) if re.fullmatch("[0-9a-fA-F]{4}", digits) else digits)
                    continue
                character = ESCAPES.get(character, character)
            made.append(character)
        self._at += 1
        return "".join(made).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _word(self) -> str:
        self._skip()
        found = WORD.match(self._text, self._at)
        if found is None:
            self._text[self._at]  # raises where the text ends
            raise NotALiteral
        if found.end() == len(self._text):
            raise IndexError  # it may go on
        self._at = found.end()
        return found[0]

    def _take(self, text: str) -> bool:
        self._skip()
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _skip(self) -> None:
        while self._text[self._at].isspace():
            self._at += 1


def typed(text: str, schema: object) -> Any:
    """The value of a text between marks, which has no type of its own. schema: of the argument, if it is known."""
    kinds = _types(schema)
    if kinds == {"string"}:
        return text
    try:
        value = Literals(f"{text} ", ":", "").value()
    except NotALiteral:
        return text
    if "string" in kinds and not isinstance(value, (dict, list)):
        return text  # a text that looks like a number
    return value


def _types(schema: object) -> set[str]:
    """The types that a JSON schema allows, as far as it says so itself."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set[str]()
    if isinstance(values := schema.get("enum"), list):
        found |= {"string" if isinstance(value, str) else "other" for value in values}
    for name in ("anyOf", "oneOf"):
        for each in schema.get(name) or ():
            found |= _types(each)
    return found
