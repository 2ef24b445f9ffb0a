"""Functions: those that a client offers (`tools`, `tool_choice`), and the calls of them in the text of an answer.

The chat template decides how a call is written.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from billfish.core.errors import ModelError
from billfish.llm.chat_template import ChatTemplate
from billfish.llm.grammar import check_schema
from billfish.serving.api.request_bodies import Body, only, refuse, wrong

PROBE = {"type": "function", "function": {"name": "probe", "description": "probe", "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class Form:
    """How calls are written: as JSON objects of a name and arguments.

    opening, closing: marks around each call; without `closing` the whole answer is calls, or none. arguments: their
    name in the object. listed: the object is in a list.
    """

    opening: str
    closing: str
    arguments: str
    listed: bool = False

    def reader(self) -> MarkedCalls | WholeAnswer:
        """Tells calls from the text around them in one answer. A call that is broken stays text."""
        return MarkedCalls(self) if self.closing else WholeAnswer(self)


HERMES = Form("<tool_call>", "</tool_call>", "arguments")  # Qwen's too
MISTRAL = Form("[TOOL_CALLS]", "", "arguments", listed=True)
LLAMA = Form("", "", "parameters")


def form_of(template: ChatTemplate) -> Form | None:
    """How a template writes calls; None if it does not tell the model what may be called, or has another form."""
    user = {"role": "user", "content": "probe"}
    call = {"id": "123456789", "type": "function", "function": {"name": "probe", "arguments": {"a": 1}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "1", "tool_call_id": "123456789", "name": "probe"}
    try:
        if template.render([user], tools=[PROBE]) == template.render([user]):
            return None
        written = template.render([user, called, result], tools=[PROBE])
    except ModelError:
        return None
    forms = (form for form in (HERMES, MISTRAL, LLAMA) if form.opening in written)
    return next((form for form in forms if f'"{form.arguments}": {{"a": 1}}' in written), None)


@dataclass(frozen=True)
class Call:
    """A function with its arguments, which are JSON. Mistral's templates want an id of nine letters and digits."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: secrets.token_hex(5)[:9])

    def record(self) -> dict[str, Any]:
        """As OpenAI has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class MarkedCalls:
    """Calls between marks. The white space around them is no text."""

    def __init__(self, form: Form) -> None:
        self._form, self._held = form, ""
        self._call = re.compile(f"{re.escape(form.opening)}(.*?){re.escape(form.closing)}\\s*", re.DOTALL)

    def read(self, text: str) -> Iterator[str | Call]:
        """What can be told after this piece of the answer."""
        self._held += text
        while found := self._call.search(self._held):
            before, self._held = self._held[: found.start()].rstrip(), self._held[found.end() :]
            if before:
                yield before
            yield from calls_in(found[1], self._form, found[0])
        before = self._held[: self._may_begin()].rstrip()
        self._held = self._held[len(before) :]
        if before:
            yield before

    def finish(self) -> Iterator[str | Call]:
        """The rest, when the answer is over."""
        held = self._held.strip()
        if held.startswith(self._form.opening):  # some models leave the closing mark out
            yield from calls_in(held.removeprefix(self._form.opening), self._form, self._held)
        elif held:
            yield self._held

    def _may_begin(self) -> int:
        """The character from which on the text may be a call."""
        held, mark = self._held, self._form.opening
        if mark in held:
            return held.index(mark)
        return next((len(held) - n for n in range(len(mark) - 1, 0, -1) if held.endswith(mark[:n])), len(held))


class WholeAnswer:
    """An answer that is JSON from its first character to its last is calls. The mark before it may be missing: it is a
    control token in some vocabularies."""

    def __init__(self, form: Form) -> None:
        self._form, self._held, self._is_text = form, "", False

    def read(self, text: str) -> Iterator[str | Call]:
        self._held += text
        start, mark = self._held.lstrip(), self._form.opening or "{"
        self._is_text = self._is_text or not (start[:1] in ("", "{", "[") or mark.startswith(start[: len(mark)]))
        if self._is_text:
            yield self._held
            self._held = ""

    def finish(self) -> Iterator[str | Call]:
        if self._held:
            yield from calls_in(self._held.strip().removeprefix(self._form.opening), self._form, self._held)


def calls_in(text: str, form: Form, otherwise: str) -> list[str | Call]:
    """The calls of a JSON text, or `otherwise` if it is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return [otherwise]
    calls: list[str | Call] = []
    for item in value if isinstance(value, list) else [value]:
        arguments = item.get(form.arguments) if isinstance(item, Mapping) else None
        if not isinstance(arguments, Mapping) or not isinstance(item.get("name"), str):
            return [otherwise]
        calls.append(Call(item["name"], json.dumps(arguments, ensure_ascii=False)))
    return calls or [otherwise]


# ---- what a client offers -------------------------------------------------------------------------------------------

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # of schemas: keys are names
VALUES = ("const", "enum", "default", "examples")  # hold JSON, not schemas


class Function(Body):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True)
class Tools:
    """What a client offers. callable: the functions that an answer may call. forced: it must be a call of one."""

    definitions: list[dict[str, Any]]
    callable: list[Function]
    forced: bool

    def schema(self, form: Form) -> dict[str, Any]:
        """Of an answer that must be one call."""
        place = "#/items" if form.listed else "#"
        many = len(self.callable) > 1
        calls = [
            _call_schema(function, form, f"{place}/anyOf/{index}" if many else place)
            for index, function in enumerate(self.callable)
        ]
        call = {"anyOf": calls} if many else calls[0]
        return {"type": "array", "items": call, "minItems": 1, "maxItems": 1} if form.listed else call


def read_tools(offered: list[Tool], choice: ToolChoice | None) -> Tools | None:
    """What the fields `tools` and `tool_choice` say; None where no function may be called."""
    functions = {tool.function.name: tool.function for tool in offered}
    if len(functions) < len(offered):
        raise refuse("tools", "Two tools have the same name. Give each function its own name.")
    for index, tool in enumerate(offered):
        only(f"tools[{index}].function.strict", tool.function.strict, False)
    if choice == "none":
        return None
    if not offered:
        if choice is not None:
            raise refuse("tool_choice", "tool_choice needs tools.")
        return None
    definitions = [msgspec.to_builtins(tool) for tool in offered]
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in functions:
            raise wrong("tool_choice.function.name", json.dumps(name), f"one of {', '.join(functions)}")
        return Tools(definitions, [functions[name]], forced=True)
    return Tools(definitions, list(functions.values()), forced=choice == "required")


def _call_schema(function: Function, form: Form, place: str) -> dict[str, Any]:
    parameters = NO_PARAMETERS if function.parameters is None else function.parameters
    check_schema(parameters)
    moved = _moved(parameters, f"{place}/properties/{form.arguments}")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, form.arguments: moved},
        "required": ["name", form.arguments],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str, are_names: bool = False) -> Any:
    """A schema that is found at `place` of another one: its references to itself lead there."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if not are_names and key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        elif not are_names and key in VALUES:
            moved[key] = value
        else:
            moved[key] = _moved(value, place, not are_names and key in NAMES)
    return moved
