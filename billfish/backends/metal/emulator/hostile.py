"""What a careless compiler could do to half: flush subnormal numbers to zero, in every operand and every result.

The text of LLVM's intermediate code is rewritten. `%r = fmul half %a, %b` becomes the same on flushed operands, and
what used %r uses its flushed value. Loads, stores, selections and casts of bits move bits and are left alone.
"""

from __future__ import annotations

import re

_HALF = r"(?P<type>half|<\d+ x half>)"
_FLAGS = r"(?P<flags>(?:[a-z]+ )*)"
# Two operands, half to half.
_ARITHMETIC = re.compile(
    rf"^(?P<indent>\s+)(?P<result>%\S+) = (?P<op>fadd|fsub|fmul|fdiv|frem) {_FLAGS}{_HALF} (?P<a>[^,]+), (?P<b>[^,\n]+)"
)
_COMPARISON = re.compile(rf"^(?P<indent>\s+)(?P<result>%\S+) = fcmp {_FLAGS}{_HALF} (?P<a>[^,]+), (?P<b>[^,\n]+)")
_FROM_HALF = re.compile(
    rf"^(?P<indent>\s+)(?P<result>%\S+) = (?P<op>fpext|fptosi|fptoui) {_FLAGS}{_HALF} (?P<a>%\S+|\S+) to "
)
_TO_HALF = re.compile(r"^(?P<indent>\s+)(?P<result>%\S+) = fptrunc (?:[a-z]+ )*\S.* to (?P<type>half|<\d+ x half>)")


def _integers(type_: str) -> str:
    return type_.replace("half", "i16")


def _function(type_: str) -> str:
    width = re.search(r"\d+", type_)
    return f"@emulator_flush_{width[0] if width else 1}"


def _splat(type_: str, value: int) -> str:
    width = re.search(r"\d+", type_)
    return f"splat (i16 {value})" if width else str(value)


def _definition(type_: str) -> str:
    """x with its magnitude cleared where the exponent is zero."""
    i16, i1 = _integers(type_), _integers(type_).replace("i16", "i1")
    return f"""
define internal {type_} {_function(type_)}({type_} %x) alwaysinline {{
  %bits = bitcast {type_} %x to {i16}
  %exponent = and {i16} %bits, {_splat(type_, 0x7C00)}
  %small = icmp eq {i16} %exponent, {_splat(type_, 0)}
  %sign = and {i16} %bits, {_splat(type_, -0x8000)}
  %flushed = select {i1} %small, {i16} %sign, {i16} %bits
  %y = bitcast {i16} %flushed to {type_}
  ret {type_} %y
}}
"""


def flush_halves(code: str) -> str:
    """The same LLVM code with every half operand and result flushed."""
    types: set[str] = set()
    out = []
    serial = 0

    def call(indent: str, type_: str, value: str) -> str:
        nonlocal serial
        serial += 1
        types.add(type_)
        name = f"%emulator.flush.{serial}"
        out.append(f"{indent}{name} = call {type_} {_function(type_)}({type_} {value})")
        return name

    for line in code.splitlines():
        found = _ARITHMETIC.match(line) or _COMPARISON.match(line)
        if found:
            a, b = (call(found["indent"], found["type"], found[operand]) for operand in "ab")
            line = line[: found.start("a")] + f"{a}, {b}" + line[found.end("b") :]
        elif found := _FROM_HALF.match(line):
            a = call(found["indent"], found["type"], found["a"])
            line = line[: found.start("a")] + a + line[found.end("a") :]
        produced = _ARITHMETIC.match(line) or _TO_HALF.match(line)
        if not produced:
            out.append(line)
            continue
        # The result keeps its name after the flush; the operation gets another.
        serial += 1
        raw = f"%emulator.raw.{serial}"
        start, end = produced.span("result")
        out.append(line[:start] + raw + line[end:])
        types.add(produced["type"])
        type_ = produced["type"]
        out.append(f"{produced['indent']}{produced['result']} = call {type_} {_function(type_)}({type_} {raw})")
    return "\n".join(out) + "\n" + "".join(map(_definition, sorted(types)))
