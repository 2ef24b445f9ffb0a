"""Closes the objects of a JSON schema: no property but those that the schema names, unless it allows others itself.

JSON Schema allows any further property where `additionalProperties` is absent. A small model then adds some until its
context ends. Few authors of schemas want that: llama.cpp and XGrammar forbid it, too, and OpenAI makes them say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from billfish.core.errors import DataError, failure

CALL = "json_schema"
Schema = Mapping[str, Any]
# Keywords that hold schemas of the same value: in a list, alone, or by names.
SAME_LISTS, SAME, SAME_MAPS = ("allOf", "anyOf", "oneOf"), ("if", "then", "else"), ("dependentSchemas",)
# Keywords that hold schemas of other values: parts of the value, or definitions.
OTHERS = ("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "additionalProperties")
OTHER_MAPS = ("properties", "patternProperties", "$defs", "definitions")
# Keywords that say something about properties, so that the schemas in an anyOf beside them are not alone.
OBJECTS = {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "required"}
TOGETHER = {*SAME_LISTS, *SAME, *SAME_MAPS, "$ref"}
NESTING = {*TOGETHER, *OTHERS, *OTHER_MAPS}
MOST = 40_000  # keywords and names that are written: references could multiply them without end
MOST_REFERENCES = 50  # one behind the other


def closed(schema: Any) -> Any:
    """A schema that takes fewer objects: those without a property that it does not name.

    An object stays open if a schema of it has `additionalProperties` or allows `unevaluatedProperties`, or if none has
    `properties` or `patternProperties`. Schemas of the same object (`allOf`, `$ref`, ...) name properties for each
    other. A schema is returned as it is if it has references that are no JSON pointers into it, if two schemas of an
    object describe one of its properties, or if too many references lead to one another. Raises DataError where they
    multiply it without end. A closed schema must not be closed again.
    """
    try:
        return _Closer(schema).whole()
    except (_UnclearError, RecursionError):
        return schema


class _UnclearError(Exception):
    """What the schema names cannot be told: a reference is no JSON pointer into it, or two schemas at once describe a
    part of a value."""


class _Said:
    """What schemas say of a value."""

    def __init__(self, schema: Schema) -> None:
        required = [name for name in _list(schema.get("required")) if isinstance(name, str)]
        properties, least = _mapping(schema.get("properties")), schema.get("minProperties")
        self.names = dict.fromkeys([*properties, *required])
        self.least = least if isinstance(least, int) else 0
        self.has_patterns = "patternProperties" in schema
        further = schema.get("unevaluatedProperties")
        self.stays_open = "additionalProperties" in schema or further not in (None, False)
        self.is_named = "properties" in schema or self.has_patterns or further is False
        # How many schemas at once describe a part of the value, other than by plain keywords.
        self.described = Counter(
            [key for key in OTHERS if not _is_plain(schema.get(key))]
            + [f"properties {name}" for name, each in properties.items() if not _is_plain(each)]
        )

    def add(self, other: _Said, *, instead: bool = False) -> None:
        """What a further schema says: beside these, or instead of them, as in an anyOf."""
        self.names |= other.names
        self.least = max(self.least, other.least)
        self.stays_open |= other.stays_open or other.has_patterns  # patterns would have to be repeated
        self.is_named |= other.is_named
        self.described = self.described | other.described if instead else self.described + other.described

    @property
    def is_closed(self) -> bool:
        enough = self.has_patterns or self.least <= len(self.names)
        return self.is_named and enough and not self.stays_open


class _Closer:
    """Writes one schema anew."""

    def __init__(self, root: Any) -> None:
        self._root, self._left = root, MOST
        self._targets: dict[str, Any] = {}  # what references lead to
        self._copies: dict[str, str] = {}  # of what references lead to, open, by references: names in $defs
        self._waiting: list[str] = []  # references whose copy is not written yet

    def whole(self) -> Any:
        made, copies = self._alone(self._root), dict[str, Any]()
        while self._waiting:
            reference = self._waiting.pop()
            target = self._target(reference)
            if isinstance(target, Mapping):
                target = {key: each for key, each in target.items() if key not in ("$defs", "definitions")}
            copies[self._copies[reference]] = self._beside_others(target)
        return {**made, "$defs": {**_mapping(made.get("$defs")), **copies}} if copies else made

    def _alone(self, schema: Any) -> Any:
        """A schema that decides alone about its value: closed."""
        if not isinstance(schema, Mapping):
            return schema
        if _passes_on(schema):
            return self._written(schema, self._alone)
        made = self._beside_others(schema)
        if OBJECTS.isdisjoint(schema) and TOGETHER.isdisjoint(schema):
            return made
        if isinstance(made.get("unevaluatedProperties"), bool):
            del made["unevaluatedProperties"]  # llguidance does not know it. True changes nothing, False is done here.
        said = self._said(schema)
        if max(said.described.values(), default=0) > 1:
            raise _UnclearError
        if not said.is_closed:
            return made
        properties = {**dict.fromkeys(said.names, True), **_mapping(made.get("properties"))}
        return {**made, "properties": properties, "additionalProperties": False}

    def _beside_others(self, schema: Any) -> Any:
        """A schema of a value that has others, which may name further properties: open."""
        if not isinstance(schema, Mapping):
            return schema
        made = self._written(schema, self._beside_others)
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._copies:
                self._copies[reference] = self._new_name()
                self._waiting.append(reference)
            made["$ref"] = f"#/$defs/{self._copies[reference]}"
        return made

    def _new_name(self) -> str:
        name = f"open-{len(self._copies)}"
        while name in _mapping(self._root.get("$defs")):
            name += "-"
        return name

    def _written(self, schema: Schema, same: Callable[[Any], Any]) -> dict[str, Any]:
        """A schema with all schemas in it written anew: those of the same value by `same`."""
        self._count(len(schema))
        if "$dynamicRef" in schema or "$recursiveRef" in schema or ("$id" in schema and schema is not self._root):
            raise _UnclearError
        if isinstance(reference := schema.get("$ref"), str):
            self._target(reference)
        made = dict[str, Any]()
        for key, each in schema.items():
            other = key in OTHERS or key in OTHER_MAPS
            if other or key in SAME_LISTS or key in SAME or key in SAME_MAPS:
                write = self._alone if other else same
                if isinstance(each, list):
                    each = [write(x) for x in each]
                elif key in OTHER_MAPS or key in SAME_MAPS:
                    each = {name: write(x) for name, x in each.items()} if isinstance(each, Mapping) else each
                else:
                    each = write(each)
            made[key] = each
        return made

    def _said(self, schema: Any, inside: tuple[str, ...] = ()) -> _Said:
        """What a schema and all others of the same value say of it. inside: references that led to it."""
        schema = _mapping(schema)
        said = _Said(schema)
        self._count(1 + len(said.names))
        together = [*_list(schema.get("allOf")), *(schema[key] for key in SAME if key in schema)]
        for key in SAME_MAPS:
            together += _mapping(schema.get(key)).values()
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in inside:
            if len(inside) == MOST_REFERENCES:
                raise _UnclearError
            said.add(self._said(self._target(reference), (*inside, reference)))
        for each in together:
            said.add(self._said(each, inside))
        for key in ("anyOf", "oneOf"):
            choice = _Said({})
            for each in _list(schema.get(key)):
                choice.add(self._said(each, inside), instead=True)
            said.add(choice)
        return said

    def _target(self, reference: str) -> Any:
        """What a reference leads to; None if it leads nowhere."""
        if reference != "#" and not reference.startswith("#/"):
            raise _UnclearError
        if reference not in self._targets:
            found = self._root
            for step in unquote(reference[1:]).split("/")[1:]:
                step = step.replace("~1", "/").replace("~0", "~")
                if isinstance(found, list):
                    index = int(step) if step.isdecimal() and len(step) < 9 else len(found)
                    found = found[index] if index < len(found) else None
                else:
                    found = _mapping(found).get(step)
            self._targets[reference] = found
        return self._targets[reference]

    def _count(self, written: int) -> None:
        self._left -= written
        if self._left < 0:
            problem = f"the schema has more than {MOST} keywords and properties where its references are followed"
            raise DataError(failure(CALL, problem))


def _passes_on(schema: Schema) -> bool:
    """Whether it says nothing about objects but by one reference, or by schemas of which each decides alone."""
    if not OBJECTS.isdisjoint(schema):
        return False
    (way, *others) = TOGETHER & schema.keys() or ("",)
    return not others and (way in ("$ref", "anyOf", "oneOf") or (way == "allOf" and len(_list(schema["allOf"])) == 1))


def _is_plain(schema: Any) -> bool:
    """Whether it is no list of schemas, and no schema with schemas in it."""
    return NESTING.isdisjoint(_mapping(schema)) and not isinstance(schema, list)


def _mapping(value: Any) -> Schema:
    """The value; {} if it is no object, of which llguidance tells."""
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
