"""/v1/chat/completions: messages in, the assistant's next one out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from billfish.core.errors import DataError
from billfish.serving.calls import Call, Form
from billfish.serving.fields import Fields
from billfish.serving.grammar import json_object, json_schema
from billfish.serving.logprobs import Written
from billfish.serving.messages import read_messages, uses_tools
from billfish.serving.options import read_options
from billfish.serving.refusals import Described
from billfish.serving.requests import MOST_ALTERNATIVES, Piece, Token
from billfish.serving.respond import Asked, Choice, Schema
from billfish.serving.service import Service
from billfish.serving.tools import read_tools

CALL = "chat.completions"
FORMATS = ("text", "json_object", "json_schema")


def read_chat(service: Service, fields: Fields) -> Asked:
    """What a client asks."""
    service.check_name(CALL, fields.text("model"))
    messages = read_messages(fields)
    options = read_options(fields, service.limits, "max_completion_tokens", "max_tokens")
    alternatives = _read_logprobs(fields)
    tools = read_tools(fields)
    schema = _read_format(fields)
    fields.only("modalities", ["text"])
    fields.only("store", False)
    fields.done()
    if tools is not None and schema is not None:
        raise fields.wrong("response_format", Described("a format beside tools"), "one of the two")

    template, form, opening = service.template(CALL), None, ""
    if tools is not None or uses_tools(messages):
        form = _form(service, fields, "messages" if tools is None else "tools")
    if tools is not None and tools.forced and form is not None:  # the prompt ends where the call's JSON begins
        opening, schema = form.opening, _schema(fields, "tools", tools.schema(form))
    text = template.render(messages, tools=None if tools is None else tools.definitions)
    prompt = service.encode(CALL, "messages", text + opening)
    requests = options.requests(CALL, prompt, service.limits, alternatives)
    return Asked(
        requests=requests,
        choices=[ChatChoice(None if tools is None else form, opening, service.written(alternatives)) for _ in requests],
        prompts=1,
        stream=options.stream,
        include_usage=options.include_usage,
        prefix="chatcmpl",
        kind="chat.completion",
        chunk="chat.completion.chunk",
        schema=schema,
    )


def _read_logprobs(fields: Fields) -> int | None:
    """Alternatives for each token; None where no probabilities are asked for."""
    wanted, count = fields.boolean("logprobs"), fields.integer("top_logprobs", 0, MOST_ALTERNATIVES)
    if count is not None and not wanted:
        raise fields.wrong("top_logprobs", count, '"logprobs": true beside it')
    return (count or 0) if wanted else None


def _read_format(fields: Fields) -> Schema | None:
    """`response_format`; None for any text."""
    wanted = fields.inner("response_format")
    if wanted is None:
        return None
    kind = wanted.needed("type", wanted.word("type", FORMATS), ", ".join(FORMATS))
    described = wanted.inner("json_schema") if kind == "json_schema" else None
    wanted.done()
    if kind == "text":
        return None
    if kind == "json_object":
        return Schema(json_object(), CALL, fields.at("response_format"))
    given: Fields = wanted.needed("json_schema", described, "an object with a schema")
    for name in ("name", "description"):
        given.text(name)
    given.boolean("strict")  # both are served: every answer keeps to the schema
    schema = given.needed("schema", given.take("schema"), "a JSON schema")
    given.done()
    if not isinstance(schema, dict):
        raise given.wrong("schema", schema, "a JSON schema")
    return _schema(given, "schema", schema)


def _schema(fields: Fields, name: str, schema: Mapping[str, Any]) -> Schema:
    try:
        return Schema(json_schema(schema), fields.call, fields.at(name))
    except DataError as error:
        raise fields.wrong(name, Described(error), "a JSON schema that can be satisfied") from None


def _form(service: Service, fields: Fields, name: str) -> Form:
    if service.form is None:
        raise fields.wrong(name, Described("functions"), "none: the model's chat template has no tools that we read")
    return service.form


class ChatChoice(Choice):
    """The assistant's message. form: how it writes calls, where there is something to call. opening: what of a call is
    in the prompt already. written: how tokens are told, if they are."""

    def __init__(self, form: Form | None, opening: str, written: Written | None) -> None:
        self._reader = None if form is None else form.reader()
        if self._reader is not None:
            list(self._reader.read(opening))
        self._texts: list[str] = []
        self._calls: list[Call] = []
        self._written, self._tokens = written, list[Token]()

    def first(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""})

    def parts(self, piece: Piece) -> Iterator[dict[str, Any]]:
        found = [piece.text] if self._reader is None else self._reader.read(piece.text)
        deltas = list(self._deltas(found))
        if self._written is None:
            yield from map(self._chunk, deltas)
            return
        self._tokens += piece.tokens
        for index, delta in enumerate(deltas or [{"content": ""}] if piece.tokens else deltas):
            yield self._chunk(delta, () if index else piece.tokens)

    def rest(self) -> Iterator[dict[str, Any]]:
        if self._reader is not None:
            yield from map(self._chunk, self._deltas(self._reader.finish()))

    def last(self) -> dict[str, Any]:
        return self._chunk({})

    def reason(self, finished: str) -> str:
        return "tool_calls" if self._calls and finished == "stop" else finished

    def whole(self) -> dict[str, Any]:
        text = "".join(self._texts)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not self._calls else None}
        if self._calls:
            message["tool_calls"] = [call.record() for call in self._calls]
        found = None if self._written is None else self._written.of_chat(self._tokens)
        return {"message": message, "logprobs": found, "finish_reason": self.finish_reason}

    def _deltas(self, found: Iterable[str | Call]) -> Iterator[dict[str, Any]]:
        for part in found:
            if isinstance(part, Call):
                yield {"tool_calls": [{"index": len(self._calls), **part.record()}]}
                self._calls.append(part)
            elif part:
                yield {"content": part}
                self._texts.append(part)

    def _chunk(self, delta: dict[str, Any], tokens: tuple[Token, ...] = ()) -> dict[str, Any]:
        found = self._written.of_chat(tokens) if tokens and self._written is not None else None
        return {"delta": delta, "logprobs": found, "finish_reason": self.finish_reason}
