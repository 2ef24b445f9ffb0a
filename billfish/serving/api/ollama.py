"""Ollama's API: /api/chat, /api/generate, /api/embed, and what its clients ask about models."""

from __future__ import annotations

import datetime
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from billfish.llm.conversation.choice import Choice
from billfish.llm.conversation.events import CallEnd, Event, Text, Thought
from billfish.llm.detokenizer import MOST_ALTERNATIVES, Token
from billfish.llm.grammar import json_schema
from billfish.serving.api.answering import LINES, Asked, Format, Usage, encode, schema_errors
from billfish.serving.api.chat_completions import Tool, function_of
from billfish.serving.api.completions import _with_suffix
from billfish.serving.api.conversation import Conversation, Turn, call_of, prepare
from billfish.serving.api.logprobs import Logprobs
from billfish.serving.api.request_bodies import Body, Refusal, refuse
from billfish.serving.api.service import Service
from billfish.serving.api.settings import AnswerSettings, Stops, stop_strings
from billfish.serving.api.telemetry import Telemetry

VERSION = "0.12.0"  # of the API: clients ask for it
Keep = str | int | float


class ModelOptions(Body):
    harmless: ClassVar = frozenset(
        {
            "num_ctx",
            "num_batch",
            "num_gpu",
            "num_thread",
            "num_keep",
            "main_gpu",
            "use_mmap",
            "use_mlock",
            "numa",
            "low_vram",
            "f16_kv",
            "vocab_only",
            "repeat_last_n",
            "penalize_newline",
        }
    )
    unsupported: ClassVar = {"mirostat": (0,), "typical_p": (1,), "tfs_z": (1,)}
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: int | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: Stops = []
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0


class CalledFunction(Body):
    harmless: ClassVar = frozenset({"index", "description"})
    name: str
    arguments: dict[str, Any] | str = {}


class ToolCall(Body):
    harmless: ClassVar = frozenset({"type"})
    function: CalledFunction
    id: str | None = None


class OllamaMessage(Body):
    unsupported: ClassVar = {"images": ([],)}
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str = ""
    tool_calls: list[ToolCall] = []
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None


class Common(Body, kw_only=True):
    harmless: ClassVar = frozenset({"keep_alive", "context", "truncate", "shift"})
    unsupported: ClassVar = {"images": ([],), "template": ("",)}
    model: str | None = None
    options: ModelOptions | None = None
    format: Literal["json", ""] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    stream: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_ALTERNATIVES)] = 0
    draft: bool = True

    @property
    def alternatives(self) -> int | None:
        """Of each token; None if log probabilities are not wanted."""
        return self.top_logprobs if self.logprobs or self.top_logprobs else None


class ChatBody(Common, kw_only=True):
    messages: list[OllamaMessage] = []
    tools: list[Tool] = []


class GenerateBody(Common, kw_only=True):
    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False


def read_chat(service: Service, body: ChatBody) -> Asked:
    """What a client asks. Without messages it only wants the model to be loaded, which it is."""
    format = OllamaFormat(service, body, chat=True)
    if not body.messages:
        return _nothing(format)
    turns = [_turn(f"messages[{index}]", message) for index, message in enumerate(body.messages)]
    functions = [function_of(tool.function) for tool in body.tools]
    asked = Conversation(turns, settings_of(body), functions=functions, schema=_schema(body), effort=_effort(body))
    return prepare(service, asked, format)


