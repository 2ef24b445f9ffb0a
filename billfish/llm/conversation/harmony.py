"""gpt-oss's harmony format: an answer is a row of messages, each in a channel, between control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator

from billfish.llm.conversation.events import CallArguments, CallBegin, CallEnd, Event, Text, Thought
from billfish.llm.conversation.marks import Functions, may_begin
from billfish.llm.conversation.syntax import HARMONY

START, MESSAGE, CHANNEL, CONSTRAIN, END = HARMONY
ENDS = (END, "<|call|>", "<|return|>", START)


class HarmonyReader:
    """Thoughts are in the channel analysis, text in final, calls in commentary to a function."""

    def __init__(self, functions: Functions | None, prompt: str, *, parallel: bool = True) -> None:
        self._functions, self._parallel = functions or {}, parallel
        self._held = prompt.rpartition(f"{START}assistant")[2]  # a message that the prompt has opened
        self._kind: str | None = None  # of the message that is being read
        self._count = 0
        self.done = False

    def read(self, text: str) -> Iterator[Event]:
        self._held += text
        while not self.done:
            before = (self._kind, len(self._held))
            yield from self._header() if self._kind is None else self._body()
            if (self._kind, len(self._held)) == before:
                return

    def finish(self) -> Iterator[Event]:
        if self._kind is not None:
            yield from self._told(self._held)
            yield from self._end()
        self._held = ""

    def _header(self) -> Iterator[Event]:
        header, found, rest = self._held.partition(MESSAGE)
        if not found:
            return
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        recipient = re.search(r"to=(?:functions\.)?([\w.-]+)", header)
        self._held = rest
        if recipient is not None and recipient[1] != "assistant" and self._functions:
            self._kind = "call"
            yield CallBegin(self._count, recipient[1])
        else:
            self._kind = "thought" if channel is not None and channel[1] == "analysis" else "text"

    def _body(self) -> Iterator[Event]:
        at = min(may_begin(mark, self._held) for mark in ENDS)
        yield from self._told(self._held[:at])
        self._held = self._held[at:]
        for mark in ENDS:
            if self._held.startswith(mark):
                self._held = self._held[len(mark) :] if mark != START else self._held
                yield from self._end()
                return

    def _told(self, text: str) -> Iterator[Event]:
        if text:
            yield (
                CallArguments(self._count, text)
                if self._kind == "call"
                else Thought(text)
                if self._kind == "thought"
                else Text(text)
            )

    def _end(self) -> Iterator[Event]:
        if self._kind == "call":
            yield CallEnd(self._count)
            self._count += 1
            self.done = not self._parallel
        self._kind = None
