"""What decoding costs: instructions for each value, counted in compiled code as those of whole kernels are.

clang compiles the decode functions of decode.metal, and other ways to do the same, to LLVM's intermediate code, as
Apple's compiler does on its way to a GPU. A 32-bit word that holds two codes counts once, which is the point of
decoding in lanes.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from billfish.backends.emulator.compiler import SHIM, find_compiler
from billfish.backends.emulator.counting import CLASSES, charges, read_functions
from billfish.backends.emulator.translate import rewrite
from billfish.backends.metal.kernels import constants, source

VALUES = 8  # a call decodes a word of them
FLAGS = [
    *("-x", "c++", "-std=c++17", "-O2", "-g0", "-nostdinc", "-nostdinc++", "-fno-exceptions", "-fno-rtti"),
    *("-Wno-everything", "-fno-math-errno", "-Xclang", "-ffloat16-excess-precision=none", "-ffp-contract=off"),
    *("-fno-vectorize", "-fno-slp-vectorize", "-S", "-emit-llvm"),
]

# What each function of variants.metal is, in words.
VARIANTS = {
    "fp4_masked": ("e2m1", "masked where it stands, 2^14 in the scale (ours)"),
    "fp4_shift": ("e2m1", "moved bits, 2^14 in the scale"),
    "fp4_fields": ("e2m1", "field by field"),
    "fp4_table": ("e2m1", "table of 16"),
    "u4b8_masked": ("u4b8", "masked where it stands (ours)"),
    "u4b8_magic": ("u4b8", "magic number 1024"),
    "u4b8_convert": ("u4b8", "integer to float"),
    "u4b8_table": ("u4b8", "table of 16"),
    "u5b16_masked": ("u5b16", "masked where it stands (ours)"),
    "u5b16_convert": ("u5b16", "integer to float"),
    "iq4nl_table": ("iq4nl", "table of 16 (ours)"),
}


@dataclass(frozen=True)
class Operations:
    """For each value, the multiplication with the scale included."""

    element: str
    way: str
    issue: dict[str, float]  # slots, by class of instruction
    cycles: float  # with the pipe of complex instructions


def count_operations() -> list[Operations]:
    """Of every variant."""
    code = intermediate_code()
    return [_count(name, *VARIANTS[name], code) for name in VARIANTS]


def intermediate_code() -> str:
    """variants.metal, compiled."""
    variants = (Path(__file__).parent / "variants.metal").read_text("utf-8")
    text = rewrite(constants() + source("decode.metal") + variants)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "variants.cpp").write_text(f"#include <metal_stdlib>\nusing namespace metal;\n{text}", "utf-8")
        find_compiler().run([*FLAGS, "-I", SHIM, "variants.cpp", "-o", "variants.ll"], Path(folder))
        return (Path(folder) / "variants.ll").read_text("utf-8")


def _count(name: str, element: str, way: str, code: str) -> Operations:
    function = next(each for each in read_functions(code) if each.name == name)
    for block in function.blocks:  # what it stores stays in registers once it is inlined
        block.instructions = [each for each in block.instructions if each.word != "store"]
    found = [each for block in function.blocks for each in charges(function, block)]
    issue = {kind: sum(each.issue * each.count for each in found if each.kind == kind) / VALUES for kind in CLASSES}
    pipe = sum(each.pipe * each.count for each in found) / VALUES
    return Operations(element, way, issue, max(sum(issue.values()), pipe))
