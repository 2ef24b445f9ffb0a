"""What an Apple GPU charges for each instruction of LLVM's code: its class, issue slots, cycles of the complex pipe.

Figures: philipturner/metal-benchmarks (M1, M1 Max; M2 alike), for one lane at full occupancy. docs/metal.md has the
table, the rules by which LLVM's instructions become a GPU's, and what is assumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from billfish.backends.emulator.accesses import in_registers, merged_accesses
from billfish.backends.emulator.code import Block, Function, Instruction, Type

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
    return re.match(r"_ZZ?N5metal\d+(?:simd|quad|threadgroup_barrier|atomic_)", name) is not None


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
