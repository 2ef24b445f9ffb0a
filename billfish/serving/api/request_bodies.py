"""JSON bodies of requests: parsed, checked against types, and refused with the field's name and what it accepts.

msgspec checks the types: pydantic would add 0.2 s to the start of `billfish serve`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from billfish.core.errors import BillfishError, did_you_mean, readable
from billfish.llm.detokenizer import LONGEST_STOP, MOST_STOPS
from billfish.llm.sampler import Sampling
from billfish.serving.engine.requests import Request

KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
LARGEST_SEED = 2**63 - 1
LONGEST_NAME = 64  # characters of an unknown field that are compared with known ones
TYPES = {
    "number": "a number",
    "integer": "an integer",
    "string": "a string",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
}
LIMIT_WORDS = {
    "minimum": " from {}",
    "exclusiveMinimum": " above {} and up",
    "maximum": " to {}",
    "minItems": " of at least {}",
    "maxItems": " of at most {}",
    "minLength": " of {}",
    "maxLength": " to {} characters",
    "pattern": " that matches {}",
}
SCHEMAS = ("schema", "parameters")  # fields that hold JSON schemas, where null is a value


class Refusal(BillfishError):
    """Becomes an HTTP answer. param: the field that is wrong. code: a word for programs."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        """headers: of the answer; `retry_after` is Retry-After."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def body(self) -> dict[str, Any]:
        """The JSON of the answer, or of an event where an answer has begun."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def wrong(field: str, value: object, expected: str, code: str | None = None) -> Refusal:
    """400 for the value of a field: `temperature is 3; expected a number from 0 to 2.`"""
    message = f"{readable(field)} is {readable(value)}; expected {readable(expected, 1600)}."
    return Refusal(400, message, readable(field), code)


def refuse(field: str, message: str, code: str | None = None) -> Refusal:
    """400 for a field, in sentences of its own."""
    return Refusal(400, readable(message, 1600), readable(field), code)


def shown(value: object) -> str:
    """A JSON value in a message: its type where it has many parts."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return f"an object of {len(value)}"
    return json.dumps(value, ensure_ascii=False)


# ---- types ----------------------------------------------------------------------------------------------------------


class Body(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A JSON object. A field that it does not have is refused. null is as good as no field."""


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False


Whole = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]


@dataclass(frozen=True)
class Limits:
    """Upper limits of a request. context: tokens of a prompt and its answer. model_context: the model's own.
    answers: of one request."""

    context: int
    model_context: int
    vocabulary: int
    answers: int


class Options(Body):
    """The fields that chats and completions share: how to sample, when to stop, how to answer.

    prefix: of an answer's id. kind, chunk: OpenAI's words for an answer, and for an event of a stream.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk: ClassVar[str]
    model: str | None = None
    max_tokens: Positive | None = None
    seed: Whole | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Whole = 0
    min_p: Share = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] = {}
    n: Positive = 1
    stop: Stop | Annotated[list[Stop], Meta(max_length=MOST_STOPS)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None

    def check(self, limits: Limits) -> None:
        """Raises for what depends on the model, and for fields that contradict each other."""
        for name, least, most in (
            ("max_tokens", 1, limits.context),
            ("max_completion_tokens", 1, limits.context),
            ("top_k", 0, limits.vocabulary),
            ("n", 1, limits.answers),
            ("seed", 0, LARGEST_SEED - limits.answers),
        ):
            value = getattr(self, name, None)
            if value is not None and value > most:
                raise wrong(name, value, f"an integer from {least} to {most}")
        for token in self.logit_bias:
            if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < limits.vocabulary):
                message = f"logit_bias has the token {token!r}; expected tokens from 0 to {limits.vocabulary - 1}."
                raise refuse(f"logit_bias.{token}", message)
        if self.stream_options is not None:
            if not self.stream:
                raise refuse("stream_options", 'stream_options needs "stream": true.')
            only("stream_options.include_obfuscation", self.stream_options.include_obfuscation, False)

    def requests(self, field: str, prompt: list[int], limits: Limits, logprobs: int | None) -> list[Request]:
        """One request for each answer to a prompt; seeds are seed, seed + 1, ... field: where the prompt came from."""
        room = limits.context - len(prompt) + 1
        if room < 1:
            raise too_long(field, f"{len(prompt)} tokens", limits)
        most = getattr(self, "max_completion_tokens", None) or self.max_tokens or room
        seed = secrets.randbits(48) if self.seed is None else self.seed
        bias = {int(token): value for token, value in self.logit_bias.items()}
        same = {each.name: getattr(self, each.name) for each in fields(Sampling)}
        sampling = Sampling(**same | {"seed": seed, "logit_bias": bias})
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return [
            Request(prompt, min(most, room), replace(sampling, seed=seed + index), stop, logprobs)
            for index in range(self.n)
        ]


