"""A call that is a JSON object, read character by character, so that its arguments can go out as they come."""

from __future__ import annotations

import json

LONGEST = 1_000_000  # characters of a call


class JsonCall:
    """`{"name": ..., "arguments": {...}}` in pieces, in any order of the fields.

    name: once it is known. begun: whether the name is known and arguments have come or the object is over.
    ended: the object is over. failed: it is no such object.
    """

    def __init__(self, name_key: str, arguments_key: str) -> None:
        self._name_key, self._arguments_key = name_key, arguments_key
        self.name, self.begun, self.ended, self.failed = "", False, False, False
        self._depth, self._in_string, self._escaped = 0, False, False
        self._key: str | None = None  # of the outer object, whose value is being read
        self._token = ""  # the string, key or value of the outer object
        self._new: list[str] = []  # characters of the arguments that were not told yet
        self._streams = self._some = False  # whether the arguments are an object, and whether there are any
        self._bare = False  # there is no outer object: all of it are arguments
        self._count = 0

    @classmethod
    def of_arguments(cls, name: str) -> JsonCall:
        """A call whose name came before, so that the whole object are its arguments."""
        made = cls("", "")
        made.name, made._bare, made.begun = name, True, False
        return made

    def feed(self, text: str) -> tuple[str, str]:
        """Go on. Returns what comes behind the object, and new text of the arguments."""
        for index, character in enumerate(text):
            self._step(character)
            if self.ended or self.failed:
                self._begin_if_known()
                return text[index + 1 :] if self.ended else text[index:], self._news()
        self._begin_if_known()
        return "", self._news()

    def _news(self) -> str:
        if not self.begun:
            return ""
        if self.ended and not self._some:
            self._tell("{}")
        new, self._new = "".join(self._new), []
        return new

    def _tell(self, text: str) -> None:
        self._new.append(text)
        self._some = True

    def _begin_if_known(self) -> None:
        if self.name and (self._bare or self._some or self.ended):
            self.begun = True

    def _step(self, character: str) -> None:
        self._count += 1
        if self._count > LONGEST:
            self.failed = True
        elif self._bare:
            self._step_inside(character, outer=0)
            self._tell(character)
            self.ended = self._depth == 0 and not self._in_string
        elif self._depth == 0:
            if character == "{":
                self._depth = 1
            elif not character.isspace():
                self.failed = True
        elif self._key is None:
            self._step_key(character)
        else:
            self._step_value(character)

    def _step_key(self, character: str) -> None:
        if self._in_string or character == '"':
            self._token += character
            self._string(character)
        elif character == ":":
            try:
                self._key, self._token = str(json.loads(self._token)), ""
            except ValueError:
                self.failed = True
        elif character == "}" and not self._token:
            self.ended = True
        elif not character.isspace() and character != ",":
            self.failed = True

    def _step_value(self, character: str) -> None:
        closes = self._depth == 1 and not self._in_string and character in ",}"
        if closes:
            if not self._streams:
                self._end_value()
            self._key, self._token, self._streams = None, "", False
            self.ended = character == "}" and not self.failed
            return
        if self._key == self._arguments_key and character == "{" and not self._token:
            self._streams = True
        before = self._depth
        self._step_inside(character, outer=1)
        if not self._streams:
            self._token = self._token + character if self._token or not character.isspace() else ""
        elif max(before, self._depth) > 1:
            self._tell(character)

    def _end_value(self) -> None:
        text = self._token.strip()
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            self.failed = not self.begun
            return
        if self._key == self._name_key and isinstance(value, str):
            self.name = value
        elif self._key == self._arguments_key:
            if isinstance(value, str):  # JSON in a string
                self._tell(value or "{}")
            elif value is not None:
                self.failed = True

    def _step_inside(self, character: str, outer: int) -> None:
        """Brackets and strings of a value."""
        if self._in_string or character == '"':
            self._string(character)
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.failed = self.failed or self._depth < outer

    def _string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._in_string and character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = not self._in_string
