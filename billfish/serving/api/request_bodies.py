"""JSON bodies of requests: parsed, checked against types, and refused with the field's name and what it accepts.

A field is honoured (it has a type below), ignored because it changes no answer (`harmless`), refused because it would
change the answer in a way that is not supported (`unsupported`), or unknown: then it is ignored, too, and told to the
client in a header, or refused with `--strict-fields`.

msgspec checks the types: pydantic would add 0.2 s to the start of `billfish serve`.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import msgspec

from billfish.core.errors import BillfishError, did_you_mean, readable

KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
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
    "maxProperties": " of at most {}",
    "minLength": " of {}",
    "maxLength": " to {} characters",
    "pattern": " that matches {}",
}
SCHEMAS = ("schema", "parameters", "input_schema", "arguments", "input")  # hold JSON, where null is a value
MOST_NAMES = 20  # of ignored fields that a header tells


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


class Body(msgspec.Struct, omit_defaults=True):
    """A JSON object. null is as good as no field.

    harmless: further fields that change no answer, and are ignored. unsupported: those that would change it, with the
    values that they may have.
    """

    harmless: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}


@dataclass(frozen=True)
class Limits:
    """Upper limits of a request. context: tokens of a prompt and its answer. model_context: the model's own.
    answers: of one request."""

    context: int
    model_context: int
    vocabulary: int
    answers: int


def only(field: str, value: object, accepted: object) -> None:
    """Refuse a value of a field that supports one value only, the default."""
    if value != accepted:
        raise wrong(field, shown(value), json.dumps(accepted))


def too_long(field: str, size: str, limits: Limits) -> Refusal:
    """400 for a prompt that does not fit the context."""
    larger = limits.context < limits.model_context
    raised = f", or restart the server with a larger --context (at most {limits.model_context} for this model)" * larger
    message = f"{field} is too large: {size} are more than the context of {limits.context} tokens. Shorten it{raised}."
    return refuse(field, message, "context_length_exceeded")


# ---- parsing --------------------------------------------------------------------------------------------------------

AnyBody = TypeVar("AnyBody", bound=Body)
_one_thread = threading.Lock()


def convert(value: object, kind: type[AnyBody]) -> AnyBody:
    """The value as a body. Raises msgspec.ValidationError.

    msgspec looks at the fields of a class when it is first converted to. A second thread that does so meanwhile finds
    half of them, and the process ends with a segmentation fault.
    """
    with _one_thread:
        return msgspec.convert(value, kind)


def parse(body: bytes, kind: type[AnyBody], *, strict: bool = False) -> tuple[AnyBody, list[str]]:
    """A request's body, and the names of fields that are not known. strict: they are refused.

    Raises Refusal for anything that is no such body.
    """
    try:
        text = body.decode()
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_key_twice)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        _drop_nulls(value)
        read = convert(value, kind)
    except RecursionError:
        raise refuse("body", "The body is JSON that is nested too deeply.") from None
    except msgspec.ValidationError as error:
        raise _refusal(str(error), value, kind) from None
    except ValueError as error:  # what json raises, and a UnicodeError
        raise refuse("body", f"The body is not a JSON object in UTF-8: {error}.") from None
    unknown = dict[str, None]()
    for place, name, given, owner in _others(value, read, ""):
        if name in owner.unsupported:
            accepted = owner.unsupported[name]
            if given not in accepted:
                only_if = f"; expected {', or '.join(map(shown, accepted))}" if accepted else ""
                message = f"{readable(place)} is not supported by this server: it is {readable(shown(given))}{only_if}."
                raise refuse(place, message, "unsupported_field")
        elif name not in owner.harmless:
            if strict:
                known = owner.__struct_encode_fields__
                message = f"Unknown field {readable(place)}.{did_you_mean(name[:LONGEST_NAME], known)}"
                raise refuse(place, f"{message} The fields are {', '.join(known)}.", "unsupported_field")
            unknown[re.sub(r"\[\d+\]", "[]", place)] = None
    return read, list(unknown)


def _others(value: Any, read: Any, place: str) -> Iterator[tuple[str, str, Any, type[Body]]]:
    """Fields that have no type: place, name, value, and the type of the object that they are in."""
    if isinstance(read, Body) and isinstance(value, dict):
        names = dict(zip(read.__struct_encode_fields__, read.__struct_fields__, strict=True))
        for name, each in value.items():
            where = f"{place}.{name}".lstrip(".")
            if name in names:
                yield from _others(each, getattr(read, names[name]), where)
            elif name != read.__struct_config__.tag_field:
                yield where, name, each, type(read)
    elif isinstance(read, list) and isinstance(value, list):
        for index, (each, made) in enumerate(zip(value, read, strict=True)):
            if isinstance(made, (Body, list)):
                yield from _others(each, made, f"{place}[{index}]")


def header_of(names: list[str]) -> str:
    """The names of ignored fields, as a header has them."""
    told = [re.sub(r"[^\x21-\x7e]", "?", readable(name, LONGEST_NAME)) for name in names[:MOST_NAMES]]
    return ", ".join([*told, *(["..."] if len(names) > MOST_NAMES else [])])


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


def accepted_words(body: type[Body], field: str) -> str:
    """The types and limits of a field, in the words of errors."""
    schema = msgspec.json.schema(body)
    properties = schema["$defs"][body.__name__]["properties"]
    nodes = [
        {key: node[key] for key in node if key not in ("properties", "additionalProperties")}
        for node in _branches(properties[field], schema["$defs"])
    ]
    return _accepted(nodes)
