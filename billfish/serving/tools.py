"""Functions that a client offers, and those of them that an answer must call: `tools` and `tool_choice`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from billfish.serving.calls import Form
from billfish.serving.fields import Fields
from billfish.serving.refusals import Described

NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class Tools:
    """What a client offers. choice: "auto", "required", or the name of the one function to call."""

    definitions: list[dict[str, Any]]
    choice: str

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice != "auto"

    def schema(self, form: Form) -> dict[str, Any]:
        """Of an answer that must be one call."""
        functions = [each["function"] for each in self.definitions]
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": each["name"]}, form.arguments: each.get("parameters", NO_PARAMETERS)},
                "required": ["name", form.arguments],
                "additionalProperties": False,
            }
            for each in functions
            if self.choice in ("required", each["name"])
        ]
        call = calls[0] if len(calls) == 1 else {"anyOf": calls}
        return {"type": "array", "items": call, "minItems": 1, "maxItems": 1} if form.listed else call


def read_tools(fields: Fields) -> Tools | None:
    """What the fields say; None where no function may be called."""
    items = fields.items("tools", 1)
    names = [] if items is None else [_check_tool(fields, index, item) for index, item in enumerate(items)]
    if len(set(names)) < len(names):
        raise fields.wrong("tools", Described("a name twice"), "another name for each function")
    choice = _read_choice(fields, names)
    fields.only("parallel_tool_calls", True)
    return None if items is None or choice == "none" else Tools(items, choice)


def _check_tool(fields: Fields, index: int, item: object) -> str:
    """The function's name."""
    tool = Fields(fields.call, f"tools[{index}]", item)
    function = _function(tool)
    name: str = function.needed("name", function.text("name"), "a text")
    if not NAME.fullmatch(name):
        raise function.wrong("name", name, "1 to 64 letters, digits, _, - and .")
    function.text("description")
    function.only("strict", False)
    parameters = function.take("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise function.wrong("parameters", parameters, "a JSON schema")
    function.done()
    tool.done()
    return name


def _read_choice(fields: Fields, names: Sequence[str]) -> str:
    value = fields.take("tool_choice")
    if value is None:
        return "auto"
    if not names and value != "none":
        raise fields.wrong("tool_choice", value, "none, or tools beside it")
    if isinstance(value, str) and value in CHOICES:
        return value
    if not isinstance(value, dict):
        named = '{"type": "function", "function": {"name": "NAME"}}'
        raise fields.wrong("tool_choice", value, f"{', '.join(CHOICES)}, or {named}")
    chosen = Fields(fields.call, "tool_choice", value)
    function = _function(chosen)
    name: str = function.needed("name", function.word("name", names), ", ".join(names))
    function.done()
    chosen.done()
    return name


def _function(fields: Fields) -> Fields:
    """The object beside "type": "function"."""
    fields.needed("type", fields.word("type", ["function"]), "function")
    function: Fields = fields.needed("function", fields.inner("function"), "an object with a name")
    return function
