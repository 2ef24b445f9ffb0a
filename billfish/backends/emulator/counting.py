"""Counting what lanes execute: a counter for each block of LLVM's code, and what each block holds.

The compiled kernel carries a table [32 lanes, blocks] of how often each lane entered each block, and the charges of
every block. A simdgroup pays for a block if any of its lanes enters it: issued is 32 times the busiest lane's count.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

# ---- LLVM code as text -----------------------------------------------------------------------------------------------


_FUNCTION = re.compile(r'^define .*?@"?(?P<name>[\w.$]+)"?\(.* #(?P<attributes>\d+)')
_ATTRIBUTES = re.compile(r"^attributes #(\d+) = \{(.*)\}")
_LABEL = re.compile(r'^(?:[\w.$-]+|"[^"]*"):')
_RESULT = re.compile(r'^(%(?:[\w.$-]+|"[^"]*")) = ')
_VALUE = re.compile(r'%(?:[\w.$-]+|"[^"]*")')
_DEBUG = re.compile(r"(?:, ![a-z.]+ ![0-9]+)+$")
_FLAGS = re.compile(
    r"^(?:(?:nsw|nuw|exact|disjoint|nneg|inbounds|nusw|samesign|contract|nsz|arcp|afn|reassoc|nnan|ninf|fast|volatile"
    r"|tail|musttail|notail) )*"
)
_TYPE = re.compile(r"<(?P<parts>\d+) x (?P<element>\w+)>|(?P<scalar>\w+)|\[.*?\]")
BITS = {"half": 16, "bfloat": 16, "float": 32, "double": 64, "ptr": 64}


@dataclass(frozen=True)
class Type:
    """A scalar, or a vector of `parts`."""

    element: str
    parts: int = 1

    @classmethod
    def read(cls, text: str) -> Type:
        """The type that `text` begins with."""
        found = _TYPE.match(text)
        if found is None or (found["scalar"] is None and found["element"] is None):
            return cls("aggregate")
        return cls(found["scalar"] or found["element"], int(found["parts"] or 1))

    @property
    def bits(self) -> int:
        """Of one part."""
        return BITS.get(self.element) or (int(self.element[1:]) if re.fullmatch(r"i\d+", self.element) else 0)


@dataclass(eq=False)
class Instruction:
    """One statement: `result` = `word` `rest`, the flags of arithmetic left out."""

    result: str | None
    word: str
    rest: str

    @classmethod
    def read(cls, line: str) -> Instruction:
        text = _DEBUG.sub("", line.strip())
        result = _RESULT.match(text)
        text = text[result.end() :] if result else text
        text = _FLAGS.sub("", text)
        word, _, rest = text.partition(" ")
        return cls(result[1] if result else None, word, _FLAGS.sub("", rest))

    @property
    def type(self) -> Type:
        """Of the operands; for a comparison the type behind its predicate, for a selection that of its values."""
        text = self.rest
        if self.word in ("icmp", "fcmp"):
            text = _FLAGS.sub("", text.split(" ", 1)[1])
        elif self.word == "select":
            text = self.operands[1] if len(self.operands) > 1 else text
        return Type.read(text)

    @cached_property
    def operands(self) -> list[str]:
        """Split at the commas that are not inside of brackets."""
        parts, depth = [""], 0
        for character in self.rest:
            depth += (character in "<([{") - (character in ">)]}")
            if character == "," and depth == 0:
                parts.append("")
            else:
                parts[-1] += character
        return [part.strip() for part in parts]

    @cached_property
    def uses(self) -> list[str]:
        """The values that it takes, labels among them."""
        return _VALUE.findall(self.rest)

    @property
    def called(self) -> str:
        """The function's name, of a call."""
        found = re.search(r'@"?([\w.$]+)"?\(', self.rest)
        return found[1] if found else ""

    @property
    def arguments(self) -> list[str]:
        """Of a call, each with its type."""
        inside = self.rest[self.rest.index("(", self.rest.find("@")) + 1 : self.rest.rindex(")")]
        return Instruction(None, "", inside).operands

    def knows(self, operand: int) -> bool:
        """Whether an operand is a constant, be it another one in each part."""
        return "%" not in self.operands[operand]

    def constant(self, operand: int) -> int | None:
        """The integer that an operand is, the same in all parts, or None if it is no constant."""
        if operand >= len(self.operands):
            return None
        text = self.operands[operand]
        numbers = re.findall(r"(?:^|i\d+ )(-?\d+)", text.removeprefix("splat ").strip("()"))
        return int(numbers[0]) if numbers and not _VALUE.search(text) and len(set(numbers)) == 1 else None


