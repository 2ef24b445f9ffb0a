"""Grammars of answers that must be calls, or JSON, behind the model's thoughts: in llguidance's variant of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from billfish.llm.closed_schema import closed
from billfish.llm.conversation.harmony import CHANNEL, CONSTRAIN, MESSAGE, START
from billfish.llm.conversation.literals import CLOSING
from billfish.llm.conversation.syntax import ChatSyntax
from billfish.llm.grammar import LARK, Grammar, check_schema

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
WHITE_SPACE = r"[ \t\n]{0,16}"  # bounded: small models would otherwise write it for ever
Mode = Literal["auto", "required", "none"]


@dataclass(frozen=True)
class Function:
    """What a model may call. parameters: their JSON schema. strict: arguments must satisfy it."""

    name: str
    parameters: Mapping[str, Any] | None = None
    description: str | None = None
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """Of the arguments."""
        return dict(NO_PARAMETERS) if not self.parameters else {"type": "object", **self.parameters}


@dataclass(frozen=True)
class Wanted:
    """What an answer must be. calls: of these functions. mode: whether it must be a call ("required"), or may be.
    schema: of the answer that is no call; None for text. held: whether the model is told of further functions, which it
    must not call."""

    functions: Sequence[Function] = ()
    mode: Mode = "none"
    parallel: bool = True
    schema: Mapping[str, Any] | None = None
    held: bool = False

    @property
    def is_free(self) -> bool:
        """Whether any text will do."""
        strict = self.held or any(function.strict for function in self.functions)
        return self.schema is None and (self.mode == "none" or (self.mode == "auto" and not strict))


def answer_grammar(
    syntax: ChatSyntax, wanted: Wanted, tokens: Mapping[str, int], *, thinking: bool, has_thought: bool = False
) -> Grammar | None:
    """The grammar of an answer; None if it is free. Raises DataError for a schema that exceeds the limits.

    tokens: control tokens by their names. thinking: whether the prompt has opened a thought. has_thought: whether it
    has a whole one, so that none comes.
    """
    if wanted.is_free:
        return None
    for schema in [*(function.schema for function in wanted.functions), *([wanted.schema] if wanted.schema else ())]:
        check_schema(schema)
    functions = [replace(function, parameters=closed(function.schema)) for function in wanted.functions]
    wanted = replace(wanted, functions=functions, schema=closed(wanted.schema))
    return Grammar(_Writer(syntax, wanted, tokens).whole(thinking, has_thought))


class _Writer:
    """Rules, as they are made."""

    def __init__(self, syntax: ChatSyntax, wanted: Wanted, tokens: Mapping[str, int]) -> None:
        self._syntax, self._wanted = syntax, wanted
        self._tokens = {name: token for name, token in tokens.items() if name}
        self._rules = [LARK, "TEXT: /(.|\\n)*/"]

    def whole(self, thinking: bool, has_thought: bool) -> str:
        thought = "" if has_thought else self._thought(thinking)
        body = self._harmony() if self._syntax.harmony else thought + self._body()
        self._rules.insert(1, f"start: {body}")
        return "\n".join(self._rules)

    # ---- parts ------------------------------------------------------------------------------------------------

    def _thought(self, thinking: bool) -> str:
        """A thought, which may be left out unless the prompt has opened it."""
        if self._syntax.thought is None or not self._syntax.thought.marks:
            return ""
        marks = self._syntax.thought.marks
        rest = f"{self._text_until(marks.end.rstrip())} /[ \\n]*/ "
        return rest if thinking else f"({self._literal(marks.start)} {rest})? "

    def _body(self) -> str:
        wanted = self._wanted
        if wanted.mode == "none":
            return self._json(wanted.schema)
        if wanted.mode == "required":
            return self._calls()
        if wanted.schema is not None:
            return f"({self._calls()} | {self._json(wanted.schema)})"
        return self._text_and_calls()

    def _text_and_calls(self) -> str:
        """Any text, in which whatever begins like a call is one."""
        trigger = self._syntax.calls.trigger.partition("\n")[0].partition(" ")[0]
        if not trigger:
            self._rules.append("OTHER: /[^{\\[\\s](.|\\n)*/")
            return f"({self._calls()} | OTHER)"
        if self._starts_with_token(trigger):
            return f"TEXT ({self._calls()})?"
        self._rules.append(f"trigger[lazy]: TEXT {self._literal(trigger)}")
        return f"(TEXT | trigger {self._calls(behind=trigger)})"

    def _calls(self, behind: str = "") -> str:
        """Calls with all marks around them. behind: the part of the first mark that was there already."""
        syntax = self._syntax.calls
        names = [f"call_{index}" for index in range(len(self._wanted.functions))]
        for name, function in zip(names, self._wanted.functions, strict=True):
            self._rules.append(f"{name}: {self._call(function)}")
        one = f"({' | '.join(names)})"
        one = several = f"{one} {self._literal(syntax.call.end)}"
        if self._wanted.parallel and syntax.separator is not None:
            separator = self._literal(", " if syntax.listed else syntax.separator)
            several = f"{one} ({separator} {self._literal(syntax.call.start)} {one})*"
        opening, closing = syntax.section.start, syntax.section.end.rstrip()
        if not opening.strip():
            closing = ""  # what comes behind is no part of the answer
        if syntax.listed:
            opening, closing = opening + "[", "]" + closing
        opening = (opening + syntax.call.start).lstrip().removeprefix(behind)
        return f"{self._literal(opening)} {several} {self._literal(closing)}"

    def _call(self, function: Function) -> str:
        """A call between its marks."""
        syntax = self._syntax.calls
        if syntax.name_key is not None:
            head = f"{{{json.dumps(syntax.name_key)}: {json.dumps(function.name)}, {json.dumps(syntax.arguments_key)}: "
            return f"{self._literal(head)} {self._json(function.schema, lenient=True)} {self._literal('}')}"
        name = self._literal(function.name + syntax.name_end.replace("[CALL_ID]", ""))
        if syntax.style == "json":
            return f"{name} {self._json(function.schema, lenient=True)}"
        return f"{name} {self._arguments(function)}"

    def _arguments(self, function: Function) -> str:
        """Arguments one by one, in the order of the schema."""
        syntax, schema = self._syntax.calls, function.schema
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        definitions = _definitions(schema)
        written = list[tuple[str, bool]]()
        for key, each in properties.items():
            given = dict(each) if isinstance(each, Mapping) else {}
            value = self._value({**given, **definitions})
            written.append((f"{self._literal(syntax.key.start + key + syntax.key.end)} {value}", key in required))
        if syntax.style == "tagged":
            return " ".join(text if needed else f"({text})?" for text, needed in written)
        closing = self._literal(CLOSING[syntax.name_end.strip()])
        comma = self._literal(", " if syntax.name_end.strip() == "(" else ",")
        needed = [text for text, is_needed in written if is_needed]
        others = [text for text, is_needed in written if not is_needed]
        if not needed:  # any one of them may come first
            first = [f"{each} {' '.join(f'({comma} {x})?' for x in others[i + 1 :])}" for i, each in enumerate(others)]
            return f"({' | '.join(first)})? {closing}" if first else closing
        return f"{f' {comma} '.join(needed)} {' '.join(f'({comma} {text})?' for text in others)} {closing}"

    def _value(self, schema: Mapping[str, Any]) -> str:
        """A value, with what comes behind it where values are between marks."""
        syntax = self._syntax.calls
        kind = schema.get("type")
        texts = [each for each in schema.get("enum") or () if isinstance(each, str)]
        if syntax.style == "tagged":
            if texts:
                return f"({' | '.join(map(self._literal, texts))}) {self._literal(syntax.value_end)}"
            if kind == "string":
                return self._text_until(syntax.value_end)
            return f"{self._json(schema, lenient=True)} {self._literal(syntax.value_end)}"
        quote = self._literal(syntax.quote)
        if len(syntax.quote) > 1 and texts:
            return f"{quote} ({' | '.join(map(self._literal, texts))}) {quote}"
        if len(syntax.quote) > 1 and kind == "string":
            return f"{quote} {self._text_until(syntax.quote)}"
        if len(syntax.quote) > 1 and kind == "array" and isinstance(schema.get("items"), Mapping):
            item = self._value({**schema["items"], **_definitions(schema)})
            return f'"[" ({item} ("," {item})*)? "]"'
        return self._json(schema, lenient=True)

    def _harmony(self) -> str:
        """A message of analysis, then one that is a call or the answer."""
        think = f"analysis{MESSAGE}"
        thought = f"({self._literal(CHANNEL + think)} TEXT {self._literal('<|end|>' + START + 'assistant')})? "
        ways = list[str]()
        if self._wanted.mode != "none":
            for function in self._wanted.functions:
                head = f"{CHANNEL}commentary to=functions.{function.name} {CONSTRAIN}json{MESSAGE}"
                ways.append(f"{self._literal(head)} {self._json(function.schema, lenient=True)}")
        if self._wanted.mode != "required":
            final = "TEXT" if self._wanted.schema is None else self._json(self._wanted.schema)
            ways.append(f"{self._literal(CHANNEL + 'final' + MESSAGE)} {final}")
        return f"{thought}({' | '.join(ways)})"

    # ---- terms ------------------------------------------------------------------------------------------------

    def _literal(self, text: str) -> str:
        """A text, in which names of control tokens are these tokens."""
        if not text:
            return ""
        names = sorted((name for name in self._tokens if name in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        return " ".join(
            f"<[{self._tokens[part]}]>" if part in self._tokens else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def _starts_with_token(self, text: str) -> bool:
        return any(text.startswith(name) for name in self._tokens)

    def _text_until(self, end: str) -> str:
        """Any text, and the mark behind it."""
        if self._starts_with_token(end.lstrip()):
            return f"TEXT {self._literal(end.lstrip())}"
        name = f"until_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: TEXT {self._literal(end)}")
        return name

    def _json(self, schema: Mapping[str, Any] | None, *, lenient: bool = False) -> str:
        """lenient: keywords that are not known are not held, instead of an error."""
        name = f"json_{len(self._rules)}"
        options = {"whitespace_pattern": WHITE_SPACE, "lenient": lenient, "coerce_one_of": lenient}
        self._rules.append(f"{name}: %json {json.dumps({**(schema or {}), 'x-guidance': options})}")
        return name


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What references of a part of a schema lead to."""
    return {key: value for key, value in schema.items() if key in ("$defs", "definitions")}
