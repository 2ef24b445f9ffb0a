"""Anthropic's API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from billfish.llm.conversation.answer_grammar import Function
from billfish.llm.conversation.choice import Choice
from billfish.llm.conversation.events import Call, CallArguments, CallBegin, CallEnd, Event, Text, Thought
from billfish.llm.detokenizer import MOST_STOPS, Token
from billfish.serving.api.answering import Asked, Format, Usage, event
from billfish.serving.api.conversation import Conversation, ToolChoice, Turn, prepare, render
from billfish.serving.api.request_bodies import Body, Refusal, refuse
from billfish.serving.api.service import Service
from billfish.serving.api.settings import AnswerSettings, AtMost, Share, Stop, Whole

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
CACHED = frozenset({"cache_control", "citations"})


class TextBlock(Body, tag_field="type", tag="text"):
    harmless: ClassVar = CACHED
    text: str


class ThinkingBlock(Body, tag_field="type", tag="thinking"):
    harmless: ClassVar = CACHED | {"signature"}
    thinking: str


class RedactedBlock(Body, tag_field="type", tag="redacted_thinking"):
    harmless: ClassVar = frozenset({"data"})


class ToolUseBlock(Body, tag_field="type", tag="tool_use"):
    harmless: ClassVar = CACHED | {"caller"}
    id: str
    name: str
    input: dict[str, Any] = {}


class ToolResultBlock(Body, tag_field="type", tag="tool_result"):
    harmless: ClassVar = CACHED
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool = False


Block = TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Body):
    """A function of the client. Tools that a server would run have a type of their own, and are not offered."""

    harmless: ClassVar = CACHED | {"defer_loading", "input_examples", "allowed_callers", "eager_input_streaming"}
    name: str
    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool = False


class Choose(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    harmless: ClassVar = frozenset({"display"})
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Body):
    harmless: ClassVar = frozenset({"task_budget"})
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesBody(Body, kw_only=True):
    harmless: ClassVar = frozenset(
        {
            "metadata",
            "service_tier",
            "container",
            "context_management",
            "inference_geo",
            "cache_control",
            "betas",
            "speed",
        }
    )
    unsupported: ClassVar = {"mcp_servers": ([],)}
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    model: str | None = None
    max_tokens: AtMost | None = None
    system: str | list[TextBlock] = ""
    stop_sequences: Annotated[list[Stop], Meta(max_length=MOST_STOPS)] = []
    stream: bool = False
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: AtMost | None = None
    tools: list[Tool] = []
    tool_choice: Choose | None = None
    thinking: Thinking | None = None
    output_format: OutputFormat | None = None
    output_config: OutputConfig | None = None
    draft: bool = True


def read_messages(service: Service, body: MessagesBody) -> Asked:
    """What a client asks."""
    return prepare(service, conversation_of(body), MessagesFormat(service, body.stream))


def count_tokens(service: Service, body: MessagesBody) -> dict[str, Any]:
    """How long the prompt of a request is."""
    text = render(service, conversation_of(body))
    return {"input_tokens": len(service.model.tokenizer.encode(text))}


def conversation_of(body: MessagesBody) -> Conversation:
    """The same for all APIs."""
    turns = [Turn("system", _text(body.system))] if body.system else []
    for index, message in enumerate(body.messages):
        turns += _turns(f"messages[{index}]", message)
    tools = [tool for tool in body.tools if tool.type == "custom" or tool.input_schema is not None]
    config = body.output_config
    schema = body.output_format or (None if config is None else config.format)
    effort = None if config is None or config.effort is None else EFFORTS[config.effort]
    if body.thinking is not None:
        effort = "none" if body.thinking.type == "disabled" else effort or "medium"
    choice = ToolChoice("auto")
    if body.tool_choice is not None:
        kind = body.tool_choice.type
        if kind == "tool" and body.tool_choice.name is None:
            raise refuse("tool_choice.name", "tool_choice.name is missing; expected the name of a tool.")
        named = ToolChoice("required", body.tool_choice.name)
        choice = {"auto": choice, "any": ToolChoice("required"), "none": ToolChoice("none"), "tool": named}[kind]
    last = turns[-1]
    return Conversation(
        turns,
        AnswerSettings(
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=tuple(body.stop_sequences),
            draft=body.draft,
        ),
        functions=[Function(tool.name, tool.input_schema, tool.description, tool.strict) for tool in tools],
        choice=choice,
        parallel=body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use,
        schema=None if schema is None else (schema.schema, "output_format.schema"),
        effort=effort,
        thought_budget=None if body.thinking is None else body.thinking.budget_tokens,
        goes_on=last.role == "assistant" and bool(last.text.strip()) and not last.calls,  # the answer's beginning
    )


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _turns(place: str, message: AnthropicMessage) -> Iterator[Turn]:
    """A message. Each result of a call is one of its own, before the text beside them."""
    if isinstance(message.content, str):
        yield Turn(message.role, message.content)
        return
    blocks = message.content
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock):
            if message.role != "user":
                raise refuse(f"{place}.content[{index}]", "A tool_result belongs to a message of the user.")
            yield Turn("tool", _text(block.content), result_of=block.tool_use_id)
    text = "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
    thought = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = tuple(
        Call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    )
    results = any(isinstance(block, ToolResultBlock) for block in blocks)
    if text or thought or calls or not results:
        yield Turn(message.role, text, thought, calls)


def error_body(refusal: Refusal) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    return {"type": "error", "error": {"type": KINDS.get(refusal.status, "api_error"), "message": str(refusal)}}


# ---- answers ----------------------------------------------------------------------------------------------------


class MessagesFormat(Format):
    """Content blocks: thinking, text, tool_use. Each begins when its first event comes."""

    def __init__(self, service: Service, stream: bool) -> None:
        super().__init__(stream)
        self._head: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": service.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._index, self._kind = -1, ""  # the block that is open, or was last

    def begin(self, choices: Sequence[Choice], prompt_tokens: int) -> bytes:
        usage = _usage(Usage(prompt_tokens, 0, 0, 0))
        return _event("message_start", message={**self._head, "usage": usage}) + _event("ping")

    def step(self, index: int, choice: Choice, events: Sequence[Event], tokens: Sequence[Token]) -> bytes:
        return b"".join(data for each in events for data in self._take(each))

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        data = b"".join(self._close())
        if self._index < 0:  # an answer has a block at least
            data += b"".join(self._opened("text", {"type": "text", "text": ""})) + b"".join(self._close())
        return data + _event("message_delta", delta=_stopped(choices[0]), usage=_usage(usage)) + _event("message_stop")

    def failed(self, refusal: Refusal) -> bytes:
        return event(error_body(refusal), "error")

    def whole(self, choices: Sequence[Choice], usage: Usage) -> object:
        said, content = choices[0].message, list[dict[str, Any]]()
        if said.thought:
            content.append({"type": "thinking", "thinking": said.thought, "signature": ""})
        if said.text or not said.calls:
            content.append({"type": "text", "text": said.text})
        content += [
            {"type": "tool_use", "id": f"toolu_{call.id}", "name": call.name, "input": _input(call.arguments)}
            for call in said.calls
        ]
        return {**self._head, "content": content, **_stopped(choices[0]), "usage": _usage(usage)}

    def _take(self, each: Event) -> Iterator[bytes]:
        if isinstance(each, Thought):
            yield from self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta(type="thinking_delta", thinking=each.text)
        elif isinstance(each, Text):
            yield from self._opened("text", {"type": "text", "text": ""})
            yield self._delta(type="text_delta", text=each.text)
        elif isinstance(each, CallBegin):
            yield from self._close()
            block = {"type": "tool_use", "id": f"toolu_{each.id}", "name": each.name, "input": {}}
            yield from self._opened("tool_use", block)
        elif isinstance(each, CallArguments):
            yield self._delta(type="input_json_delta", partial_json=each.text)
        elif isinstance(each, CallEnd):
            yield from self._close()

    def _opened(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self._kind == kind:
            return
        yield from self._close()
        self._kind, self._index = kind, self._index + 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._kind == "thinking":
            yield self._delta(type="signature_delta", signature="")
        if self._kind:
            yield _event("content_block_stop", index=self._index)
        self._kind = ""

    def _delta(self, **delta: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _stopped(choice: Choice) -> dict[str, Any]:
    """Why an answer ended."""
    if choice.finish_reason == "stop" and choice.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop}
    return {"stop_reason": REASONS[choice.finish_reason or "stop"], "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Cached tokens are counted apart."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        **usage.drafted,
    }


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call. An answer that was cut has no whole object."""
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
