"""`billfish explain`: walk one code through the bits.

The walk is not a drawing of the tricks in bits.py: it runs them, on a word that writes down every operation done to
it, so it cannot show anything but what they do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

import numpy as np

from billfish.core import bits
from billfish.core.elements import E2M1, E2M1X2, E4M3, FP4, Element, Integer, Signed, SortedFloats, Table
from billfish.core.errors import DataError
from billfish.core.format import Format, GroupValues, Planes
from billfish.core.formats import get_format
from billfish.core.scales import decode_e4m3, decode_e8m0, encode_e4m3, encode_e8m0
from billfish.core.terminal import Style


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("format", metavar="FORMAT", help="name of a format; `billfish formats` lists all")
    parser.add_argument("code", metavar="CODE", type=integer, help="stored code, such as 5, 0b0101 or 0x5")
    parser.add_argument("--scale", type=float, default=1.0, metavar="S", help="scale of the group (default: 1)")
    parser.add_argument(
        "--offset",
        type=float,
        metavar="Z",
        help="zero point or minimum of the group, if the format has one (default: zero point 8, minimum 0)",
    )


def integer(text: str) -> int:
    """A number as Python writes it; argparse names this function where it complains."""
    return int(text, 0)


def run(arguments: argparse.Namespace) -> None:
    format = get_format(arguments.format, "explain")
    explain(format, arguments.code, arguments.scale, arguments.offset, sys.stdout)


# ---- the recording word -----------------------------------------------------------------------------------------


# Each kind of operation, as it reads with its operands: names of words come first, then constants.
OPERATIONS = {
    "start": "the code in bits {}..{} of both lanes",
    "and": "{} & 0x{:08x}",
    "xor": "{} ^ 0x{:08x}",
    "or": "{} | 0x{:08x}",
    "join": "{} | {}",
    "shift": "{} >> {}",
    "multiply": "{} * {:.6g}",
    "subtract": "{} - {:.6g}",
    "multiply_add": "{} * {:.6g} + {:.6g}",
}


@dataclass
class Step:
    """One operation: what was done, and the 32 bits after it; `lanes` once they are read as floats, low lane first."""

    name: str
    kind: str
    operands: tuple[Any, ...]
    word: int
    lanes: np.ndarray[Any, Any] | None = None

    @property
    def operation(self) -> str:
        """The operation in words, the same for every code."""
        return OPERATIONS[self.kind].format(*self.operands)


@dataclass
class Recorder:
    """Stands in for a uint32 word in the functions of bits.py and writes down what they do with it."""

    name: str
    word: int
    steps: list[Step] = field(default_factory=list)

    def _next(self, word: int, kind: str, operand: int | str) -> Recorder:
        name = "abcdefghijklmnop"[len(self.steps) - 1]
        self.steps.append(Step(name, kind, (self.name, operand), word))
        return Recorder(name, word, self.steps)

    def __and__(self, mask: int) -> Recorder:
        return self._next(self.word & mask, "and", mask)

    def __xor__(self, mask: int) -> Recorder:
        return self._next(self.word ^ mask, "xor", mask)

    def __rshift__(self, count: int) -> Recorder:
        return self if count == 0 else self._next(self.word >> count, "shift", count)

    def __or__(self, other: int | Recorder) -> Recorder:
        if isinstance(other, Recorder):
            return self._next(self.word | other.word, "join", other.name)
        return self._next(self.word | other, "or", other)

    def as_lanes(self, dtype: Any) -> LaneRecorder:
        values = np.array([self.word], np.uint32).view(dtype)
        self.steps[-1].lanes = values
        return LaneRecorder(self.name, values, self.steps)


@dataclass
class LaneRecorder:
    """The same word once it is read as two floats."""

    name: str
    values: np.ndarray[Any, Any]
    steps: list[Step]

    def _next(self, values: np.ndarray[Any, Any], kind: str, *constants: Any) -> LaneRecorder:
        name = "abcdefghijklmnop"[len(self.steps) - 1]
        operands = (self.name, *map(float, constants))
        self.steps.append(Step(name, kind, operands, int(values.view(np.uint32)[0]), values))
        return LaneRecorder(name, values, self.steps)

    def __mul__(self, factor: Any) -> LaneRecorder:
        return self._next(self.values * factor, "multiply", factor)

    def __sub__(self, amount: Any) -> LaneRecorder:
        return self._next(self.values - amount, "subtract", amount)

    def as_lanes(self, dtype: Any) -> LaneRecorder:
        return self

    def multiply_add(self, factor: Any, amount: Any) -> LaneRecorder:
        return self._next(bits.multiply_add(self.values, factor, amount), "multiply_add", factor, amount)


# ---- which trick decodes which element --------------------------------------------------------------------------


@dataclass(frozen=True)
class Walk:
    """A trick, where it wants the code in each lane, and what to say about it."""

    title: str
    shift: int
    run: Callable[[Any], Any]


def walks(element: Element) -> list[Walk]:
    """The ways kernels decode an element. The last step of each holds the element's value in both lanes."""
    if isinstance(element, E2M1):
        return [
            Walk("float16: shift the fields into place, times 2^14", 12, bits.dequant_fp4_pair),
            Walk("bfloat16: the same with shift 6 and 2^126", 12, bits.dequant_fp4_pair_bf16),
        ]
    if isinstance(element, E4M3):
        return [Walk("float16: shift the fields into place, times 2^8", 8, bits.dequant_fp8_pair)]
    if element.name == "u4b8":
        return [
            Walk("float16, low nibble: the magic number 1024", 0, bits.dequant_u4b8_lo),
            Walk("float16, high nibble: 1024 + 16n, undone by one multiply-add", 4, bits.dequant_u4b8_hi),
            Walk("bfloat16: the magic number 128", 0, bits.dequant_u4b8_lo_bf16),
        ]
    if element.name == "u4":
        return [
            Walk("float16, low nibble: the magic number 1024", 0, bits.dequant_u4_lo),
            Walk("float16, high nibble: 1024 + 16n, undone by one multiply-add", 4, bits.dequant_u4_hi),
            Walk("bfloat16: the magic number 128", 0, bits.dequant_u4_lo_bf16),
        ]
    if isinstance(element, Signed):
        return [Walk("float16: flip the top bit to add 128, then the magic number 1024", 0, bits.dequant_s8_pair)]
    if isinstance(element, Integer):
        run = partial(bits.dequant_integer_pair, bits=element.bits, bias=element.bias)
        return [Walk("float16: the magic number 1024", 0, run)]
    return []