def only(field: str, value: object, accepted: object) -> None:
    """Refuse a value of a field that supports one value only, the default."""
    if value != accepted:
        raise wrong(field, shown(value), json.dumps(accepted))


def too_long(field: str, size: str, limits: Limits) -> Refusal:
    """400 for a prompt that does not fit the context."""
    larger = limits.context < limits.model_context
    raised = f", or restart the server with a larger --context (at most {limits.model_context} for this model)" * larger
    message = f"{field} has {size}, more than the context of {limits.context} tokens. Shorten it{raised}."
    return refuse(field, message, "context_length_exceeded")


# ---- parsing --------------------------------------------------------------------------------------------------------

AnyBody = TypeVar("AnyBody", bound=Body)


def parse(body: bytes, kind: type[AnyBody]) -> AnyBody:
    """A request's body. Raises Refusal for anything else."""
    try:
        text = body.decode()
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_key_twice)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        _drop_nulls(value)
        return msgspec.convert(value, kind)
    except RecursionError:
        raise refuse("body", "The body is JSON that is nested too deeply.") from None
    except msgspec.ValidationError as error:
        raise _refusal(str(error), value, kind) from None
    except ValueError as error:  # what json raises, and a UnicodeError
        raise refuse("body", f"The body is not a JSON object in UTF-8: {error}.") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name}, which JSON does not have")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise refuse(twice, f"The field {twice} occurs twice.", "duplicate_field")
    return made


def _drop_nulls(value: Any) -> None:
    if isinstance(value, dict):
        for name in [name for name, each in value.items() if each is None]:
            del value[name]
        value = [each for name, each in value.items() if name not in SCHEMAS]
    if isinstance(value, list):
        for each in value:
            if isinstance(each, (dict, list)):
                _drop_nulls(each)


def _refusal(message: str, value: Any, kind: type[Body]) -> Refusal:
    """The refusal of what msgspec does not accept. It tells where that is, as $.messages[0].role."""
    found = re.search(r" - at `\$([\w.\[\]]*)`\Z", message)
    place = "" if found is None else found[1].removesuffix("[...]").removeprefix(".")
    schema = msgspec.json.schema(kind)
    nodes = list(_branches(schema, schema["$defs"]))
    for step in re.findall(r"\w+", place):
        inner = [node.get("items") if step.isdigit() else node.get("properties", {}).get(step) for node in nodes]
        nodes = [branch for node in inner if node for branch in _branches(node, schema["$defs"])]
        value = value[int(step)] if isinstance(value, list) else value.get(step) if isinstance(value, dict) else None
    known = dict[str, list[dict[str, Any]]]()
    for name, node in ((name, node) for each in nodes for name, node in each.get("properties", {}).items()):
        known.setdefault(name, []).extend(_branches(node, schema["$defs"]))
    if missing := re.match(r"Object missing required field `(\w+)`", message):
        field = f"{place}.{missing[1]}".lstrip(".")
        return refuse(field, f"{field} is missing; expected {_accepted(known[missing[1]])}.")
    if isinstance(value, dict) and (found := re.match(r"Object contains unknown field `(.*?)`", message, re.DOTALL)):
        name = next((name for name in value if name.startswith(found[1]) and name not in known), found[1])
        hint = did_you_mean(name[:LONGEST_NAME], known) if name not in known else ""
        field = readable(f"{place}.{name}".lstrip("."))
        return refuse(field, f"Unknown field {field}.{hint} The fields are {', '.join(known)}.", "unsupported_field")
    return wrong(place or "body", shown(value), _accepted(nodes))


def _branches(node: dict[str, Any], definitions: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The alternatives of a JSON schema, without null."""
    if "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]]
    for each in node.get("anyOf", ()):
        yield from _branches(each, definitions)
    if "anyOf" not in node and node.get("type") != "null":
        yield node


def _accepted(nodes: Iterable[dict[str, Any]]) -> str:
    """JSON schemas in words."""
    words = []
    for node in nodes:
        what = ", ".join(map(str, node["enum"])) if "enum" in node else TYPES.get(node.get("type", ""), "any value")
        what += "".join(text.format(node[key]) for key, text in LIMIT_WORDS.items() if key in node)
        what += f" with {', '.join(node['properties'])}" if "properties" in node else ""
        what += f" of values: {_accepted([node['additionalProperties']])}" if node.get("additionalProperties") else ""
        words.append(what)
    return ", or ".join(dict.fromkeys(words))