def read_generate(service: Service, body: GenerateBody) -> Asked:
    """What a client asks: a prompt that becomes a message, goes on as it is, or is filled in."""
    format = OllamaFormat(service, body, chat=False)
    if not body.prompt:
        return _nothing(format)
    settings = settings_of(body)
    if not body.raw and not body.suffix and service.model.template is not None:
        turns = [*([Turn("system", body.system)] if body.system else []), Turn("user", body.prompt)]
        asked = Conversation(turns, settings, place="prompt", schema=_schema(body), effort=_effort(body))
        return prepare(service, asked, format)
    settings.check(service.limits)
    (prompt,) = service.prompts("prompt", body.prompt, most=1)
    if body.suffix:
        prompt = _with_suffix(service, prompt, body.suffix)
    requests = settings.requests("prompt", prompt.tokens, service.limits, service.defaults)
    grammar = None
    if (found := _schema(body)) is not None:
        with schema_errors(found[1]):
            grammar = json_schema(found[0]), found[1]
    return Asked(requests, [Choice() for _ in requests], format, grammar=grammar)


def _nothing(format: OllamaFormat) -> Asked:
    format.loads = True
    return Asked([], [Choice()], format, empty=True)


def settings_of(body: Common) -> AnswerSettings:
    """The same for all APIs."""
    given = body.options or ModelOptions()
    return AnswerSettings(
        max_tokens=None if given.num_predict is None or given.num_predict < 0 else given.num_predict,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        seed=None if given.seed is None or given.seed < 0 else given.seed,
        stop=stop_strings(given.stop),
        repetition_penalty=given.repeat_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logprobs=body.alternatives,
        draft=body.draft,
    )


def _schema(body: Common) -> tuple[dict[str, Any], str] | None:
    if not body.format:
        return None
    return ({"type": "object"} if body.format == "json" else dict(body.format)), "format"


def _effort(body: Common) -> str | None:
    if isinstance(body.think, bool):
        return "medium" if body.think else "none"
    return body.think


def _turn(place: str, message: OllamaMessage) -> Turn:
    calls = [
        call_of(f"{place}.tool_calls[{index}].function.arguments", call.id, call.function.name, call.function.arguments)
        for index, call in enumerate(message.tool_calls)
    ]
    name = message.tool_name or message.name
    result_of = (message.tool_call_id or "call00000") if message.role == "tool" else None
    return Turn(message.role, message.content, message.thinking, tuple(calls), result_of, name)


class OllamaFormat(Format):
    """A line of JSON for each piece. The last one has the counts."""

    media = LINES
    loads = False

    def __init__(self, service: Service, body: Common, chat: bool) -> None:
        super().__init__(body.stream)
        self._logprobs = None if body.alternatives is None else Logprobs(service.model.tokenizer.pieces)
        self._tokens: list[Token] = []  # whose log probabilities are not told yet
        self._service, self._chat = service, chat
        self._started = time.perf_counter()
        self.telemetry = Telemetry(progress=False, timings=False)  # for the durations

    def begin(self, choices: Sequence[Choice], prompt_tokens: int) -> bytes:
        return b""

    def step(self, index: int, choice: Choice, events: Sequence[Event], tokens: Sequence[Token]) -> bytes:
        self._tokens += tokens
        data = []
        for each in events:
            if isinstance(each, Text):
                data.append(self._line(text=each.text))
            elif isinstance(each, Thought):
                data.append(self._line(thought=each.text))
            elif isinstance(each, CallEnd):  # a call comes in one piece
                data.append(self._line(calls=[_call(choice, each.index)]))
        return b"".join(data)

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        return self._last(choices[0], usage, "", "", [])

    def failed(self, refusal: Refusal) -> bytes:
        return encode(error_body(refusal)) + b"\n"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> object:
        self._tokens += choices[0].tokens
        said = choices[0].message
        calls = [_call(choices[0], index) for index in range(len(said.calls))]
        return json.loads(self._last(choices[0], usage, said.text, said.thought, calls))

    def _last(self, choice: Choice, usage: Usage, text: str, thought: str, calls: list[dict[str, Any]]) -> bytes:
        first, last = (self._started, self._started) if self.telemetry is None else self.telemetry.times(0)
        reason = "load" if self.loads else "length" if choice.finish_reason == "length" else "stop"
        counts: dict[str, Any] = {
            "done": True,
            "done_reason": reason,
            "total_duration": _nanoseconds(time.perf_counter() - self._started),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": _nanoseconds(first - self._started),
            "eval_count": usage.completion,
            "eval_duration": _nanoseconds(last - first),
        }
        told = {"done": True, "done_reason": reason} if self.loads else counts
        return self._line(text, thought, calls, **told)

    def _line(
        self, text: str = "", thought: str = "", calls: Sequence[dict[str, Any]] = (), done: bool = False, **more: Any
    ) -> bytes:
        head = {"model": self._service.name, "created_at": _time(time.time())}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            message |= {"thinking": thought} if thought else {}
            message |= {"tool_calls": list(calls)} if calls else {}
            said: dict[str, Any] = {"message": message}
        else:
            said = {"response": text, **({"thinking": thought} if thought else {})}
        if self._logprobs is not None and self._tokens:
            said["logprobs"] = self._logprobs.of_chat(self._tokens)["content"]
            self._tokens.clear()
        return encode({**head, **said, "done": done, **more}) + b"\n"