# ---- printing ---------------------------------------------------------------------------------------------------


def explain(format: Format, code: int, scale: float, offset: float | None, out: TextIO) -> float:
    """Print the walk of one code; returns the value that the format gives it."""
    element, style = format.element, Style(out)
    if not 0 <= code < 2**element.bits:
        most = 2**element.bits - 1
        raise DataError(f"explain: CODE {code} is no code of {format.name}. Pass 0 to {most}, such as 5, 0b101 or 0x5.")
    planes = planes_of(format, code, scale, offset)
    title = f"{format.name}, code {code} = 0b{code:0{element.bits}b}"
    print(style(title, "bold") + f"   {made_of(format)}\n", file=out)
    for name, field_bits, meaning in fields(element, code):
        print(f"  {name:<10} {field_bits:<10} {meaning}", file=out)
    for walk in walks(element):
        print("\n  " + style(walk.title, "cyan"), file=out)
        for step in record(walk, code, element):
            print("  " + _draw(step, style), file=out)
    print("\n  " + style("value", "bold"), file=out)
    group = format.group_values(planes)
    numbers = {name: float(values[0, 0]) for name, values in group._asdict().items() if values is not None}
    result = float(format.decode(planes, format.default_group_size)[0, 0])
    print("    " + held_scale(format).format(asked=scale, **numbers), file=out)
    left = formula(group).format(value=float(element.values[code]), **numbers)
    print(f"    {left} = " + style(f"{result:.9g}", "green"), file=out)
    return result


def record(walk: Walk, code: int, element: Element, high: int | None = None) -> list[Step]:
    """Run a trick on a recording word; its steps, the last of which holds the element's value.

    high: the code of the high lane, where it is another one.
    """
    word = ((code if high is None else high) << 16 | code) << walk.shift
    start = Recorder("q", word)
    start.steps.append(Step("q", "start", (walk.shift + element.bits - 1, walk.shift), word))
    walk.run(start)
    return start.steps


def made_of(format: Format) -> str:
    """The parts of a format, in one line."""
    return f"element {format.element.name}, scale {format.scale}, storage {format.layout}"


def formula(group: GroupValues) -> str:
    """What a group makes of an element's value, for str.format with `value` and the numbers of the group."""
    left = "{value:g} * {scale:.9g}" if group.zero is None else "({value:g} - {zero:g}) * {scale:.9g}"
    return left if group.minimum is None else left + " + {minimum:g}"


def held_scale(format: Format) -> str:
    """What the format makes of a scale, for str.format with the scale that was `asked` for and the `scale` held."""
    return f"scale {{asked:g}}, held as {format.scale}, is {{scale:.9g}}"


def refused_scale(format: Format) -> str:
    """What is said of a scale that the format cannot hold, for str.format with `asked`."""
    return f"explain: --scale {{asked:g}} cannot be stored as {format.scale}."


def refused_offset() -> str:
    """What is said of an offset that is beyond float16, for str.format with `asked`."""
    return "explain: --offset {asked:g} cannot be stored as float16."


