"""What decoding costs: operations for each value, counted in compiled code.

clang compiles the decode functions of decode.metal, and other ways to do the same, to LLVM's intermediate code, as
Apple's compiler does on its way to a GPU. There each operation is one line. An operation on a vector counts once for
each of its parts, as Apple's GPUs have no vector arithmetic; a 32-bit word that holds two codes counts once, which is
the point of decoding in lanes. Moving parts in and out of vectors and naming the same bits otherwise is free.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from billfish.backends.metal.bridge import source
from billfish.backends.metal.emulator.compiler import SHIM, find_compiler
from billfish.backends.metal.emulator.translate import rewrite

VALUES = 8  # a call decodes a word of them
FLAGS = [
    *("-x", "c++", "-std=c++17", "-O2", "-g0", "-nostdinc", "-nostdinc++", "-fno-exceptions", "-fno-rtti"),
    *("-Wno-everything", "-fno-math-errno", "-Xclang", "-ffloat16-excess-precision=none", "-ffp-contract=off"),
    *("-fno-vectorize", "-fno-slp-vectorize", "-S", "-emit-llvm"),
]

INTEGER = {"and", "or", "xor", "shl", "lshr", "ashr", "add", "sub", "mul", "icmp"}
FLOATING = {"fadd", "fsub", "fmul", "fdiv", "fneg", "fcmp"}
CONVERSIONS = {"uitofp", "sitofp", "fptoui", "fptosi", "fpext", "fptrunc"}
# A selection goes with its comparison: a minimum is one operation. The rest names or moves bits.
FREE = {"select", "bitcast", "zext", "sext", "trunc", "insertelement", "extractelement", "shufflevector"}
FREE |= {"getelementptr", "store", "ret", "phi"}

# What each function of variants.metal is, in words.
VARIANTS = {
    "fp4_bitwise": ("e2m1", "moved bits and a minimum (ours)"),
    "fp4_shift": ("e2m1", "moved bits, 2^14 in the scale; subnormal"),
    "fp4_fields": ("e2m1", "field by field"),
    "fp4_table": ("e2m1", "table of 16"),
    "u4b8_magic": ("u4b8", "magic number 1024 (ours)"),
    "u4b8_convert": ("u4b8", "integer to float"),
    "u4b8_table": ("u4b8", "table of 16"),
    "u5b16_magic": ("u5b16", "magic number 1024 (ours)"),
    "u5b16_convert": ("u5b16", "integer to float"),
    "iq4nl_table": ("iq4nl", "table of 16 (ours)"),
}


@dataclass(frozen=True)
class Operations:
    """For each value, the multiplication with the scale included."""

    element: str
    way: str
    integer: float
    floating: float
    conversions: float
    memory: float


def count_operations() -> list[Operations]:
    """Of every variant."""
    code = intermediate_code()
    return [_count(name, *VARIANTS[name], code) for name in VARIANTS]


def intermediate_code() -> str:
    """variants.metal, compiled."""
    variants = (Path(__file__).parent / "variants.metal").read_text("utf-8")
    text = rewrite(source("decode.metal") + variants)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "variants.cpp").write_text(f"#include <metal_stdlib>\nusing namespace metal;\n{text}", "utf-8")
        find_compiler().run([*FLAGS, "-I", SHIM, "variants.cpp", "-o", "variants.ll"], Path(folder))
        return (Path(folder) / "variants.ll").read_text("utf-8")


def _count(name: str, element: str, way: str, code: str) -> Operations:
    found = re.search(rf"^define [^\n]*@{name}\([^\n]*\{{\n(.*?)^\}}", code, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    counts = dict.fromkeys(("integer", "floating", "conversions", "memory"), 0)
    for line in found[1].splitlines():
        kind, amount = classify(line)
        if kind:
            counts[kind] += amount
    return Operations(element, way, **{kind: amount / VALUES for kind, amount in counts.items()})


def classify(line: str) -> tuple[str, int]:
    """The kind of one line of code, and how often it counts; "" if it is free."""
    statement = re.sub(r"^%\S+ = (tail )?", "", line.strip())
    word = statement.split(" ", 1)[0]
    parts = re.search(r"<(\d+) x ", statement)
    amount = int(parts[1]) if parts else 1
    if not word or word.endswith(":") or word in FREE:
        return "", 0
    # Metal has no double. What is computed in double is the emulator's fma of halves; the product stands for all of it.
    if " double " in f"{statement} " and word != "fmul":
        return "", 0
    if word == "load":
        return "memory", amount
    if word == "br":
        return ("integer", 1) if statement.startswith("br i1") else ("", 0)
    if word == "call":
        return _classify_call(statement, amount)
    for kind, words in (("integer", INTEGER), ("floating", FLOATING), ("conversions", CONVERSIONS)):
        if word in words:
            return kind, amount
    raise ValueError(f"no kind for {statement!r}")


def _classify_call(statement: str, amount: int) -> tuple[str, int]:
    if re.search(r"@llvm\.(lifetime|assume|dbg)", statement):
        return "", 0
    if re.search(r"@llvm\.(fma|fmuladd|minnum|maxnum|minimum|maximum|fabs|copysign)", statement):
        return "floating", amount
    if re.search(r"@llvm\.(fshl|fshr|umin|umax|smin|smax|ctpop|bswap)", statement):
        return "integer", amount
    raise ValueError(f"no kind for {statement!r}")
