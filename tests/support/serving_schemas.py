"""Random JSON schemas that can be satisfied within some hundred tokens."""

from __future__ import annotations

import random
from typing import Any

WHOLE = 2  # the depth of a whole schema
NAMES = ["name", "age", "größe", "a b", "x", "list", 'quo"te', "€", "id", "value"]


def random_schema(rng: random.Random, depth: int = WHOLE) -> dict[str, Any]:
    """An object, an array, a choice, or one of the small ones."""
    makers = [_text, _whole, _constant, _enumeration, _small]
    if depth:
        makers = [_object, _object, _array, _any_of, *makers]
    if depth == WHOLE:
        makers.append(_referring)  # from the root of the schema
    return rng.choice(makers)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(1, 4))
    required = names if rng.random() < 0.7 else names[:1]
    properties = {name: random_schema(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(3)
    return {
        "type": "array",
        "items": random_schema(rng, depth - 1),
        "minItems": least,
        "maxItems": least + rng.randrange(3),
    }


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}


def _referring(rng: random.Random, depth: int) -> dict[str, Any]:
    there = {"$ref": "#/$defs/part"}
    return {
        "$defs": {"part": random_schema(rng, 0)},
        "type": "object",
        "properties": {"first": there, "second": there},
        "required": ["first", "second"],
        "additionalProperties": False,
    }


def _text(rng: random.Random, depth: int) -> dict[str, Any]:
    pattern = rng.choice(["^[a-z]{1,5}$", "^[0-9]{3}-[0-9]{2}$", "^(yes|no)$"])
    bounds = {"minLength": rng.randrange(3), "maxLength": rng.randrange(3, 9)}
    return {"type": "string", **({"pattern": pattern} if rng.random() < 0.4 else bounds)}


def _whole(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randrange(1000)}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice([None, 5, "fixed", [1, "a"], {"k": True}])}


def _enumeration(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "grün", "", 0, -1.5, None, True], 3)}


def _small(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}
