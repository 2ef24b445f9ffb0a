"""Schemas without properties that they do not name. jsonschema says what the schema before and the one after take."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

import billfish as bf
from billfish.llm.closed_schema import closed
from billfish.llm.grammar import Vocabulary, check_schema, compile_grammar, json_schema

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["value"],
}
NAMES = ["a", "b", "c", "d"]
# schema; values that stay right; values that were right, and are not any more
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "properties": (A, [{"a": 1}], [{"a": 1, "c": 1}]),
    "no property": ({"type": "object", "properties": {}}, [{}], [{"c": 1}]),
    "free": ({"type": "object"}, [{}, {"c": {"d": 1}}], []),
    "anything": ({}, [1, {"c": 1}], []),
    "free values": ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"c": 1}], []),
    "explicit": ({**A, "additionalProperties": True}, [{"a": 1, "c": 1}], []),
    "explicit by a schema": ({**A, "additionalProperties": {"type": "null"}}, [{"a": 1, "c": None}], []),
    "patterns": ({**A, "patternProperties": {"^x": {"type": "null"}}}, [{"a": 1, "x1": None}], [{"a": 1, "c": 1}]),
    "patterns alone": ({"type": "object", "patternProperties": {"^x": {}}}, [{"x": 1}], [{"c": 1}]),
    "unevaluated": ({"allOf": [A, B], "unevaluatedProperties": True}, [{"a": 1, "b": 1, "c": 1}], []),
    "no unevaluated": ({"allOf": [A, B], "unevaluatedProperties": False}, [{"a": 1, "b": 1}], []),
    "required": ({**A, "required": ["a", "c"]}, [{"a": 1, "c": [1]}], [{"a": 1, "c": 1, "d": 1}]),
    "a least number": ({**A, "minProperties": 2}, [{"a": 1, "c": 1}], []),
    "parts": (
        {"type": "object", "properties": {"list": {"type": "array", "items": A}, "free": {"type": "object"}}},
        [{"list": [{"a": 1}], "free": {"c": 1}}],
        [{"list": [{"a": 1, "c": 1}]}],
    ),
    "first items": (
        {"type": "array", "prefixItems": [A, {"type": "object"}]},
        [[{"a": 1}, {"c": 1}]],
        [[{"a": 1, "c": 1}]],
    ),
    "choice": ({"anyOf": [A, B, {"type": "null"}]}, [{"a": 1}, {"b": 1}, None], [{"a": 1, "c": 1}, {"a": 1, "b": 1}]),
    "choice beside properties": (
        {**A, "anyOf": [{"required": ["b"]}, {"properties": {"c": {"type": "null"}}, "required": ["c"]}]},
        [{"a": 1, "b": [2]}, {"a": 1, "c": None}],
        [{"a": 1, "b": 1, "d": 1}],
    ),
    "all": ({"allOf": [A, B]}, [{"a": 1, "b": 1}], [{"a": 1, "b": 1, "c": 1}]),
    "all, one explicit": ({"allOf": [{**A, "additionalProperties": True}, B]}, [{"a": 1, "b": 1, "c": 1}], []),
    "all of one": ({"allOf": [{"$ref": "#/$defs/a"}], "title": "x", "$defs": {"a": A}}, [{"a": 1}], [{"a": 1, "c": 1}]),
    "reference": ({"$ref": "#/definitions/a", "definitions": {"a": A}}, [{"a": 1}], [{"a": 1, "c": 1}]),
    "reference beside properties": (
        {"$ref": "#/$defs/a~1x", "$defs": {"a/x": A}, **B},
        [{"a": 1, "b": 1}],
        [{"a": 1, "b": 1, "c": 1}],
    ),
    "a definition that is used both ways": (
        {
            "type": "object",
            "properties": {"alone": {"$ref": "#/$defs/a"}, "more": {"allOf": [{"$ref": "#/$defs/a"}, B]}},
            "$defs": {"a": A, "open-0": {"const": 5}},
        },
        [{"alone": {"a": 1}, "more": {"a": 1, "b": 1}}],
        [{"alone": {"a": 1, "b": 1}}, {"more": {"a": 1, "b": 1, "c": 1}}],
    ),
    "recursion": (
        {"allOf": [{"$ref": "#/$defs/node"}, B], "$defs": {"node": NODE}},
        [{"value": 1, "next": {"value": 1, "next": None}, "b": 1}],
        [{"value": 1, "b": 1, "c": 1}, {"value": 1, "b": 1, "next": {"value": 1, "b": 1}}],
    ),
    "names of keywords": (
        {"type": "object", "properties": {"properties": {"type": "integer"}, "$id": {"const": {"properties": {}}}}},
        [{"properties": 1, "$id": {"properties": {}}}],
        [{"c": 1}],
    ),
    "two schemas of a property": (
        {"allOf": [{"properties": {"p": A}}, {"properties": {"p": B}}]},
        [{"p": {"a": 1, "b": 1}}, {"p": {"a": 1, "b": 1, "c": 1}}],
        [],
    ),
    "two schemas of an item": (
        {"allOf": [{"type": "array", "prefixItems": [A]}, {"prefixItems": [B]}]},
        [[{"a": 1, "b": 1}]],
        [],
    ),
    "a choice of schemas of a property": (
        {
            "type": "object",
            "properties": {"kind": {"type": "string"}},
            "oneOf": [
                {"properties": {"kind": {"const": "a"}, "p": A}, "required": ["kind", "p"]},
                {"properties": {"kind": {"const": "b"}, "p": B}, "required": ["kind", "p"]},
            ],
        },
        [{"kind": "a", "p": {"a": 1}}, {"kind": "b", "p": {"b": 1}}],
        [{"kind": "a", "p": {"a": 1, "b": 1}}, {"kind": "a", "p": {"a": 1}, "c": 1}],
    ),
    "an anchor": ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", **A}}}, [{"a": 1, "c": 1}], []),
    "an identifier": ({"$ref": "urn:x", "$defs": {"a": {"$id": "urn:x", **A}}}, [{"a": 1, "c": 1}], []),
}


def takes(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize("name", CASES)
def test_properties_that_are_not_named_are_forbidden(name):
    schema, right, wrong = CASES[name]
    before, made = json.dumps(schema), closed(schema)
    jsonschema.Draft202012Validator.check_schema(made)
    assert [value for value in right if not (takes(schema, value) and takes(made, value))] == []
    named_itself = "unevaluatedProperties" in schema
    assert [value for value in wrong if takes(made, value) or not (takes(schema, value) or named_itself)] == []
    assert json.dumps(schema) == before


@pytest.mark.model
@pytest.mark.parametrize("name", CASES)
def test_the_grammar_takes_what_the_closed_schema_takes(vocabulary, name):
    schema, right, wrong = CASES[name]
    grammar = compile_grammar(json_schema(schema), vocabulary)
    tokenizer = vocabulary._tokenizer

    def accepted(value: Any) -> bool:
        matcher = grammar.matcher()
        for token in tokenizer.encode(json.dumps(value), special=False, start=False):
            if not matcher.allowed()[token]:
                return False
            matcher.take(token)
        return bool(matcher.allowed()[sorted(tokenizer.ends)].any())

    assert [value for value in right if not accepted(value)] == []
    assert [value for value in wrong if accepted(value)] == []


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    model = bf.llm.load(device="cpu")
    return Vocabulary(model.tokenizer, model.config.vocabulary)


def random_schema(rng: random.Random, depth: int, known: str, *, choices: bool) -> dict[str, Any]:
    """Of an object. known: definitions that it may refer to."""
    ways = ["properties", "properties", "allOf", "both", *(["$ref"] if known else [])]
    way = rng.choice([*ways, "anyOf", "anyOf beside"] if choices else ways) if depth else "properties"

    def inner(less: int = 1) -> dict[str, Any]:
        return random_schema(rng, max(depth - less, 0), known, choices=choices)

    if way == "$ref":
        return {"$ref": f"#/$defs/{rng.choice(known)}"}
    if way in ("allOf", "anyOf"):
        return {way: [inner() for _ in range(rng.randrange(1, 4))]}
    some = rng.sample(NAMES, rng.randrange(3))
    parts = {name: inner() if depth and rng.random() < 0.3 else {"type": "object"} for name in some}
    schema = {"type": "object", "properties": parts, "required": rng.sample(some, rng.randrange(len(some) + 1))}
    if way == "both":
        schema["allOf"] = [inner()]
    if way == "anyOf beside":
        schema["anyOf"] = [inner(), {"required": rng.sample(NAMES, 1)}]
    return schema


def random_value(rng: random.Random, depth: int) -> Any:
    some = rng.sample(NAMES, rng.randrange(4))
    return {name: random_value(rng, depth - 1) if depth else {} for name in some}


@pytest.mark.parametrize("choices", [False, True])
def test_random_schemas_lose_only_what_they_do_not_name(choices):
    """`unevaluatedProperties` is JSON Schema's own word for it. It is written to every object here, so that it holds
    where no schema is one of a choice."""
    rng, taken, refused, unclear = random.Random(0), 0, 0, 0
    for _ in range(200):
        definitions = dict[str, Any]()
        for name in "xyz":
            definitions[name] = random_schema(rng, 1, "".join(definitions), choices=choices)
        schema = {**random_schema(rng, 2, "xyz", choices=choices), "$defs": definitions}
        made = closed(schema)
        if made is schema:
            unclear += 1
            continue
        held = {**schema, "unevaluatedProperties": False}
        for _ in range(15):
            value = random_value(rng, 0)
            before, after = takes(schema, value), takes(made, value)
            assert before or not after, (schema, value)
            assert choices or after == takes(held, value), (schema, value)
            taken, refused = taken + after, refused + (before and not after)
            value = random_value(rng, 2)
            assert takes(schema, value) or not takes(made, value), (schema, value)
    assert taken > 250
    assert refused > 250
    assert unclear < 50


def test_references_that_multiply_a_schema_are_refused():
    names = {f"property{i}": True for i in range(1000)}
    whole = {
        "$defs": {"a": {"properties": names}},
        "items": {"prefixItems": [{"allOf": [{"$ref": "#/$defs/a"}, B]}] * 90},
    }
    check_schema(whole)
    with pytest.raises(bf.DataError, match=r"schema.*references"):
        closed(whole)


def test_references_that_lead_to_one_another_without_end_are_left_open():
    """Deeper than Python may recurse, though no part of it is deep."""
    definitions: dict[str, Any] = {"49": A}
    for number in range(49):
        nested: dict[str, Any] = {"$ref": f"#/$defs/{number + 1}"}
        for _ in range(45):
            nested = {"allOf": [nested, {}]}
        definitions[str(number)] = nested
    schema = {"$defs": definitions, "allOf": [{"$ref": "#/$defs/0"}, B]}
    check_schema(schema)
    assert closed(schema) is schema


@pytest.mark.parametrize(
    "schema",
    [
        [1],
        {"properties": [1], "required": 5, "$defs": 7, "allOf": {"a": 1}},
        {"properties": {"a": 5}, "anyOf": 3, "items": "x", "minProperties": "x", "required": [[]]},
        {"$ref": 5, "properties": {}},
        {"$ref": "#", "properties": {}},
        {"$ref": "#/allOf/" + "9" * 5000, "allOf": [{}]},
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}},
    ],
)
def test_what_is_no_schema_is_left_to_whoever_compiles_it(schema):
    json.dumps(closed(schema))
