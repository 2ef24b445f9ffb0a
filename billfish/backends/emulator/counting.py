"""Counting what lanes execute: a counter for each block of LLVM's code, and what each block holds.

The compiled kernel carries a table [32 lanes, blocks] of how often each lane entered each block, and the charges of
every block. A simdgroup pays for a block if any of its lanes enters it: issued is 32 times the busiest lane's count.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.emulator.charge import CLASSES, charges, is_charged_whole
from billfish.backends.emulator.code import read_functions

LANES = 32
POSITION = "@_ZN8emulator8positionE"
LANE_OFFSET = 28  # of `lane` in emulator::Position, see runtime/emulator.h


@dataclass(frozen=True)
class Instructions:
    """Of a launch. `executed` are instructions of lanes, one for each part of a vector, by class (`charge.CLASSES`).

    `issue` and `pipe` are cycles of lanes, idle lanes of a simdgroup included; a core has 128 of them in a clock.
    """

    executed: dict[str, float]
    issue: dict[str, float]
    pipe: float  # of the pipe for complex instructions

    @property
    def slots(self) -> float:
        """Issue slots of all classes."""
        return sum(self.issue.values())

    @property
    def cycles(self) -> float:
        """Simple and complex instructions go down different pipes, so the longer of the two counts."""
        return max(self.slots, self.pipe)

    def scaled(self, factor: float) -> Instructions:
        """`factor` times as much of everything."""
        executed = {kind: factor * count for kind, count in self.executed.items()}
        return Instructions(executed, {kind: factor * count for kind, count in self.issue.items()}, factor * self.pipe)


def add_counters(code: str) -> str:
    """The same LLVM code, counting its blocks in @emulator_blocks; @emulator_contents says what is in each."""
    lines = code.splitlines()
    contents: list[list[tuple[str, int, float, float]]] = []
    for function in read_functions(code):
        if not function.seen or is_charged_whole(function.name):
            continue
        for block in function.blocks:
            lines[block.line - 1] += _count(len(contents))
            contents.append([(each.kind, each.count, each.issue, each.pipe) for each in charges(function, block)])
    text = json.dumps(contents)
    code = "\n".join(lines).replace("@@BLOCKS@@", f"[{LANES} x [{len(contents)} x i64]]")
    if f"{POSITION} =" not in code:
        code += f"\n{POSITION} = external global ptr"
    return (
        code
        + f"\n@emulator_blocks = global [{LANES} x [{len(contents)} x i64]] zeroinitializer, align 8"
        + f'\n@emulator_contents = constant [{len(text) + 1} x i8] c"{_quoted(text)}\\00"\n'
    )


def _quoted(text: str) -> str:
    return text.replace("\\", "\\5C").replace('"', "\\22")


def _count(block: int) -> str:
    """Lines that count one entry of a block by the running lane."""
    name = f"%emulator.{block}"
    return f"""
  {name}.position = load ptr, ptr {POSITION}
  {name}.pointer = getelementptr i8, ptr {name}.position, i64 {LANE_OFFSET}
  {name}.lane = load i32, ptr {name}.pointer
  {name}.counter = getelementptr @@BLOCKS@@, ptr @emulator_blocks, i64 0, i32 {name}.lane, i64 {block}
  {name}.before = load i64, ptr {name}.counter
  {name}.after = add i64 {name}.before, 1
  store i64 {name}.after, ptr {name}.counter"""


class Counted:
    """The table of a kernel that was compiled with counters."""

    def __init__(self, library: ctypes.CDLL) -> None:
        text = ctypes.addressof(ctypes.c_char.in_dll(library, "emulator_contents"))
        self._contents: list[list[tuple[str, int, float, float]]] = json.loads(ctypes.string_at(text))
        table = (ctypes.c_uint64 * (LANES * len(self._contents))).in_dll(library, "emulator_blocks")
        self._table: NDArray[Any] = np.ctypeslib.as_array(table).reshape(LANES, len(self._contents))

    def clear(self) -> None:
        self._table[:] = 0

    def instructions(self) -> Instructions:
        """Since `clear`."""
        executed, issue, pipe = dict.fromkeys(CLASSES, 0.0), dict.fromkeys(CLASSES, 0.0), 0.0
        entered, issued = self._table.sum(axis=0), LANES * self._table.max(axis=0)
        for content, lanes, slots in zip(self._contents, entered.tolist(), issued.tolist(), strict=True):
            for kind, count, issue_cycles, pipe_cycles in content:
                executed[kind] += count * lanes
                issue[kind] += count * issue_cycles * slots
                pipe += count * pipe_cycles * slots
        return Instructions(executed, issue, pipe)
