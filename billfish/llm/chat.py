"""Chat templates: a list of messages to the text that a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from billfish.errors import ModelError, complaint
from billfish.extras import require

Message = Mapping[str, str]  # {"role": "user", "content": "..."}


class ChatTemplate:
    """A template as model files carry it. It is a program from a stranger, so it runs in jinja2's sandbox."""

    def __init__(self, source: str, **tokens: str) -> None:
        """tokens: what the template may want to write, such as bos_token="<s>"."""
        sandbox = require("jinja2.sandbox", "llm")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self._error = require("jinja2.exceptions", "llm").TemplateError
        self._tokens = tokens
        try:
            self._template = environment.from_string(source)
        except (self._error, TypeError) as error:  # TypeError: a field that is no string
            raise ModelError(
                complaint("llm.load", "tokenizer.chat_template", f"{error}", "a jinja2 template")
            ) from None

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, up to where the model's next answer begins."""
        try:
            text = self._template.render(messages=list(messages), add_generation_prompt=True, **self._tokens)
        except (self._error, TypeError, KeyError, AttributeError) as error:
            roles = [message.get("role") for message in messages]
            got = f"messages of {roles} ({error})"
            raise ModelError(complaint("llm.chat", "messages", got, "what the model's template accepts")) from None
        return str(text)


def _raise(message: str) -> None:
    raise require("jinja2.exceptions", "llm").TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own escapes characters of HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