def byte_scale(format: Format) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """How scales of one byte are encoded and decoded, of a format that has them."""
    if "e8m0" in format.scale:
        return encode_e8m0, decode_e8m0
    return (encode_e4m3, decode_e4m3) if "e4m3" in format.scale else None


def planes_of(format: Format, code: int, scale: float, offset: float | None) -> Planes:
    """Planes of one block in which every code is `code`, and scale and offset are as near as the format can hold."""
    options = {name: allowed[-1] for name, allowed in format.options.items()}  # zero points that may be fractional
    run = max(format.block_size, format.quantization_run(format.default_group_size))
    planes = format.quantize(np.zeros((1, run), np.float32), format.default_group_size, "rtn", None, **options)
    one = getattr(format, "sub_bias", 0) + 1
    if offset is not None and format.offset == "none":
        raise DataError(f"explain: {format.name} has no offset. Leave out --offset {offset:g}.")
    fill = {
        "codes": code,
        "scale": scale,
        "sub_scale": one,
        "zero": 8 if offset is None else offset,
        # k-quants subtract their minimum, in units of dmin.
        "minimum": (offset or 0.0) * (-1 if "sub_minimum" in planes else 1),
        "sub_minimum": 1,
        "global_scale": 1,
    }
    meant: Any = scale
    with np.errstate(over="ignore"):
        if codec := byte_scale(format):
            encode, decode = codec
            fill["scale"] = encode(np.float32(scale))
            meant = decode(fill["scale"])
        planes = {name: np.full_like(plane, fill.get(name, 0)) for name, plane in planes.items()}
        group = format.group_values(planes)
    held = group.scale[0, 0]
    # ggml reads a number where E8M0 has none, so `meant` is asked as well.
    if not np.isfinite([held, meant]).all() or np.signbit(held) != np.signbit(scale):
        raise DataError(refused_scale(format).format(asked=scale))
    for values in (group.zero, group.minimum):
        if values is not None and not np.isfinite(values).all():
            raise DataError(refused_offset().format(asked=offset))
    return planes


def fields(element: Element, code: int) -> list[tuple[str, str, str]]:
    """The parts of a code, highest first: name, bits, meaning."""
    pattern = f"{code:0{element.bits}b}"
    if isinstance(element, E2M1):
        exponent, mantissa = code >> 1 & 3, code & 1
        meaning = f"2^({exponent} - 1) * (1 + {mantissa}/2)" if exponent else f"subnormal: {mantissa}/2"
        return [
            ("sign", pattern[0], "minus" if code & 8 else "plus"),
            ("exponent", pattern[1:3], "bias 1" if exponent else "0"),
            ("mantissa", pattern[3], f"{meaning} = {abs(float(element.values[code])):g}"),
        ]
    if isinstance(element, E4M3):
        exponent, mantissa = code >> 3 & 15, code & 7
        meaning = f"2^({exponent} - 7) * (1 + {mantissa}/8)" if exponent else f"subnormal: {mantissa}/8 * 2^-6"
        if code & 0x7F == 0x7F:
            meaning = "all ones"
        return [
            ("sign", pattern[0], "minus" if code & 0x80 else "plus"),
            ("exponent", pattern[1:5], "bias 7" if exponent else "0"),
            ("mantissa", pattern[5:], f"{meaning} = {abs(float(element.values[code])):g}"),
        ]
    if isinstance(element, (Table, SortedFloats)):
        doubled = f", twice E2M1's {FP4.values[code]:g}" if element is E2M1X2 else ""
        return [("index", pattern, f"table[{code}] = {element.values[code]:g}{doubled}")]
    if isinstance(element, Signed):
        return [("integer", pattern, f"two's complement: {element.values[code]:g}")]
    assert isinstance(element, Integer)
    bias = f" - {element.bias} = {element.values[code]:g}" if element.bias else ""
    return [("integer", pattern, f"{code}{bias}")]


def _draw(step: Step, style: Style) -> str:
    text = f"{step.name} = {step.operation}" if step.name != "q" else f"q   {step.operation}"
    if step.lanes is None:
        high, low = f"{step.word >> 16:016b}", f"{step.word & 0xFFFF:016b}"
        return f"{text:<42} 0x{step.word:08x}  {_spaced(high)}  {_spaced(low)}"
    exponent = 5 if step.lanes.dtype == np.float16 else 8
    pattern = f"{step.word & 0xFFFF:016b}"
    drawn = " ".join(
        style(part, colour)
        for part, colour in (
            (pattern[0], "red"),
            (pattern[1 : 1 + exponent], "yellow"),
            (pattern[1 + exponent :], "cyan"),
        )
    )
    return f"{text:<42} 0x{step.word:08x}  {_number(step.lanes[1]):>12} {_number(step.lanes[0]):>12}   {drawn}"


def _spaced(pattern: str) -> str:
    return " ".join(pattern[i : i + 4] for i in range(0, 16, 4))


def _number(x: Any) -> str:
    return f"{float(x):.6g}"
