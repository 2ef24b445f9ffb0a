"""Which loads and stores of a block a GPU makes together, and which it does not make.

Neighbours of one size are one access: four at most, 16 bytes at most.
"""

from __future__ import annotations

from billfish.backends.emulator.code import Block, Function, Instruction, Type

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
