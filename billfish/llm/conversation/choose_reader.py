"""The reader of an answer: by the template's syntax, and by how the prompt ends."""

from __future__ import annotations

from billfish.llm.conversation.harmony import HarmonyReader
from billfish.llm.conversation.marks import Functions
from billfish.llm.conversation.reader import AnswerReader, PlainReader, Reader
from billfish.llm.conversation.syntax import ChatSyntax


def opens_thought(syntax: ChatSyntax, prompt: str) -> bool:
    """Whether a prompt ends inside of a thought."""
    start = "" if syntax.thought is None else syntax.thought.marks.start.strip()
    return bool(start) and prompt.rstrip().endswith(start)


def has_thought(syntax: ChatSyntax, prompt: str) -> bool:
    """Whether a prompt ends behind a thought, which is empty where thinking is off."""
    end = "" if syntax.thought is None else syntax.thought.marks.end.strip()
    return bool(end) and prompt.rstrip().endswith(end)


def reader_of(syntax: ChatSyntax, prompt: str, functions: Functions | None = None, *, parallel: bool = True) -> Reader:
    """Makes the reader of one answer to a prompt."""
    if syntax.harmony:
        return HarmonyReader(functions, prompt, parallel=parallel)
    if syntax.thought is None and not functions:
        return PlainReader()
    return AnswerReader(syntax, functions, thinking=opens_thought(syntax, prompt), parallel=parallel)
