"""What a careless compiler could do to half: flush subnormal numbers to zero, in every operand and every result.

The text of LLVM's intermediate code is rewritten. `%r = fmul half %a, %b` becomes the same on flushed operands, and
what used %r uses its flushed value. Loads, stores, selections and casts of bits move bits and are left alone.
"""

from __future__ import annotations

import re

_HALF = r"(?P<type>half|<\d+ x half>)"
_RESULT = r"^(?P<indent>\s+)(?P<result>%\S+) = "
_FLAGS = r"(?:[a-z]+ )*?"
# Of two halves a half, and of two halves a bit; `rest` is the operands and what the debugger is told.
_ARITHMETIC = re.compile(rf"{_RESULT}(?:fadd|fsub|fmul|fdiv|frem) {_FLAGS}{_HALF} (?P<rest>.*)$")
_COMPARISON = re.compile(rf"{_RESULT}fcmp {_FLAGS}{_HALF} (?P<rest>.*)$")
_FROM_HALF = re.compile(rf"{_RESULT}(?:fpext|fptosi|fptoui) {_FLAGS}{_HALF} (?P<rest>.*)$")
_TO_HALF = re.compile(rf"{_RESULT}fptrunc .* to {_HALF}")


def _integers(type_: str) -> str:
    return type_.replace("half", "i16")


def _function(type_: str) -> str:
    width = re.search(r"\d+", type_)
    return f"@emulator_flush_{width[0] if width else 1}"


def _constant(type_: str, value: int) -> str:
    """The same number in every part; spelled out, because before LLVM 18 there was no `splat`."""
    width = re.search(r"\d+", type_)
    return f"<{', '.join([f'i16 {value}'] * int(width[0]))}>" if width else str(value)


def _definition(type_: str) -> str:
    """x with its magnitude cleared where the exponent is zero."""
    i16, i1 = _integers(type_), _integers(type_).replace("i16", "i1")
    return f"""
define internal {type_} {_function(type_)}({type_} %x) alwaysinline {{
  %bits = bitcast {type_} %x to {i16}
  %exponent = and {i16} %bits, {_constant(type_, 0x7C00)}
  %small = icmp eq {i16} %exponent, {_constant(type_, 0)}
  %sign = and {i16} %bits, {_constant(type_, -0x8000)}
  %flushed = select {i1} %small, {i16} %sign, {i16} %bits
  %y = bitcast {i16} %flushed to {type_}
  ret {type_} %y
}}
"""


def _operands(text: str) -> list[str]:
    """Split at the commas that are not inside of a constant such as <half 1.0, half 2.0>."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "<(") - (character in ">)")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def flush_halves(code: str) -> str:
    """The same LLVM code with every half operand and result flushed."""
    types: set[str] = set()
    out: list[str] = []

    def flushed(indent: str, type_: str, value: str, name: str) -> str:
        """Appends `name` = flush(value)."""
        types.add(type_)
        out.append(f"{indent}{name} = call {type_} {_function(type_)}({type_} {value})")
        return name

    for serial, line in enumerate(code.splitlines()):
        name = f"%emulator.{serial}"
        if found := _ARITHMETIC.match(line) or _COMPARISON.match(line):
            left, right, *others = _operands(found["rest"])
            left = flushed(found["indent"], found["type"], left, f"{name}.left")
            right = flushed(found["indent"], found["type"], right, f"{name}.right")
            line = line[: found.start("rest")] + ", ".join([left, right, *others])
        elif found := _FROM_HALF.match(line):
            value, to = found["rest"].rsplit(" to ", 1)
            line = line[: found.start("rest")] + flushed(found["indent"], found["type"], value, name) + f" to {to}"
        # A result keeps its name after the flush; the operation gets another.
        if found := _ARITHMETIC.match(line) or _TO_HALF.match(line):
            out.append(line.replace(found["result"], f"{name}.raw", 1))
            flushed(found["indent"], found["type"], f"{name}.raw", found["result"])
        else:
            out.append(line)
    return "\n".join(out) + "\n" + "".join(map(_definition, sorted(types)))
