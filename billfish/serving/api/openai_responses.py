"""/v1/responses: OpenAI's newer API. An answer is a list of items: thoughts, messages and calls of functions."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Meta

from billfish.llm.conversation.answer_grammar import Function
from billfish.llm.conversation.choice import Choice
from billfish.llm.conversation.events import CallArguments, CallBegin, CallEnd, Event, Text, Thought
from billfish.llm.detokenizer import MOST_ALTERNATIVES, Token
from billfish.serving.api.answering import Asked, Format, Usage, event
from billfish.serving.api.chat_completions import JsonFormat, TextFormat
from billfish.serving.api.conversation import Conversation, ToolChoice, Turn, call_of, prepare
from billfish.serving.api.logprobs import Logprobs
from billfish.serving.api.request_bodies import Body, Refusal, refuse, wrong
from billfish.serving.api.service import Service
from billfish.serving.api.settings import (
    HARMLESS,
    UNSUPPORTED,
    AnswerSettings,
    AtMost,
    Effort,
    Share,
    Temperature,
)
from billfish.serving.api.telemetry import Telemetry
from billfish.serving.ipc.client import ServerClient
from billfish.serving.ipc.session import MOST_KEPT

FUNCTIONS = ("function", "custom")  # types of tools that the model may call
LOGPROBS = "message.output_text.logprobs"
FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class InputText(Body, tag_field="type", tag="input_text"):
    text: str


class OutputText(Body, tag_field="type", tag="output_text"):
    harmless: ClassVar = frozenset({"annotations", "logprobs"})
    text: str


class PlainText(Body, tag_field="type", tag="text"):
    text: str


class SummaryText(Body, tag_field="type", tag="summary_text"):
    text: str


class ReasoningText(Body, tag_field="type", tag="reasoning_text"):
    text: str


class SaidRefusal(Body, tag_field="type", tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Parts = list[InputText | OutputText | PlainText | SaidRefusal | SummaryText | ReasoningText]


class Item(Body):
    """Any item of the input. What it has depends on its type, and a message may have none."""

    harmless: ClassVar = frozenset({"status", "encrypted_content", "phase", "annotations", "metadata"})
    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Parts | None = None
    summary: Parts = []
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | Parts | None = None


class ResponseTool(Body):
    """A function, text for a tool of the client ("custom"), or functions under a common name ("namespace"). Tools that
    a server would run are not offered."""

    harmless: ClassVar = frozenset(
        {
            "format",
            "search_context_size",
            "user_location",
            "external_web_access",
            "filters",
            "execution",
            "search_content_types",
        }
    )
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    tools: list[ResponseTool] = []


class AllowedTool(Body):
    harmless: ClassVar = frozenset({"server_label"})  # of tools that OpenAI would run
    type: str
    name: str | None = None
    namespace: str | None = None


class ChosenTool(Body):
    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[AllowedTool] = []


class NamedSchema(Body, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool = False


class TextOptions(Body):
    harmless: ClassVar = frozenset({"verbosity"})
    format: TextFormat | JsonFormat | NamedSchema | None = None


class Reasoning(Body):
    harmless: ClassVar = frozenset({"summary", "generate_summary", "context"})
    effort: Effort | None = None


class ResponsesBody(Body, kw_only=True):
    harmless: ClassVar = (HARMLESS - {"store", "metadata"}) | {
        "truncation",
        "max_tool_calls",
        "stream_options",
        "client_metadata",
        "context_management",
    }
    unsupported: ClassVar = {**UNSUPPORTED, "background": (False,), "conversation": (), "prompt": ()}
    input: str | Annotated[list[Item], Meta(min_length=1)] = ""
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: AtMost | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: AtMost | None = None
    min_p: Share | None = None
    seed: int | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_ALTERNATIVES)] | None = None
    tools: list[ResponseTool] = []
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    store: bool = True
    include: list[str] = []
    stream: bool = False
    timings_per_token: bool = False
    return_progress: bool = False
    draft: bool = True

    @property
    def alternatives(self) -> int | None:
        """Of each token; None if log probabilities are not wanted."""
        if self.top_logprobs is None and LOGPROBS not in self.include:
            return None
        return self.top_logprobs or 0


class Stored(NamedTuple):
    """What is kept of an answer: the conversation with it, and the JSON."""

    turns: list[Turn]
    answer: dict[str, Any]


DECODE = msgspec.msgpack.Decoder(Stored).decode


def stored(client: ServerClient, id: str, place: str, *, remove: bool = False) -> Stored:
    """An answer of this server. Raises 404 for one that is not kept. remove: and forget it."""
    found = client.fetch(id, remove=remove)
    if found is None:
        message = f"There is no response {json.dumps(id)}. This server keeps the last {MOST_KEPT} in memory."
        raise Refusal(404, message, place, "response_not_found")
    return DECODE(found)


def read_responses(service: Service, body: ResponsesBody) -> Asked:
    """What a client asks."""
    earlier: list[Turn] = []
    if body.previous_response_id is not None:
        earlier = stored(service.client, body.previous_response_id, "previous_response_id").turns
        earlier = [turn for turn in earlier if turn.role != "system" or turn.name != "instructions"]
    turns = [*earlier, *_turns(body.input)]
    if not turns:
        raise wrong("input", "empty", "a string, or a list of items")
    if body.instructions is not None:  # those of an earlier request do not go on
        turns = [Turn("system", body.instructions, name="instructions"), *turns]
    tools = offered(body.tools)
    schema = None
    if body.text is not None and isinstance(body.text.format, NamedSchema):
        schema = (body.text.format.schema, "text.format.schema")
    elif body.text is not None and isinstance(body.text.format, JsonFormat):
        schema = ({"type": "object"}, "text.format")
    asked = Conversation(
        merged(turns),
        AnswerSettings(
            max_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            seed=body.seed,
            logprobs=body.alternatives,
            draft=body.draft,
        ),
        place="input",
        functions=[_function(name, each.tool) for name, each in tools.items()],
        choice=_choice(body.tool_choice),
        parallel=body.parallel_tool_calls,
        schema=schema,
        effort=None if body.reasoning is None else body.reasoning.effort,
        variables=body.chat_template_kwargs,
    )
    return prepare(service, asked, ResponsesFormat(service, body, turns, tools))


class Offered(NamedTuple):
    """A tool that the model is told of, and its namespace."""

    tool: ResponseTool
    namespace: str | None = None


def offered(tools: Sequence[ResponseTool]) -> dict[str, Offered]:
    """By the names that the model calls: those of a namespace have it before their own."""
    made: dict[str, Offered] = {}
    for index, tool in enumerate(tools):
        inner = tool.tools if tool.type == "namespace" else [tool]
        space = tool.name if tool.type == "namespace" else None
        for each in inner:
            if each.type not in FUNCTIONS or not each.name:
                continue
            name = each.name if space is None else full_name(space, each.name)
            if name in made:
                raise refuse(f"tools[{index}]", f"Two tools have the name {json.dumps(name)}. Give each its own name.")
            made[name] = Offered(each, space)
    return made


def full_name(namespace: str | None, name: str) -> str:
    """What the model calls a function of a namespace."""
    return name if namespace is None else f"{namespace}__{name}"


def _function(name: str, tool: ResponseTool) -> Function:
    if tool.type == "custom":
        return Function(name, FREE_TEXT, tool.description)
    return Function(name, tool.parameters, tool.description, tool.strict)


def _choice(choice: str | ChosenTool | None) -> ToolChoice:
    if isinstance(choice, ChosenTool):
        if choice.type == "allowed_tools":
            allowed = [full_name(t.namespace, t.name) for t in choice.tools if t.type in FUNCTIONS and t.name]
            return ToolChoice(choice.mode, allowed=tuple(allowed))
        if choice.name is None:
            raise refuse("tool_choice.name", "tool_choice.name is missing; expected the name of a function.")
        return ToolChoice("required", choice.name)
    return ToolChoice(choice or "auto")  # type: ignore[arg-type]  # msgspec has checked it


def _turns(given: str | list[Item]) -> list[Turn]:
    if isinstance(given, str):
        return [Turn("user", given)] if given else []
    return [turn for index, item in enumerate(given) if (turn := _turn(f"input[{index}]", item)) is not None]


def _turn(place: str, item: Item) -> Turn | None:
    """An item as a message of its own. `merged` puts the parts of an answer together."""
    if item.type == "message":
        if item.role is None:
            raise refuse(f"{place}.role", f"{place}.role is missing; expected user, assistant, system or developer.")
        return Turn("system" if item.role == "developer" else item.role, _text(item.content))
    if item.type in ("function_call", "custom_tool_call"):
        given = item.arguments if item.type == "function_call" else json.dumps({"input": item.input or ""})
        call = call_of(f"{place}.arguments", item.call_id or item.id, full_name(item.namespace, item.name or ""), given)
        return Turn("assistant", calls=(call,))
    if item.type in ("function_call_output", "custom_tool_call_output"):
        return Turn("tool", _text(item.output), result_of=item.call_id)
    if item.type == "reasoning":
        thought = _text(item.content) or _text(item.summary)
        return Turn("assistant", thought=thought) if thought else None
    raise refuse(f"{place}.type", f"{place}.type is {json.dumps(item.type)}, which this server does not support.")


def _text(content: str | Parts | None) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content or [])


def merged(turns: Sequence[Turn]) -> list[Turn]:
    """Neighbouring parts of one answer become one message, and all system messages the first one."""
    system = "\n\n".join(turn.text for turn in turns if turn.role == "system")
    made = [Turn("system", system)] if system else []
    for turn in turns:
        last = made[-1] if made else None
        if turn.role == "system":
            continue
        if turn.role == "assistant" and last is not None and last.role == "assistant":
            text = "\n".join(text for text in (last.text, turn.text) if text)
            thought = "\n".join(text for text in (last.thought, turn.thought) if text)
            made[-1] = replace(last, text=text, thought=thought, calls=last.calls + turn.calls)
        else:
            made.append(turn)
    return made


# ---- answers ----------------------------------------------------------------------------------------------------


class ResponsesFormat(Format):
    """Items: a thought, a message, calls. Each begins when its first event comes, and ends when another one begins."""

    def __init__(self, service: Service, body: ResponsesBody, turns: list[Turn], tools: Mapping[str, Offered]) -> None:
        super().__init__(body.stream)
        self._service, self._body, self._turns, self._tools = service, body, turns, tools
        progress = body.return_progress and body.stream
        self.telemetry = Telemetry.wanted(progress=progress, timings=body.timings_per_token)
        self._id, self._created = f"resp_{secrets.token_hex(16)}", int(time.time())
        self._number = -1
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._logprobs = None if body.alternatives is None else Logprobs(service.model.tokenizer.pieces)
        self._tokens: list[Token] = []  # whose log probabilities are not told yet

    def begin(self, choices: Sequence[Choice], prompt_tokens: int) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def step(self, index: int, choice: Choice, events: Sequence[Event], tokens: Sequence[Token]) -> bytes:
        self._tokens += tokens
        read = [] if self.telemetry is None else self.telemetry.prompt_progress(index)
        kind = "response.in_progress"
        data = [self._event(kind, response=self._response("in_progress"), prompt_progress=each) for each in read]
        return b"".join([*data, *(data for each in events for data in self._take(each))])

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        data = b"".join(self._close())
        response = self._finished(choices[0], usage)
        return data + self._event(f"response.{response['status']}", response=response, **self._timings)

    def failed(self, refusal: Refusal) -> bytes:
        error = {"code": refusal.code or "server_error", "message": str(refusal)}
        return self._event("response.failed", response={**self._response("failed"), "error": error})

    def whole(self, choices: Sequence[Choice], usage: Usage) -> object:
        message = choices[0].message
        events: list[Event] = []
        if message.thought:
            events.append(Thought(message.thought))
        if message.text or not message.calls:
            events.append(Text(message.text))
        for index, call in enumerate(message.calls):
            events += [CallBegin(index, call.name, call.id), CallArguments(index, call.arguments), CallEnd(index)]
        self._tokens += choices[0].tokens
        for each in events:
            list(self._take(each))
        list(self._close())
        return self._finished(choices[0], usage) | self._timings

    @property
    def _timings(self) -> dict[str, Any]:
        return {} if self.telemetry is None else self.telemetry.fields(0)

    # ---- items ------------------------------------------------------------------------------------------------

    def _take(self, each: Event) -> Iterator[bytes]:
        if isinstance(each, Thought):
            yield from self._opened("reasoning")
            yield self._delta("response.reasoning_text.delta", each.text, content_index=0)
        elif isinstance(each, Text):
            yield from self._opened("message")
            told = [] if self._logprobs is None else self._logprobs.of_chat(self._tokens)["content"]
            self._tokens.clear()
            yield self._delta("response.output_text.delta", each.text, content_index=0, logprobs=told)
            if self._open is not None:
                self._open["_logprobs"] += told
        elif isinstance(each, CallBegin):
            called = self._tools.get(each.name)
            kind = "custom_tool_call" if called is not None and called.tool.type == "custom" else "function_call"
            names: dict[str, Any] = {"name": each.name}
            if called is not None and called.namespace is not None:
                names = {"name": called.tool.name, "namespace": called.namespace}
            yield from self._opened(kind, **names, call_id=f"call_{each.id}")
        elif isinstance(each, CallArguments) and self._open is not None:
            self._open["_text"] += each.text
            if self._open["type"] == "function_call":
                yield self._event("response.function_call_arguments.delta", **self._where(), delta=each.text)
        elif isinstance(each, CallEnd):
            yield from self._close()

    def _opened(self, kind: str, **more: Any) -> Iterator[bytes]:
        """The item of an event; it begins if another one is open, or none."""
        if self._open is not None and self._open["type"] == kind and not more:
            return
        yield from self._close()
        prefix = {"reasoning": "rs", "message": "msg", "custom_tool_call": "ctc"}.get(kind, "fc")
        item: dict[str, Any] = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
        empty: dict[str, dict[str, Any]] = {
            "reasoning": {"summary": [], "content": []},
            "message": {"role": "assistant", "content": []},
            "function_call": {"arguments": ""},
            "custom_tool_call": {"input": ""},
        }
        self._open = {**item, **empty[kind], **more, "_text": "", "_logprobs": []}
        yield self._event("response.output_item.added", output_index=len(self._items), item=_told(self._open))
        if kind in ("reasoning", "message"):
            yield self._event("response.content_part.added", **self._where(), content_index=0, part=_part(kind, ""))

    def _delta(self, name: str, text: str, **more: Any) -> bytes:
        assert self._open is not None
        self._open["_text"] += text
        return self._event(name, **self._where(), **more, delta=text, **self._timings)

    def _close(self) -> Iterator[bytes]:
        item = self._open
        if item is None:
            return
        kind, text = item["type"], item["_text"]
        item["status"] = "completed"
        if kind in ("reasoning", "message"):
            part = _part(kind, text, item["_logprobs"])
            item["content"] = [part]
            name = "response.reasoning_text.done" if kind == "reasoning" else "response.output_text.done"
            more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": item["_logprobs"]}
            yield self._event(name, **self._where(), content_index=0, text=text, **more)
            yield self._event("response.content_part.done", **self._where(), content_index=0, part=part)
        elif kind == "function_call":
            item["arguments"] = text
            done = "response.function_call_arguments.done"
            yield self._event(done, **self._where(), name=item["name"], arguments=text)
        else:
            item["input"] = _free_text(text)
            for ending, key in (("delta", "delta"), ("done", "input")):
                name = f"response.custom_tool_call_input.{ending}"
                yield self._event(name, **self._where(), **{key: item["input"]})
        yield self._event("response.output_item.done", output_index=len(self._items), item=_told(item))
        self._items.append(_told(item))
        self._open = None

    def _where(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._items)}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)

    def _finished(self, choice: Choice, usage: Usage) -> dict[str, Any]:
        cut = choice.finish_reason == "length"
        response = self._response("incomplete" if cut else "completed")
        response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        response["usage"] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.thought, **usage.drafted},
            "total_tokens": usage.prompt + usage.completion,
        }
        if self._body.store:
            said = choice.message
            calls = tuple(replace(call, id=f"call_{call.id}") for call in said.calls)
            turns = [*self._turns, Turn("assistant", said.text, said.thought, calls)]
            self._service.client.keep(self._id, msgspec.msgpack.encode(Stored(turns, response)))
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        format = None if body.text is None else body.text.format
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self._service.name,
            "output": list(self._items),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": body.store,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"} if format is None else msgspec.to_builtins(format)},
            "tool_choice": "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
            "tools": [msgspec.to_builtins(tool) for tool in body.tools],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": None,
        }


def _told(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if not name.startswith("_")}


def _part(kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _free_text(arguments: str) -> str:
    """What a custom tool gets."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return arguments
    return str(found.get("input", "")) if isinstance(found, dict) else arguments
