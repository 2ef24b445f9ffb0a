"""What `billfish explain` does, as data: the page "Bits" runs it in the browser.

A program is the list of operations that core/bits.py did to a recording word (cli/explain.py). It is the same
for every code, which is checked here. Sentences come from `explain`, too: as templates, or written out for each code.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np

from billfish.cli.explain import (
    Step,
    Walk,
    byte_scale,
    fields,
    formula,
    held_scale,
    made_of,
    planes_of,
    record,
    refused_offset,
    refused_scale,
    walks,
)
from billfish.core.elements import Element
from billfish.core.format import FORMATS, Format

FLOATS = {"float16": (1, 5, 10), "bfloat16": (1, 8, 7), "float32": (1, 8, 23)}  # bits of sign, exponent and mantissa
BYTES = {"e8m0": (0, 8, 0), "e4m3": (1, 4, 3)}


def programs() -> dict[str, Any]:
    """All formats, and what they are made of: JSON, but for NaN, which is None."""
    elements = {format.element.name: format.element for format in FORMATS.values()}
    return {
        "floats": {**FLOATS, **BYTES},
        "elements": {name: _element(element) for name, element in elements.items()},
        "formats": {name: _format(format) for name, format in FORMATS.items()},
        "bytes": {_encoding(format): _byte_scale(format) for format in FORMATS.values() if byte_scale(format)},
    }


def _element(element: Element) -> dict[str, Any]:
    return {
        "bits": element.bits,
        "values": _numbers(element.values),
        "fields": [fields(element, code) for code in range(2**element.bits)],
        "walks": [_walk(walk, element) for walk in walks(element)],
    }


def _walk(walk: Walk, element: Element) -> dict[str, Any]:
    trick = walk.run.func if isinstance(walk.run, partial) else walk.run
    program, *others = ([_step(step) for step in record(walk, code, element)] for code in range(2**element.bits))
    if any(other != program for other in others):
        raise ValueError(f"{trick.__name__} does something else for another code: it is no program for all")
    return {"title": walk.title, "trick": trick.__name__, "why": inspect.getdoc(trick), "steps": program}


def _step(step: Step) -> dict[str, Any]:
    return {
        "name": step.name,
        "kind": step.kind,
        "operands": step.operands,
        "text": step.operation,
        "float": None if step.lanes is None else step.lanes.dtype.name,
    }


def _format(format: Format) -> dict[str, Any]:
    planes = planes_of(format, 0, 1.0, None)
    group = format.group_values(planes)
    role = "zero" if group.zero is not None else "minimum" if group.minimum is not None else None
    stored = {name: planes[name].dtype.name for name in ("scale", role) if name}
    if stored.pop("scale") not in ("float16", "float32", "uint8") or set(stored.values()) - {"float16"}:
        raise ValueError(f"{format.name} has a scale or an offset that the page cannot round to its type")
    return {
        "element": format.element.name,
        "made_of": made_of(format),
        "scale": _encoding(format),
        "held_scales": _held(format) if byte_scale(format) else None,
        "offset": role and {"role": role, "default": float(getattr(group, role)[0, 0])},
        "held": held_scale(format),
        "formula": formula(group),
        "refused_scale": refused_scale(format),
        "refused_offset": refused_offset(),
    }


def _encoding(format: Format) -> str:
    """How the number is stored that a user's scale becomes."""
    if byte_scale(format):
        return next(name for name in BYTES if name in format.scale)
    return str(planes_of(format, 0, 1.0, None)["scale"].dtype.name)


def _held(format: Format) -> list[float | None]:
    """The scale that the format makes of each byte."""
    planes = {**planes_of(format, 0, 1.0, None), "scale": np.arange(256, dtype=np.uint8)[None]}
    return _numbers(format.group_values(planes).scale[0])


def _byte_scale(format: Format) -> dict[str, Any]:
    """Encoding to a byte as a staircase: on all floats from starts[i] to the next start, the byte is bytes[i]."""
    codec = byte_scale(format)
    assert codec
    encode, decode = codec

    def byte(places: Any) -> Any:
        return encode(floats_at(places))

    starts = [-0x7F800001]
    for low, high in ((-0x7F800001, -1), (0, 1), (1, 0x7F800000)):
        starts += _changes(byte, low, high)
    starts = sorted({*starts, 0})
    return {
        "starts": starts,
        "bytes": byte(np.array(starts)).tolist(),
        "meant": _numbers(decode(np.arange(256, dtype=np.uint8))),
    }


def floats_at(places: Any) -> Any:
    """The float32 numbers in their order: 0 is +0, 1 the least above it, -1 is -0, -2 the least below."""
    return np.where(places >= 0, places, 0x80000000 | (-1 - places)).astype(np.uint32).view(np.float32)


def _changes(byte: Any, low: int, high: int) -> list[int]:
    """Where `byte`, which only rises or only falls from `low` to `high`, has another value than one place before."""
    lows, highs, found = np.array([low]), np.array([high]), list[int]()
    while len(lows):
        differ = byte(lows) != byte(highs)
        lows, highs = lows[differ], highs[differ]
        found += highs[highs - lows == 1].tolist()
        wide = highs - lows > 1
        middles = (lows[wide] + highs[wide]) // 2
        lows, highs = np.concatenate([lows[wide], middles]), np.concatenate([middles, highs[wide]])
    return found


def _numbers(values: Any) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