def _call(choice: Choice, index: int) -> dict[str, Any]:
    call = choice.message.calls[index]
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        arguments = {}
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


def _nanoseconds(seconds: float) -> int:
    return max(1, int(1e9 * seconds))  # programs divide by it


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat().replace("+00:00", "Z")


def error_body(refusal: Refusal) -> dict[str, Any]:
    """An error in Ollama's shape."""
    return {"error": str(refusal)}


# ---- models ---------------------------------------------------------------------------------------------------------


class EmbedBody(Body):
    harmless: ClassVar = frozenset({"keep_alive", "options"})
    unsupported: ClassVar = {"truncate": (True, False)}
    input: str | list[str] = []
    prompt: str | None = None  # of the older /api/embeddings
    model: str | None = None
    dimensions: int | None = None


class ShowBody(Body):
    harmless: ClassVar = frozenset({"verbose", "system", "template", "options"})
    model: str | None = None
    name: str | None = None


def model_record(service: Service) -> dict[str, Any]:
    """A model, as Ollama lists it."""
    details = details_of(service.model.path, service.model.config.architecture)
    return record_of(service.name, service.model.path, service.facts.nbytes, details)


def record_of(name: str, path: Path, nbytes: int, details: dict[str, Any]) -> dict[str, Any]:
    """The same for a model that is not loaded. digest: of what tells it from others; `ollama list` shows its beginning,
    and nobody can check it."""
    modified = modified_at(path)
    digest = hashlib.sha256(f"{name} {nbytes} {modified}".encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": modified,
        "size": nbytes,
        "digest": digest,
        "details": details,
    }


def modified_at(path: Path) -> str:
    """When a model's file or folder was written."""
    try:
        return _time(path.stat().st_mtime)
    except OSError:
        return _time(time.time())


def details_of(path: Path, architecture: str) -> dict[str, Any]:
    """About a model's files."""
    return {
        "parent_model": "",
        "format": "gguf" if path.suffix == ".gguf" else "safetensors",
        "family": architecture,
        "families": [architecture],
        "parameter_size": "",
        "quantization_level": "",
    }


def show(service: Service, body: ShowBody) -> dict[str, Any]:
    """What is known about the model."""
    if (body.model or body.name) is None:
        raise refuse("model", "model is missing; expected the name of a model.")
    config, template = service.model.config, service.model.template
    thought = template is not None and service.syntax.thought is not None
    infill = ["insert"] if service.infill is not None else []
    able = ["completion", *(["tools"] if template is not None else []), *(["thinking"] if thought else []), *infill]
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value:g}" for name, value in service.defaults.items()),
        "template": "" if template is None else template.source,
        "details": details_of(service.model.path, config.architecture),
        "model_info": {
            "general.architecture": config.architecture,
            f"{config.architecture}.context_length": service.limits.context,
            f"{config.architecture}.embedding_length": config.hidden,
        },
        "capabilities": able,
        "modified_at": modified_at(service.model.path),
    }
