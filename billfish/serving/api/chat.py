"""/v1/chat/completions: messages in, the assistant's next one out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from msgspec import Meta

from billfish.llm.chat_template import RESERVED
from billfish.llm.detokenizer import MOST_ALTERNATIVES, Piece, Token
from billfish.llm.grammar import json_object, json_schema
from billfish.serving.api.request_bodies import Body, Options, Positive, only, refuse, too_long, wrong
from billfish.serving.api.responses import Asked, Choice, Written, schema_errors, written
from billfish.serving.api.service import Service
from billfish.serving.api.tool_calls import Call, Form, Tool, ToolChoice, read_tools


class TextPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str
    arguments: str  # a JSON object


class ToolCall(Body):
    type: Literal["function"]
    function: CalledFunction
    id: str | None = None


Content = str | list[TextPart]


class System(Body, tag_field="role", tag="system"):
    content: Content


class Developer(System, tag="developer"):  # OpenAI's newer word for system, which templates do not know
    pass


class User(System, tag="user"):
    pass


class Assistant(Body, tag_field="role", tag="assistant"):
    content: Content | None = None
    tool_calls: list[ToolCall] = []


class ToolResult(Body, tag_field="role", tag="tool"):
    tool_call_id: str
    content: Content
    name: str | None = None


Message = System | Developer | User | Assistant | ToolResult


class JsonSchema(Body):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool = False  # both are served: every answer keeps to the schema


class TextFormat(Body, tag_field="type", tag="text"):
    pass


class JsonFormat(Body, tag_field="type", tag="json_object"):
    pass


class SchemaFormat(Body, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class ChatBody(Options, kw_only=True):
    prefix, kind, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_ALTERNATIVES)] | None = None
    tools: Annotated[list[Tool], Meta(min_length=1)] = []
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    response_format: TextFormat | JsonFormat | SchemaFormat | None = None
    chat_template_kwargs: dict[str, Any] = {}
    modalities: Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1)] = []
    store: bool = False


def read_chat(service: Service, body: ChatBody) -> Asked:
    """What a client asks."""
    service.check_name(body.model)
    body.check(service.limits)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        message = "max_tokens and max_completion_tokens mean the same. Send one of them."
        raise refuse("max_completion_tokens", message)
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs", 'top_logprobs needs "logprobs": true.')
    only("parallel_tool_calls", body.parallel_tool_calls, True)
    only("store", body.store, False)
    if len(body.messages) > service.limits.context:  # each has a token at least
        raise too_long("messages", f"{len(body.messages)} messages", service.limits)
    messages = [_read_message(f"messages[{index}]", message) for index, message in enumerate(body.messages)]
    tools, schema = read_tools(body.tools, body.tool_choice), None
    if isinstance(body.response_format, JsonFormat):
        schema = (json_object(), "response_format")
    if isinstance(body.response_format, SchemaFormat):
        field = "response_format.json_schema.schema"
        with schema_errors(field):
            schema = (json_schema(body.response_format.json_schema.schema), field)
    if tools is not None and schema is not None:
        raise refuse("response_format", "response_format and tools exclude each other. Send one of them.")

    template, form, opening = service.template(), None, ""
    if tools is not None or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        form = service.form
        if form is None:
            message = "The chat template of this model does not support tools, or not in a form that is known here."
            raise refuse("messages" if tools is None else "tools", message)
    if tools is not None and tools.forced and form is not None:  # the prompt ends where the call's JSON begins
        with schema_errors("tools"):
            opening, schema = form.opening, (json_schema(tools.schema(form)), "tools")
    if reserved := RESERVED.intersection(body.chat_template_kwargs):
        raise wrong("chat_template_kwargs", ", ".join(sorted(reserved)), "variables that have no field of their own")
    definitions = None if tools is None else tools.definitions
    text = template.render(messages, definitions, **body.chat_template_kwargs)
    prompt = service.encode("messages", text + opening)
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    requests = body.requests("messages", prompt, service.limits, alternatives)
    form = None if tools is None else form
    choices = [ChatChoice(form, opening, written(service, alternatives)) for _ in requests]
    return Asked(body, requests, choices, schema=schema)


def _read_message(place: str, message: Message) -> dict[str, Any]:
    """What the template gets. Arguments of calls become objects, as templates write JSON themselves."""
    role, content = message.__struct_config__.tag, message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content or [])
    made: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
    if isinstance(message, ToolResult):
        made["tool_call_id"] = message.tool_call_id
        made |= {} if message.name is None else {"name": message.name}
    if isinstance(message, Assistant):
        if content is None and not message.tool_calls:
            problem = f"{place} has neither content nor tool_calls. Send a string, or a list of parts of type text."
            raise refuse(f"{place}.content", problem)
        calls = [_read_call(f"{place}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls)]
        made |= {"tool_calls": calls} if calls else {}
    return made


def _read_call(place: str, call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise wrong(f"{place}.function.arguments", call.function.arguments, "a JSON object in a string")
    made = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return made if call.id is None else {"id": call.id, **made}


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

    def take(self, piece: Piece) -> Iterator[dict[str, Any]]:
        deltas = list(self._deltas([piece.text] if self._reader is None else self._reader.read(piece.text)))
        tokens = () if self._written is None else piece.tokens
        self._tokens += tokens
        for index, delta in enumerate(deltas or [{"content": ""}] if tokens else deltas):
            yield self._chunk(delta, () if index else tokens)
        if piece.finished:
            if self._reader is not None:
                yield from map(self._chunk, self._deltas(self._reader.finish()))
            self.finish_reason = "tool_calls" if self._calls and piece.finished == "stop" else piece.finished
            yield self._chunk({})

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
