"""/v1/chat/completions: messages in, the assistant's next one out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from billfish.core.version import __version__
from billfish.llm.conversation.answer_grammar import Function
from billfish.llm.conversation.choice import Choice, deltas_of, message_of
from billfish.llm.conversation.events import Call, Event
from billfish.llm.detokenizer import MOST_ALTERNATIVES, Token
from billfish.serving.api.answering import Asked, Format, Usage, event
from billfish.serving.api.conversation import Conversation, ToolChoice, Turn, call_of, prepare
from billfish.serving.api.logprobs import Logprobs
from billfish.serving.api.request_bodies import Body, Refusal, refuse
from billfish.serving.api.service import Service
from billfish.serving.api.settings import HARMLESS, UNSUPPORTED, AtMost, Effort, Options
from billfish.serving.api.telemetry import Telemetry

DONE = b"data: [DONE]\n\n"
FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}\Z")]


class TextPart(Body, tag_field="type", tag="text"):
    harmless: ClassVar = frozenset({"cache_control", "annotations"})
    text: str


class RefusalPart(Body, tag_field="type", tag="refusal"):
    refusal: str


class ThinkingPart(Body, tag_field="type", tag="thinking"):
    thinking: str


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] = "{}"  # a JSON object


class ToolCall(Body):
    harmless: ClassVar = frozenset({"index"})
    function: CalledFunction
    type: Literal["function"] = "function"
    id: str | None = None


Content = str | list[TextPart | RefusalPart | ThinkingPart]


class System(Body, tag_field="role", tag="system"):
    content: Content
    name: str | None = None


class Developer(System, tag="developer"):  # OpenAI's newer word for system, which templates do not know
    pass


class User(System, tag="user"):
    pass


class Assistant(Body, tag_field="role", tag="assistant"):
    harmless: ClassVar = frozenset({"refusal", "annotations", "audio"})
    unsupported: ClassVar = {"function_call": ()}
    content: Content | None = None
    tool_calls: list[ToolCall] = []
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ToolResult(Body, tag_field="role", tag="tool"):
    tool_call_id: str
    content: Content
    name: str | None = None


Message = System | Developer | User | Assistant | ToolResult


class OfferedFunction(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(Body):
    function: OfferedFunction
    type: Literal["function"] = "function"


class NameOnly(Body):
    name: str


class NamedTool(Body):
    function: NameOnly
    type: Literal["function"] = "function"


class AllowedTools(Body):
    tools: list[NamedTool]
    mode: Literal["auto", "required"] = "auto"


class ChosenTool(Body):
    type: Literal["function", "allowed_tools"] = "function"
    function: NameOnly | None = None
    allowed_tools: AllowedTools | None = None


class JsonSchema(Body):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool = False  # both are served: every answer keeps to the schema


class TextFormat(Body, tag_field="type", tag="text"):
    pass


class JsonFormat(Body, tag_field="type", tag="json_object"):
    schema: dict[str, Any] | None = None  # llama.cpp's server takes it here


class SchemaFormat(Body, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class StructuredOutputs(Body):
    """vLLM's field."""

    unsupported: ClassVar = {"regex": (), "structural_tag": (), "choice": ()}
    json: dict[str, Any] | None = None
    json_object: bool = False
    grammar: str | None = None


ResponseFormat = TextFormat | JsonFormat | SchemaFormat


