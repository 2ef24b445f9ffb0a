"""An answer to a conversation from Python: text, thoughts and calls apart, in OpenAI's words."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from billfish.core.errors import DataError, bad_argument
from billfish.llm.chat_template import Message
from billfish.llm.conversation.answer_grammar import Function, Mode
from billfish.llm.conversation.chat import EFFORTS, Conversation, ToolChoice, Turn, call_of
from billfish.llm.conversation.choice import Choice, deltas_of, message_of
from billfish.llm.conversation.reader import Reader
from billfish.llm.detokenizer import Piece
from billfish.llm.generation import Generation, in_thread

CALL = "llm.chat"
ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORT_NAMES = ("low", "medium", "high", *EFFORTS)


class ChatAnswer(Iterator[dict[str, Any]]):
    """The answer to a conversation: complete from :meth:`Model.chat`, growing while it is read from
    :meth:`Model.chat_stream`. Iterating gives OpenAI's deltas, in order and once; `async for` does so beside an event
    loop.

    generation: the :class:`Generation` below, with tokens, logprobs and rates; its text has the marks of thoughts and
    calls. reader: tells these apart.

        >>> answer = bf.llm.load("model.gguf").chat([{"role": "user", "content": "ab"}], max_tokens=3)
        >>> len(answer.generation.tokens), answer.reasoning_content, answer.content == answer.message["content"]
        (3, '', True)
    """

    def __init__(self, generation: Generation, reader: Reader) -> None:
        self.generation = generation
        self._choice = Choice(reader)
        self._deltas = deque[dict[str, Any]]()

    @property
    def content(self) -> str:
        """The text so far, without thoughts and calls."""
        return self._choice.message.text

    @property
    def reasoning_content(self) -> str:
        """What the model thought so far."""
        return self._choice.message.thought

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls so far: {"id", "type": "function", "function": {"name", "arguments": JSON}}."""
        found: list[dict[str, Any]] = self.message.get("tool_calls", [])
        return found

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message so far, for the next conversation."""
        return message_of(self._choice.message)

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length" or "tool_calls", as OpenAI has it; None while the answer runs."""
        return self._choice.finish_reason

    def finish(self) -> ChatAnswer:
        """Decode up to the end of the answer, and return the same object. Iterating still gives all unread deltas."""
        while self.finish_reason is None:
            self._step()
        return self

    async def finish_async(self) -> ChatAnswer:
        """As :meth:`finish`, beside an event loop."""
        while self.finish_reason is None:
            await in_thread(self._step)
        return self

    def __next__(self) -> dict[str, Any]:
        while not self._deltas:
            if self.finish_reason is not None:
                raise StopIteration
            self._step()
        return self._deltas.popleft()

    def __aiter__(self) -> ChatAnswer:
        return self

    async def __anext__(self) -> dict[str, Any]:
        delta: dict[str, Any] | None = await in_thread(next, self, None)
        if delta is None:
            raise StopAsyncIteration
        return delta

    def _step(self) -> None:
        text = next(self.generation, None)
        piece = Piece(text) if text is not None else Piece("", (), self.generation.finish_reason or "")
        self._deltas += deltas_of(self._choice.take(piece))

    def __str__(self) -> str:
        return self.content

    def __repr__(self) -> str:
        return f"ChatAnswer({self.message!r}, finish_reason={self.finish_reason!r})"


def conversation_of(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any],
    parallel: bool,
    response_format: Mapping[str, Any] | None,
    effort: str | None,
    variables: Mapping[str, Any] | None,
) -> Conversation:
    """A conversation in OpenAI's words. Raises DataError for anything else."""
    if isinstance(messages, (str, Mapping)) or not all(isinstance(message, Mapping) for message in messages):
        raise DataError(bad_argument(CALL, "messages", repr(messages), "a list of dicts with role and content"))
    if effort is not None and effort not in EFFORT_NAMES:
        raise DataError(bad_argument(CALL, "reasoning_effort", repr(effort), ", ".join(EFFORT_NAMES)))
    return Conversation(
        [_turn(f"messages[{index}]", message) for index, message in enumerate(messages)],
        functions=[_function(f"tools[{index}]", tool) for index, tool in enumerate(tools)],
        choice=_choice(tool_choice),
        parallel=parallel,
        schema=_schema(response_format),
        effort=effort,
        variables=dict(variables or {}),
    )


def _turn(place: str, message: Message) -> Turn:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise DataError(bad_argument(CALL, f"{place}.role", repr(role), ", ".join(ROLES)))
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(str(part.get("text", "")) for part in content)
    calls = [
        call_of(f"{place}.tool_calls", call.get("id"), call["function"]["name"], call["function"].get("arguments"))
        for call in message.get("tool_calls") or ()
    ]
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    result_of = str(message.get("tool_call_id", "call00000")) if role == "tool" else None
    name = message.get("name")
    return Turn("system" if role == "developer" else str(role), content or "", thought, tuple(calls), result_of, name)


def _function(place: str, tool: Mapping[str, Any]) -> Function:
    described = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(described, Mapping) or not isinstance(described.get("name"), str):
        expected = "{'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': JSON schema}}"
        raise DataError(bad_argument(CALL, place, repr(tool), expected))
    strict = bool(described.get("strict", False))
    return Function(described["name"], described.get("parameters"), described.get("description"), strict)


def _choice(given: str | Mapping[str, Any]) -> ToolChoice:
    if given in ("auto", "none", "required"):
        return ToolChoice(cast(Mode, given))
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        expected = "'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}"
        raise DataError(bad_argument(CALL, "tool_choice", repr(given), expected))
    return ToolChoice("required", function["name"])


def _schema(given: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], str] | None:
    from billfish.llm.grammar import read_response_format  # few programs need it

    if given is None or read_response_format(CALL, given) is None:
        return None
    if given["type"] == "json_object":
        return {"type": "object"}, "response_format"
    return given["json_schema"]["schema"], "response_format.json_schema.schema"
