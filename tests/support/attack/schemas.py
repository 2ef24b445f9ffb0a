"""JSON schemas and grammars that are meant to hurt: deep, wide, exponential, endless, or simply odd."""

from __future__ import annotations

import random
from typing import Any

from serving_schemas import random_schema

from attack.cases import odd_json

Schema = dict[str, Any]


def chain(rng: random.Random) -> Schema:
    """Definitions that refer to one another, in arrays, objects or nothing."""
    count = rng.choice([3, 100, 300, 3000])

    def link(to: int) -> Schema:
        there = {"$ref": f"#/$defs/{to}"}
        return rng.choice([there, {"type": "array", "items": there}, {"properties": {"a": there}, "required": ["a"]}])

    ends = rng.choice([{"type": "null"}, {"$ref": "#/$defs/0"}, {"$ref": "#/nowhere"}, {"$ref": "file:///etc/passwd"}])
    return {"$ref": "#/$defs/0", "$defs": {**{str(i): link(i + 1) for i in range(count)}, str(count): ends}}


def nested(rng: random.Random) -> Schema:
    """A schema in a schema in a schema."""
    schema: Schema = {"type": "null"}
    for _ in range(rng.choice([5, 60, 99, 2000])):
        schema = rng.choice(
            [
                {"type": "array", "items": schema},
                {"type": "object", "properties": {"a": schema}, "required": ["a"]},
                {"anyOf": [schema, {"type": "integer"}]},
                {"oneOf": [schema]},
                {"not": schema},
            ]
        )
    for _ in range(rng.randrange(7)):  # each doubles it
        schema = {"allOf": [schema, schema]}
    return schema


def wide(rng: random.Random) -> Schema:
    """Very many names, choices, or members."""
    count = rng.choice([50, 1500, 30_000])
    names = [f"n{i}" for i in range(count)]
    return rng.choice(
        [
            {"type": "object", "required": names},
            {"type": "object", "properties": {name: {} for name in names}, "additionalProperties": False},
            {"enum": names},
            {"anyOf": [{"const": name} for name in names]},
            {"type": "array", "minItems": count, "items": {"type": "string"}},
            {"type": "array", "prefixItems": [{"type": "null"}] * count},
            {"type": "object", "patternProperties": {f"^{name}": {} for name in names[:200]}},
        ]
    )


def patterns(rng: random.Random) -> Schema:
    """Regular expressions whose automatons are exponential, or large."""
    count = rng.choice([3, 8, 20, 30])
    many = [{"type": "string", "pattern": f".*{chr(97 + i % 26)}.{{{i}}}{chr(97 + i % 26)}.*"} for i in range(count)]
    number = rng.choice([20, 1000, 60_000, 1_000_000])
    return rng.choice(
        [
            {"allOf": many},
            {"anyOf": many},
            {"type": "string", "pattern": "^" + "a" * number + "$"},
            {"type": "string", "pattern": f"^(a|b|c|ab|bc){{{number}}}$"},
            {"type": "string", "pattern": f"(x+x+)+y{{0,{number}}}"},
            {"type": "string", "pattern": f".*a.{{{min(number, 60)}}}"},
            {"type": "string", "pattern": rng.choice(["(", "[", "\\", "(?<a>.)\\1", "(?=a)", "\\p{L}", "\0", "*"])},
            {"type": "string", "pattern": "(" * min(number, 20_000) + ")" * min(number, 20_000)},
            {"const": "x" * number},
            {"const": "x y" * (number // 3)},
        ]
    )


def bounds(rng: random.Random) -> Schema:
    """Numbers at their edges."""
    number = rng.choice([-1, 0, 1, 0.1, 1e-300, 1e308, 2**31, 2**63, 10**30, 10**4000 % 10**300])
    name = rng.choice(["minLength", "maxLength", "minimum", "maximum", "multipleOf", "minItems", "maxItems"])
    kind = {"L": "string", "I": "array"}.get(name[3:4], "number")
    other = rng.choice(["minimum", "exclusiveMaximum", "multipleOf"])
    return {"type": kind, name: number, **({other: rng.choice([7, 0.3, -5])} if kind == "number" else {})}


def nothing(rng: random.Random) -> Schema:
    """Schemas that nothing satisfies, or that say nothing."""
    return rng.choice(
        [
            {"$ref": "#"},
            {"not": {}},
            {"enum": []},
            {"allOf": [{"type": "string"}, {"type": "null"}]},
            {"type": "string", "minLength": 5, "maxLength": 2},
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            {"type": []},
            {"x-guidance": {"lenient": True, "whitespace_pattern": ".*"}, "type": "object"},
            {"%llguidance": {}, "lark": "start: start"},
            {"$id": "http://127.0.0.1:1/x", "$ref": "http://127.0.0.1:1/y"},
            {"type": "string", "format": rng.choice(["regex", "uri", "date-time", "uuid", "nothing"])},
        ]
    )


FAMILIES = (chain, nested, wide, patterns, bounds, nothing)


def bomb(rng: random.Random) -> Schema:
    """One of a family, or an ordinary schema with something odd in it."""
    if rng.random() < 0.3:
        made = odd_json(random_schema(rng), rng)
        return made if isinstance(made, dict) else {"anyOf": [made]}
    return rng.choice(FAMILIES)(rng)


def grammar_bomb(rng: random.Random) -> str:
    """GBNF that takes long to convert or to compile, or that cannot be read."""
    count = rng.choice([10, 3000, 60_000])
    rules = "".join(f"r{i} ::= r{i + 1}\n" for i in range(min(count, 3500)))
    return rng.choice(
        [
            'root ::= "a"' + "\n" * count,
            "#" * count + '\nroot ::= "a"',
            f'root ::= r0\n{rules}r{min(count, 3500)} ::= "a"',
            f"root ::= r0\n{rules}",
            "root ::= " + "(" * count + '"a"' + ")" * count,
            "root ::= " + '"a" ' * (count // 4),
            f'root ::= "a"{{{count}}}',
            f'root ::= ("a" | "ab"{{0,{count}}}){{{count}}}',
            "start" + "\n" * count,
            'root ::= "a" root | root "b" |',
        ]
    )


def tool(rng: random.Random) -> dict[str, Any]:
    """A function whose arguments are such a schema."""
    name = rng.choice(["f", "f", "", "a b", "x" * 100, "</tool_call>", "\u202e"])
    return {"type": "function", "function": {"name": name, "description": "d" * 50, "parameters": bomb(rng)}}
