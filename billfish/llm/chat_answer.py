"""An answer to a conversation from Python: text, thoughts and calls apart, in OpenAI's words."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, cast

from billfish.core.errors import DataError, bad_argument
from billfish.llm.chat_template import Message
from billfish.llm.conversation.answer_grammar import Function, Mode
from billfish.llm.conversation.chat import EFFORTS, Conversation, ToolChoice, Turn, call_of
from billfish.llm.conversation.choice import Choice, deltas_of, message_of
from billfish.llm.conversation.events import Call
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
    thought_budget: int | None,
    variables: Mapping[str, Any] | None,
) -> Conversation:
    """A conversation in OpenAI's words. Raises DataError for anything else."""
    a_message = "dict with role and content"
    for index, message in enumerate(_list("messages", messages, f"a list of at least one {a_message}", least=1)):
        _check(f"messages[{index}]", message, Mapping, f"a {a_message}")
    _list("tools", tools, "a list of functions; [] for none")
    _check("chat_template_kwargs", variables, (Mapping, NoneType), "a dict of variables, or None")
    if effort is not None and effort not in EFFORT_NAMES:
        raise DataError(bad_argument(CALL, "reasoning_effort", repr(effort), ", ".join(EFFORT_NAMES)))
    _check("reasoning_budget", thought_budget, (int, NoneType), "a number of tokens, or None")
    return Conversation(
        [_turn(f"messages[{index}]", message) for index, message in enumerate(messages)],
        functions=[_function(f"tools[{index}]", tool) for index, tool in enumerate(tools)],
        choice=_choice(tool_choice),
        parallel=parallel,
        schema=_schema(response_format),
        effort=effort,
        thought_budget=thought_budget,
        variables=dict(variables or {}),
    )


def _turn(place: str, message: Message) -> Turn:
    role = message.get("role")
    if role not in ROLES:
        raise DataError(bad_argument(CALL, f"{place}.role", repr(role), ", ".join(ROLES)))
    for name in ("name", "reasoning_content", "reasoning", *(["tool_call_id"] if role == "tool" else ())):
        _check(f"{place}.{name}", message.get(name), (str, NoneType), "a string")
    text, thought = _said(f"{place}.content", message.get("content"), role == "assistant")
    given = _list(f"{place}.tool_calls", message.get("tool_calls") or (), "a list of calls")
    calls = [_call(f"{place}.tool_calls[{index}]", call) for index, call in enumerate(given)]
    thought = message.get("reasoning_content") or message.get("reasoning") or thought
    result_of = message.get("tool_call_id") or "call00000" if role == "tool" else None
    return Turn("system" if role == "developer" else role, text, thought, tuple(calls), result_of, message.get("name"))


def _said(place: str, content: object, by_assistant: bool) -> tuple[str, str]:
    """Text and thought of a content. An assistant that calls functions need say nothing."""
    if isinstance(content, str) or (content is None and by_assistant):
        return content or "", ""
    said = {"text": "", "refusal": "", "thinking": ""}
    expected = "{'type': 'text', 'text': ...}"
    for index, part in enumerate(_list(place, content, f"a string, or a list of parts {expected}")):
        kind = part.get("type") if isinstance(part, Mapping) else None
        known = isinstance(kind, str) and kind in said and (by_assistant or kind != "thinking")
        if not known or not isinstance(part.get(kind), str):
            problem = bad_argument(CALL, f"{place}[{index}]", repr(part), f"a part {expected}; no images or audio")
            raise DataError(problem)
        said["thinking" if kind == "thinking" else "text"] += part[kind]
    return said["text"], said["thinking"]


def _call(place: str, call: object) -> Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        expected = "{'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': JSON}}"
        raise DataError(bad_argument(CALL, place, repr(call), expected))
    _check(f"{place}.id", call.get("id"), (str, NoneType), "a string")
    return call_of(f"{place}.function.arguments", call.get("id"), function["name"], function.get("arguments", "{}"))


def _function(place: str, tool: Mapping[str, Any]) -> Function:
    described = tool.get("function") if isinstance(tool, Mapping) else None
    if (
        not isinstance(described, Mapping)
        or not isinstance(described.get("name"), str)
        or not isinstance(described.get("description"), (str, NoneType))
        or not isinstance(described.get("parameters"), (Mapping, NoneType))
    ):
        expected = "{'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': JSON schema}}"
        raise DataError(bad_argument(CALL, place, repr(tool), expected))
    strict = bool(described.get("strict", False))
    return Function(described["name"], described.get("parameters"), described.get("description"), strict)


def _list(place: str, given: Any, expected: str, least: int = 0) -> Sequence[Any]:
    """A list or another sequence that is no text, of at least so many. Raises DataError for anything else."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or len(given) < least:
        raise DataError(bad_argument(CALL, place, repr(given), expected))
    return given


def _check(place: str, given: object, kinds: type | tuple[type, ...], expected: str) -> None:
    if not isinstance(given, kinds):
        raise DataError(bad_argument(CALL, place, repr(given), expected))


def _choice(given: str | Mapping[str, Any]) -> ToolChoice:
    if given in ("auto", "none", "required"):
        return ToolChoice(cast(Mode, given))
    if isinstance(given, Mapping) and given.get("type") == "allowed_tools":
        allowed = given.get("allowed_tools")
        tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if isinstance(tools, (list, tuple)) and all(map(_name_in, tools)):
            mode = allowed.get("mode", "auto")  # type: ignore[union-attr]
            if mode in ("auto", "required"):
                return ToolChoice(cast(Mode, mode), allowed=tuple(map(_name_in, tools)))
    elif name := _name_in(given):
        return ToolChoice("required", name)
    expected = (
        "'auto', 'none', 'required', {'type': 'function', 'function': {'name': ...}} or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto' or 'required', 'tools': [...]}}"
    )
    raise DataError(bad_argument(CALL, "tool_choice", repr(given), expected))


def _name_in(tool: object) -> str:
    """The name of the function that is pointed to, or ""."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _schema(given: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], str] | None:
    from billfish.llm.grammar import read_response_format  # few programs need it

    if given is None or read_response_format(CALL, given) is None:
        return None
    if given["type"] == "json_object":
        return {"type": "object"}, "response_format"
    return given["json_schema"]["schema"], "response_format.json_schema.schema"
