"""The messages of a chat, as clients write them, become those that chat templates read."""

from __future__ import annotations

import json
from typing import Any

from billfish.serving.fields import Fields
from billfish.serving.refusals import Described

# OpenAI's newer word for the system's messages is one that templates do not know.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """What the template gets. Arguments of calls become objects, as templates write JSON themselves."""
    items = fields.needed("messages", fields.items("messages", 1), "a list of at least 1")
    return [_read_message(Fields(fields.call, f"messages[{index}]", item)) for index, item in enumerate(items)]


def uses_tools(messages: list[dict[str, Any]]) -> bool:
    """Whether a message is a call or its result."""
    return any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def _read_message(fields: Fields) -> dict[str, Any]:
    role = fields.needed("role", fields.word("role", list(ROLES)), ", ".join(ROLES))
    message: dict[str, Any] = {"role": ROLES[role], "content": _read_content(fields)}
    if role == "assistant":
        calls = fields.items("tool_calls")
        if calls:
            message["tool_calls"] = [
                _read_call(Fields(fields.call, f"{fields.path}.tool_calls[{index}]", call))
                for index, call in enumerate(calls)
            ]
    if role == "tool":
        message["tool_call_id"] = fields.needed("tool_call_id", fields.text("tool_call_id"), "a text")
        name = fields.text("name")
        message |= {} if name is None else {"name": name}
    if message["content"] is None:
        if "tool_calls" not in message:
            raise fields.wrong("content", Described("nothing"), "a text, or a list of parts of type text")
        message["content"] = ""
    fields.done()
    return message


def _read_content(fields: Fields) -> str | None:
    """A text, or the parts of one."""
    value = fields.take("content")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fields.wrong("content", value, "a text, or a list of parts of type text")
    texts = []
    for index, item in enumerate(value):
        part = Fields(fields.call, f"{fields.at('content')}[{index}]", item)
        part.needed("type", part.word("type", ["text"]), "text")
        texts.append(part.needed("text", part.text("text"), "a text"))
        part.done()
    return "".join(texts)


def _read_call(fields: Fields) -> dict[str, Any]:
    fields.needed("type", fields.word("type", ["function"]), "function")
    function: Fields = fields.needed("function", fields.inner("function"), "an object with a name and arguments")
    name = function.needed("name", function.text("name"), "a text")
    written = function.needed("arguments", function.text("arguments"), "a JSON object, as a text")
    try:
        arguments = json.loads(written or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise function.wrong("arguments", written, "a JSON object, as a text")
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    identifier = fields.text("id")
    function.done()
    fields.done()
    return call if identifier is None else {"id": identifier, **call}