@dataclass(eq=False)
class Block:
    """A basic block: once entered, all of it runs. `line` is where a counter can be put in."""

    line: int
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(eq=False)
class Function:
    """What is known of a function: by whom each value is made, and who takes it."""

    name: str
    seen: bool  # by the sanitizer; what is not is the emulator's own
    blocks: list[Block] = field(default_factory=list)

    @cached_property
    def makers(self) -> dict[str, Instruction]:
        return {each.result: each for block in self.blocks for each in block.instructions if each.result}

    @cached_property
    def takers(self) -> dict[str, list[Instruction]]:
        takers: dict[str, list[Instruction]] = {}
        for block in self.blocks:
            for each in block.instructions:
                if "__tsan_" in each.rest:  # looks on
                    continue
                for value in each.uses:
                    takers.setdefault(value, []).append(each)
        return takers

    def users(self, instruction: Instruction) -> list[Instruction]:
        """Who takes its result."""
        return self.takers.get(instruction.result or "", [])

    def maker(self, operand: str) -> Instruction | None:
        """Of an operand, such as `i32 %5`; None for arguments of the function and constants."""
        found = _VALUE.search(operand)
        return self.makers.get(found[0]) if found else None


def read_functions(code: str) -> Iterator[Function]:
    """All that are defined in a module."""
    lines = code.splitlines()
    attributes = {found[1]: found[2] for line in lines if (found := _ATTRIBUTES.match(line))}
    function: Function | None = None
    line = 0
    while line < len(lines):
        text = lines[line]
        if found := _FUNCTION.match(text):
            function = Function(found["name"], "sanitize_thread" in attributes[found["attributes"]], [Block(line + 1)])
        elif function is not None and text == "}":
            yield function
            function = None
        elif function is not None and _LABEL.match(text):
            if function.blocks[-1].instructions:  # the first block may have a label or none
                function.blocks.append(Block(line + 1))
            else:
                function.blocks[-1].line = line + 1
        elif function is not None and text.strip() and not text.lstrip().startswith(("#dbg", ";")):
            while text.rstrip().endswith("[") or (text.count("[") > text.count("]")):  # the cases of a switch
                line += 1
                text += " " + lines[line].strip()
            block, instruction = function.blocks[-1], Instruction.read(text)
            block.instructions.append(instruction)
            if instruction.word in ("phi", "alloca"):
                block.line = line + 1
        line += 1


# ---- loads and stores that a GPU merges ------------------------------------------------------------------------------


MOST_PARTS, MOST_BYTES = 4, 16


def merged_accesses(function: Function, block: Block) -> set[Instruction]:
    """Those that are part of an access before them. Nothing is moved over a barrier or an atomic operation."""
    merged: set[Instruction] = set()
    run: list[Instruction] = []
    for instruction in block.instructions:
        if instruction.word in ("load", "store"):
            if not in_registers(function, instruction.operands[1]):
                run.append(instruction)
        elif instruction.word == "call" and ("_barrier" in instruction.called or "atomic_" in instruction.called):
            merged |= _merge(function, run)
            run = []
    return merged | _merge(function, run)


