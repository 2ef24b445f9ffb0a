"""What an answer is made of, as it comes: text, thoughts, and calls of functions in pieces."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Text:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True)
class Thought:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call of a function begins. index: its number in the answer. Mistral's templates want an id of nine letters and
    digits."""

    index: int
    name: str
    id: str = field(default_factory=lambda: secrets.token_hex(5)[:9])


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments, which are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is complete."""

    index: int


Event = Text | Thought | CallBegin | CallArguments | CallEnd


@dataclass
class Call:
    """A call as it grows."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class AnswerMessage:
    """An answer as it grows: all events together."""

    text: str = ""
    thought: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Go on with the answer."""
        if isinstance(event, Text):
            self.text += event.text
        elif isinstance(event, Thought):
            self.thought += event.text
        elif isinstance(event, CallBegin):
            self.calls.append(Call(event.id, event.name))
        elif isinstance(event, CallArguments):
            self.calls[event.index].arguments += event.text