class ChatBody(Options, kw_only=True):
    harmless: ClassVar = HARMLESS | {"verbosity", "echo", "modalities_config"}
    unsupported: ClassVar = {
        **UNSUPPORTED,
        "functions": ([],),
        "function_call": (),
        "audio": (),
        "web_search_options": (),
    }
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: AtMost | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_ALTERNATIVES)] | None = None
    tools: list[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: dict[str, Any] | None = None
    guided_json: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    thinking_budget_tokens: AtMost | None = None
    thinking_token_budget: AtMost | None = None
    chat_template_kwargs: dict[str, Any] = {}
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    modalities: list[Literal["text"]] = []
    timings_per_token: bool = False
    return_progress: bool = False
    verbose: bool = False


def read_chat(service: Service, body: ChatBody) -> Asked:
    """What a client asks."""
    if body.top_logprobs and not body.logprobs:
        raise refuse("top_logprobs", 'top_logprobs needs "logprobs": true.')
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    format = ChatFormat(service, body, alternatives is not None)
    return prepare(service, conversation_of(body, alternatives), format)


def conversation_of(body: ChatBody, alternatives: int | None = None) -> Conversation:
    """The same for all APIs."""
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    budget = body.thinking_token_budget if body.thinking_budget_tokens is None else body.thinking_budget_tokens
    goes_on = body.continue_final_message
    if goes_on and not isinstance(body.messages[-1], Assistant):
        raise refuse("continue_final_message", "continue_final_message needs a last message of the assistant.")
    if goes_on and body.add_generation_prompt:
        raise refuse("add_generation_prompt", "Send one of add_generation_prompt and continue_final_message.")
    return Conversation(
        [turn_of(f"messages[{index}]", message) for index, message in enumerate(body.messages)],
        body.settings(most, alternatives),
        functions=[function_of(tool.function) for tool in body.tools],
        choice=choice_of(body.tool_choice),
        parallel=body.parallel_tool_calls,
        schema=_schema_of(body),
        text_grammar=_text_grammar_of(body),
        effort=body.reasoning_effort,
        thought_budget=budget,
        variables=body.chat_template_kwargs,
        goes_on=goes_on,
        begins=body.add_generation_prompt is not False,
    )


def function_of(offered: OfferedFunction) -> Function:
    """The same for all APIs."""
    return Function(offered.name, offered.parameters, offered.description, offered.strict)


def choice_of(choice: str | ChosenTool | None) -> ToolChoice:
    """A mode, a name that is no mode, or a mode and the names of some functions."""
    if isinstance(choice, ChosenTool):
        if choice.type == "function" and choice.function is not None:
            return ToolChoice("required", choice.function.name)
        if choice.type == "allowed_tools" and choice.allowed_tools is not None:
            allowed = choice.allowed_tools
            return ToolChoice(allowed.mode, allowed=tuple(tool.function.name for tool in allowed.tools))
        what = "the name of a function" if choice.type == "function" else "mode and tools"
        field = f"tool_choice.{choice.type}"
        raise refuse(field, f"{field} is missing; expected an object with {what}.")
    return ToolChoice(choice or "auto")  # type: ignore[arg-type]  # msgspec has checked it


def _schema_of(body: ChatBody) -> tuple[dict[str, Any], str] | None:
    given = [schema_of(body.response_format)]
    if body.structured_outputs is not None:
        kept = body.structured_outputs
        any_object = {"type": "object"} if kept.json_object else None
        given.append(_placed(kept.json if kept.json is not None else any_object, "structured_outputs.json"))
    given += [_placed(body.json_schema, "json_schema"), _placed(body.guided_json, "guided_json")]
    return next((each for each in given if each is not None), None)


def _text_grammar_of(body: ChatBody) -> tuple[str, str] | None:
    found = given_grammar(body)
    if found is None and body.structured_outputs is not None and body.structured_outputs.grammar:
        return body.structured_outputs.grammar, "structured_outputs.grammar"
    return found


def given_grammar(body: Options) -> tuple[str, str] | None:
    """A grammar of llama.cpp's or of vLLM's, and the field that has it."""
    named = {"grammar": body.grammar, "guided_grammar": body.guided_grammar}
    return next(((text, field) for field, text in named.items() if text), None)


def _placed(schema: dict[str, Any] | None, place: str) -> tuple[dict[str, Any], str] | None:
    return None if schema is None else (schema, place)


def schema_of(format: ResponseFormat | None) -> tuple[dict[str, Any], str] | None:
    """The schema of an answer, and the field that has it."""
    if isinstance(format, JsonFormat):
        return format.schema or {"type": "object"}, "response_format"
    if isinstance(format, SchemaFormat):
        return format.json_schema.schema, "response_format.json_schema.schema"
    return None


def turn_of(place: str, message: Message) -> Turn:
    """The same for all APIs."""
    role, content = str(message.__struct_config__.tag), message.content
    text, thought = text_of(content), ""
    if isinstance(message, ToolResult):
        return Turn("tool", text, result_of=message.tool_call_id, name=message.name)
    if not isinstance(message, Assistant):
        return Turn("system" if role == "developer" else role, text, name=message.name)
    if isinstance(content, list):
        thought = "".join(part.thinking for part in content if isinstance(part, ThinkingPart))
    calls = [
        _call(f"{place}.tool_calls[{index}].function.arguments", call) for index, call in enumerate(message.tool_calls)
    ]
    thought = message.reasoning_content or message.reasoning or thought
    if content is None and not calls and not thought:
        problem = f"{place} has neither content nor tool_calls. Send a string, or a list of parts of type text."
        raise refuse(f"{place}.content", problem)
    return Turn("assistant", text, thought, tuple(calls), name=message.name)


def text_of(content: Content | None) -> str:
    """All text of a content. Parts of a message are one text."""
    if isinstance(content, str):
        return content
    parts = [part.text if isinstance(part, TextPart) else getattr(part, "refusal", "") for part in content or []]
    return "".join(parts)


def _call(place: str, call: ToolCall) -> Call:
    return call_of(place, call.id, call.function.name, call.function.arguments)


# ---- answers ----------------------------------------------------------------------------------------------------


class ChatFormat(Format):
    """OpenAI's chat completions."""

    def __init__(self, service: Service, body: ChatBody, with_logprobs: bool) -> None:
        super().__init__(body.stream)
        self._head = head_of("chatcmpl", service.name)
        self._include_usage, self._verbose = body.include_usage, body.verbose or service.verbose
        progress = body.return_progress and body.stream
        self.telemetry = Telemetry.wanted(progress=progress, timings=body.timings_per_token)
        self._logprobs = Logprobs(service.model.tokenizer.pieces) if with_logprobs else None

    def begin(self, choices: Sequence[Choice], prompt_tokens: int) -> bytes:
        start = {"role": "assistant", "content": None}
        return b"".join(self._chunk(index, start) for index in range(len(choices)))

    def step(self, index: int, choice: Choice, events: Sequence[Event], tokens: Sequence[Token]) -> bytes:
        tokens = tokens if self._logprobs is not None else ()
        deltas = list(deltas_of(events)) or ([{"content": ""}] if tokens else [])
        read = [] if self.telemetry is None else self.telemetry.prompt_progress(index)
        timings = self._timings(index)
        data = [self._chunk(index, {}, prompt_progress=each) for each in read]
        data += [self._chunk(index, delta, () if at else tokens, **timings) for at, delta in enumerate(deltas)]
        if choice.finish_reason is not None:
            more = {} if self._include_usage else self._told
            data.append(self._chunk(index, {}, finish_reason=choice.finish_reason, **timings, **more))
        return b"".join(data)

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        last = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage_of(usage)}
        last |= self._timings(0) | self._told
        return (event(last) if self._include_usage else b"") + DONE

    def failed(self, refusal: Refusal) -> bytes:
        return event(refusal.body())

    def whole(self, choices: Sequence[Choice], usage: Usage) -> object:
        made = [
            {
                "index": index,
                "message": message_of(choice.message),
                "logprobs": None if self._logprobs is None else self._logprobs.of_chat(choice.tokens),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        answer = {**self._head, "object": "chat.completion", "choices": made, "usage": usage_of(usage)}
        return answer | self._timings(0) | self._told

    def _timings(self, index: int) -> dict[str, Any]:
        return {} if self.telemetry is None else self.telemetry.fields(index)

    @property
    def _told(self) -> dict[str, Any]:
        return {"__verbose": {"prompt": self.prompt}} if self._verbose else {}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        tokens: Sequence[Token] = (),
        finish_reason: str | None = None,
        **more: Any,
    ) -> bytes:
        found = self._logprobs.of_chat(tokens) if tokens and self._logprobs is not None else None
        choice = {"index": index, "delta": delta, "logprobs": found, "finish_reason": finish_reason}
        usage = {"usage": None} if self._include_usage else {}
        return event({**self._head, "object": "chat.completion.chunk", **usage, "choices": [choice], **more})


def head_of(prefix: str, name: str) -> dict[str, Any]:
    """What every answer and event of OpenAI's has."""
    made = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": name}
    return {**made, "system_fingerprint": f"billfish-{__version__}"}


def usage_of(usage: Usage) -> dict[str, Any]:
    """OpenAI's."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {
            "reasoning_tokens": usage.thought,
            **usage.drafted,
        },
    }