def _merge(function: Function, run: list[Instruction]) -> set[Instruction]:
    """Of accesses that may be made in any order."""
    places: dict[tuple[str, str, Type], dict[int, Instruction]] = {}
    for access in run:
        base, offset = _place(function, access.operands[1])
        places.setdefault((access.word, base, access.type), {}).setdefault(offset, access)
    merged: set[Instruction] = set()
    for (_, _, type_), by_offset in places.items():
        size = max(type_.parts * type_.bits // 8, 1)
        most = min(MOST_PARTS // type_.parts, MOST_BYTES // size)
        first, count = -1, 0
        for offset in sorted(by_offset):
            if count and offset == first + count * size and count < most:
                merged.add(by_offset[offset])
                count += 1
            else:
                first, count = offset, 1
    return merged


def in_registers(function: Function, pointer: str) -> bool:
    """Whether an operand points at a known place among a thread's own variables, which a GPU keeps in registers.

    The emulator keeps some in memory: its simdgroup matrices go to functions by reference.
    """
    maker = function.maker(_place(function, pointer)[0])
    return maker is not None and maker.word == "alloca"


def _place(function: Function, operand: str) -> tuple[str, int]:
    """The pointer that an address was made of, and how many bytes behind it."""
    offset = 0
    while (maker := function.maker(operand)) is not None and maker.word == "getelementptr":
        step = maker.constant(2)
        if len(maker.operands) != 3 or step is None:
            break
        offset += step * max(maker.type.parts * maker.type.bits // 8, 1)
        operand = maker.operands[1]
    return operand, offset


# ---- what an Apple GPU charges ---------------------------------------------------------------------------------------


CLASSES = ("simple", "complex", "worse", "between lanes", "matrix", "memory")


@dataclass(frozen=True)
class Charge:
    """`count` instructions of a class; `issue` and `pipe` are the cycles of one of them."""

    kind: str
    issue: float
    pipe: float = 0.0
    count: int = 1


SIMPLE = Charge("simple", 1)
COMPLEX = Charge("complex", 1, 4)
RECIPROCAL, ROOT = Charge("complex", 1, 6), Charge("complex", 1, 8)
WORSE = Charge("worse", 1, 8)
ADD64, MULTIPLY64 = Charge("worse", 4), Charge("worse", 1, 16)
MEMORY = Charge("memory", 1)
MATRIX = Charge("matrix", 20.5)

_FREE = {
    "phi",
    "alloca",
    "ret",
    "bitcast",
    "zext",
    "sext",
    "trunc",
    "fpext",
    "fptrunc",
    "fneg",
    "freeze",
    "unreachable",
}
_FREE |= {"shufflevector", "insertvalue", "extractvalue", "ptrtoint", "inttoptr"}
_CONVERSIONS = {"uitofp", "sitofp", "fptoui", "fptosi"}
_NARROWER = {"zext", "sext"}

# Functions of the shim across lanes: cycles for each 32-bit part.
_SUM = {"simd": 15.0, "quad": 7.0}
_SHUFFLED, _COMPUTED = 2.0, 30.0
# Those of the C library.
_LIBRARY = {
    **dict.fromkeys(("expf", "exp2f", "logf", "log2f", "log10f"), COMPLEX),
    **dict.fromkeys(("sinf", "cosf"), Charge("complex", 4, 14)),
}
_INTRINSICS = {
    **dict.fromkeys(("fma", "fmuladd", "minnum", "maxnum", "minimum", "maximum", "minimumnum", "maximumnum"), SIMPLE),
    **dict.fromkeys(("umin", "umax", "smin", "smax", "abs", "uadd", "usub", "sadd", "ssub", "copysign"), SIMPLE),
    **dict.fromkeys(("ctpop", "bitreverse", "ctlz", "cttz", "rint", "floor", "ceil", "trunc", "round"), COMPLEX),
    **dict.fromkeys(("roundeven", "nearbyint", "exp", "exp2", "log", "log2", "log10"), COMPLEX),
    **dict.fromkeys(("fshl", "fshr", "bswap", "ldexp"), WORSE),
    **dict.fromkeys(("sin", "cos"), _LIBRARY["sinf"]),
    "sqrt": ROOT,
}
_FREE_INTRINSICS = {"lifetime", "assume", "dbg", "fabs", "experimental", "returnaddress", "threadlocal"}


def charges(function: Function, block: Block) -> Iterator[Charge]:
    """Of every instruction of a block."""
    merged = merged_accesses(function, block)
    for instruction in block.instructions:
        charge = None if instruction in merged else _charge(function, instruction)
        if charge is not None:
            yield charge


def _times(charge: Charge, count: int) -> Charge:
    return Charge(charge.kind, charge.issue, charge.pipe, count)


def _charge(function: Function, instruction: Instruction) -> Charge | None:
    word, type_ = instruction.word, instruction.type
    if word in _FREE:
        return None
    if word in ("insertelement", "extractelement"):  # with an index that is computed: a choice among the parts
        return _times(SIMPLE, type_.parts) if "%" in instruction.operands[-1] else None
    if word == "getelementptr":
        return _address(function, instruction)
    if word == "load":
        free = _is_position(instruction) or in_registers(function, instruction.operands[1])
        return None if free else MEMORY
    if word == "store":
        return None if in_registers(function, instruction.operands[1]) else MEMORY
    if word == "br":
        return SIMPLE if instruction.rest.startswith("i1") else None
    if word == "switch":
        return _times(SIMPLE, 2 * instruction.rest.count("label") - 2)
    if word == "call":
        return _call(function, instruction)
    found = _arithmetic(function, instruction, type_)
    if found is None:
        return None
    return _times(found, type_.parts)


def _arithmetic(function: Function, instruction: Instruction, type_: Type) -> Charge | None:
    """For one part."""
    word, wide = instruction.word, type_.element == "i64"
    if word in ("and", "or", "xor"):
        if word == "and" and _extracts(function, instruction):
            return None
        return Charge("simple", 2) if wide else SIMPLE
    if word in ("add", "sub"):
        if wide:
            return ADD64
        return None if _absorbed(function, instruction, "mul") else SIMPLE
    if word == "shl":
        return _left(function, instruction, wide)
    if word in ("lshr", "ashr"):
        return _right(function, instruction, type_)
    if word == "mul":
        return _multiply(function, instruction, wide)
    if word in ("udiv", "sdiv", "urem", "srem"):
        return _divide(instruction)
    if word == "fmul":
        taker = _only_taker(function, instruction)
        fused = taker is not None and taker.word in ("fadd", "fsub")
        return None if fused and _absorbed(function, taker, "fmul") is instruction else SIMPLE
    if word in ("fadd", "fsub"):
        return SIMPLE
    if word == "fdiv":
        return RECIPROCAL
    if word in ("icmp", "fcmp"):
        takers = function.users(instruction)
        return None if takers and all(taker.word == "select" for taker in takers) else SIMPLE
    if word == "select":
        return SIMPLE
    if word in _CONVERSIONS:
        return COMPLEX
    raise ValueError(f"no class for {word} {instruction.rest}")


# ---- what a GPU does in one instruction -------------------------------------------------------------------------


def _only_taker(function: Function, instruction: Instruction) -> Instruction | None:
    takers = function.users(instruction)
    return takers[0] if len(takers) == 1 else None


def _absorbed(function: Function, addition: Instruction | None, word: str) -> Instruction | None:
    """The product or shift that an addition takes in: one, made for it alone."""
    for operand in addition.operands[:2] if addition is not None else ():
        maker = function.maker(operand)
        if maker is None or maker.word != word or _only_taker(function, maker) is not addition:
            continue
        if word != "shl" or maker.constant(1) in range(1, 5):
            return maker
    return None


def _extracts(function: Function, instruction: Instruction) -> bool:
    """Whether `and` cuts off the low bits of what a right shift brought down: together a bit-field extract."""
    mask = instruction.constant(1)
    if mask is None or mask <= 0 or mask & (mask + 1):
        return False
    shift = function.maker(instruction.operands[0])
    return (
        shift is not None
        and shift.word == "lshr"
        and shift.constant(1) is not None
        and _only_taker(function, shift) is instruction
        and not _moves_half(function, shift)
    )


def _left(function: Function, instruction: Instruction, wide: bool) -> Charge | None:
    by, taker = instruction.constant(1), _only_taker(function, instruction)
    if taker is not None and taker.word == "add" and not wide and _absorbed(function, taker, "shl") is instruction:
        return None
    operand = function.maker(instruction.operands[0])
    if by == 16 and operand is not None and operand.word == "zext" and Type.read(operand.rest).bits == 16:
        return None  # names the upper half of a register
    return Charge("complex", 2, 8) if wide else COMPLEX


def _right(function: Function, instruction: Instruction, type_: Type) -> Charge | None:
    if _moves_half(function, instruction):
        return None
    known = instruction.knows(1)
    if type_.element == "i64":
        return None if instruction.constant(1) == 32 else (COMPLEX if known else WORSE)
    return COMPLEX if known else WORSE


def _moves_half(function: Function, shift: Instruction) -> bool:
    """Whether a shift only names the upper half of a register."""
    takers = function.users(shift)
    cut = all(
        taker.word == "trunc" and Type.read(taker.operands[0].rsplit(" to ", 1)[1]).bits == 16 for taker in takers
    )
    return shift.constant(1) == 16 and shift.type.element == "i32" and bool(takers) and cut


def _multiply(function: Function, instruction: Instruction, wide: bool) -> Charge:
    if not wide:
        return COMPLEX
    makers = [function.maker(operand) for operand in instruction.operands[:2]]
    narrow = [each is not None and each.word in _NARROWER for each in makers]
    narrow[1] |= instruction.constant(1) is not None
    return WORSE if all(narrow) else MULTIPLY64


def _divide(instruction: Instruction) -> Charge:
    """By a power of two a shift or a mask, by another constant a product; else a sequence around a reciprocal."""
    by = instruction.constant(1)
    if by is None:
        return Charge("worse", 8, 24)
    if by > 0 and by & (by - 1) == 0:
        return SIMPLE if instruction.word == "urem" else COMPLEX
    return Charge("worse", 2, 12)


def _address(function: Function, instruction: Instruction) -> Charge | None:
    """Loads and stores add a constant, or a register of 32 bits, to a 64-bit base; all else is a 64-bit addition."""
    indices = [operand for operand in instruction.operands[2:] if "%" in operand]
    takers = function.users(instruction)
    reached = all(taker.word in ("load", "store") or taker.word == "call" for taker in takers)
    if not indices:
        return ADD64 if any(taker.word == "phi" for taker in takers) else None
    makers = [function.maker(index) for index in indices]
    narrow = len(indices) == 1 and makers[0] is not None and makers[0].word in _NARROWER
    return None if reached and narrow else ADD64


def _is_position(load: Instruction) -> bool:
    """Whether a load asks the emulator where the thread is; a GPU has it in a register."""
    return "@_ZN8emulator" in load.rest


# ---- calls --------------------------------------------------------------------------------------------------------


def is_charged_whole(name: str) -> bool:
    """Whether a function of the shim stands for one instruction of a GPU; what it does inside is the emulator's."""
    return re.match(r"_ZZ?N5metal\d+(?:simd|quad|threadgroup_barrier|atomic_)|_ZNK?3mpp", name) is not None


def _call(function: Function, instruction: Instruction) -> Charge | None:
    name, type_ = (
        instruction.called,
        Type.read(re.sub(r"^(?:noundef |nofpclass\(\w+\) |range\(.*?\) )*", "", instruction.rest)),
    )
    if name.startswith("__tsan_") or not name:
        return None
    if name in _LIBRARY:
        return _LIBRARY[name]
    if found := re.match(r"llvm\.(\w+)", name):
        return _intrinsic(found[1], function, instruction, type_)
    if found := re.match(r"_ZN5metal\d+((?:simd|quad)_[a-z_]+)", name):
        return _between_lanes(found[1], instruction, type_)
    if "simdgroup_multiply_accumulate" in name:
        return MATRIX
    if "simdgroup_load" in name or "simdgroup_store" in name:
        # Two neighbours of a row in each lane; of a column they are two accesses.
        return _times(MEMORY, 1 if instruction.arguments[-1].endswith(("false", " 0")) else 2)
    if re.match(r"_ZN5metal\d+(?:threadgroup_barrier|simdgroup_barrier|atomic_)", name) or "device_fence" in name:
        return None if "simdgroup_barrier" in name and " 0" in instruction.arguments[0] else MEMORY
    return None  # a function of the kernel's own, whose blocks are counted, or a question for the thread's place


def _intrinsic(name: str, function: Function, instruction: Instruction, type_: Type) -> Charge | None:
    if name in _FREE_INTRINSICS:
        return None
    if name in ("memset", "memcpy", "memmove"):
        size = re.search(r"i64 (\d+)", instruction.rest)
        pointers = instruction.arguments[: 1 if name == "memset" else 2]
        if all(in_registers(function, pointer) for pointer in pointers):
            return None
        return _times(MEMORY, -(-int(size[1]) // 16) if size else 1)
    if name == "vector":  # llvm.vector.reduce.add.v4i32
        operand = Type.read(instruction.arguments[-1])
        return _times(SIMPLE, operand.parts - 1)
    if name not in _INTRINSICS:
        raise ValueError(f"no class for llvm.{name}")
    return _times(_INTRINSICS[name], type_.parts)


def _between_lanes(name: str, instruction: Instruction, type_: Type) -> Charge:
    parts = max(type_.parts * max(type_.bits, 32) // 32, 1)
    scope, _, operation = name.partition("_")
    if operation in ("sum", "product", "max", "min", "and", "or", "xor") or operation.startswith("prefix"):
        return Charge("between lanes", _SUM[scope], 0, parts)
    by_index = name in ("simd_shuffle",) and "%" in instruction.arguments[-1]
    by_register = operation.startswith("shuffle_") and scope == "simd" and "%" in instruction.arguments[-1]
    return Charge("between lanes", _COMPUTED if by_index or by_register else _SHUFFLED, 0, parts)


# ---- counters --------------------------------------------------------------------------------------------------------


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
