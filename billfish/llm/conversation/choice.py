"""One answer to a conversation as it grows, and how OpenAI's API writes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from billfish.llm.conversation.events import AnswerMessage, CallArguments, CallBegin, Event, Text, Thought
from billfish.llm.conversation.reader import PlainReader, Reader
from billfish.llm.detokenizer import Piece, Token


@dataclass
class Choice:
    """One answer as it grows. reader: tells text from thoughts and calls. finish_reason: at its end, as OpenAI has it:
    "stop", "length" or "tool_calls". stop: the stop string that ended it, if one did."""

    reader: Reader = field(default_factory=PlainReader)
    message: AnswerMessage = field(default_factory=AnswerMessage)
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str = ""

    def take(self, piece: Piece) -> list[Event]:
        """Go on with the answer. Returns what is new."""
        events = list(self.reader.read(piece.text))
        if piece.finished:
            events += self.reader.finish()
        for event in events:
            self.message.add(event)
        self.tokens += piece.tokens
        self.stop = piece.stop
        if self.reader.done:
            self.finish_reason = "tool_calls"
        elif piece.finished:
            self.finish_reason = "tool_calls" if self.message.calls and piece.finished == "stop" else piece.finished
        return events


def message_of(said: AnswerMessage) -> dict[str, Any]:
    """A whole message. Thoughts have two names: older clients read the one, newer ones the other."""
    made: dict[str, Any] = {"role": "assistant", "content": said.text if said.text or not said.calls else None}
    if said.thought:
        made |= {"reasoning_content": said.thought, "reasoning": said.thought}
    if said.calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said.calls
        ]
    return made


def deltas_of(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """What a stream says of events."""
    for each in events:
        if isinstance(each, Text):
            yield {"content": each.text}
        elif isinstance(each, Thought):
            yield {"reasoning_content": each.text, "reasoning": each.text}
        elif isinstance(each, CallBegin):
            function = {"name": each.name, "arguments": ""}
            yield {"tool_calls": [{"index": each.index, "id": each.id, "type": "function", "function": function}]}
        elif isinstance(each, CallArguments):
            yield {"tool_calls": [{"index": each.index, "function": {"arguments": each.text}}]}
