"""Writes calls of earlier answers, for templates that leave them out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from billfish.llm.conversation.literals import CLOSING
from billfish.llm.conversation.syntax import CallSyntax


def written_calls(syntax: CallSyntax, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The text of calls, each a name and its arguments, as the model writes it itself."""
    written = [syntax.call.start + _written(syntax, name, arguments) + syntax.call.end for name, arguments in calls]
    inside = f"[{', '.join(written)}]" if syntax.listed else (syntax.separator or "").join(written)
    return syntax.section.start + inside + syntax.section.end


def _written(syntax: CallSyntax, name: str, arguments: Mapping[str, Any]) -> str:
    if syntax.name_key is not None:
        return json.dumps({syntax.name_key: name, syntax.arguments_key: arguments}, ensure_ascii=False)
    if syntax.style == "literal":
        given = ", ".join(f"{key}{syntax.key.end}{_literal(value)}" for key, value in arguments.items())
        return f"{name}{syntax.name_end}{given}{CLOSING[syntax.name_end.strip()]}"
    return name + syntax.name_end + json.dumps(arguments, ensure_ascii=False)


def _literal(value: Any) -> str:
    """As Python writes it, with double quotes."""
    if value is None or isinstance(value, bool):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
