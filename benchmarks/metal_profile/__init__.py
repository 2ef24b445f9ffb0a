"""Count what the Metal kernels execute, beside MLX's, and estimate times for four chips; no Mac is needed.

Each kernel runs in the emulator, beside MLX's kernel for the same problem: instructions, bytes, and the time that
`cost` estimates of them. For the decode functions, operations are counted in compiled code.

example: python -m benchmarks.metal_profile --formats mxfp4 --shapes 4096x4096 --m 1,64
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

import numpy as np

from benchmarks import command, machine, records
from benchmarks.metal_profile.cost import CHIPS
from benchmarks.metal_profile.counts import MLX, Count, count_product
from benchmarks.metal_profile.operations import Operations, count_operations
from benchmarks.peers import Case
from billfish.backends import emulator
from billfish.backends.emulator.compiler import find_compiler
from billfish.backends.metal import Kernels
from billfish.backends.metal.layout import element_axis
from billfish.core.errors import FormatError
from billfish.core.format import Format, get_format
from billfish.core.machine import available_cores
from billfish.core.tables import print_table


def parser() -> command.Parser:
    made = command.parser(__spec__, __doc__)
    made.listed("--formats", "formats", "u4b8,q4_0,fp4,mxfp4,nvfp4,u4,q4_1,q4_k,q8_0,affine4,affine8,mxfp8")
    made.listed("--shapes", "KxN of the weights", "4096x4096,4096x14336", command.shapes)
    made.listed("--m", "rows of x", "1,2,4,8,64,512", command.positives)
    return made


def formats_of(flags: argparse.Namespace) -> list[Format]:
    """The formats of --formats, checked: the Metal kernels have their codes, and they take the K of all shapes."""
    found = [get_format(name) for name in flags.formats]
    for format in found:
        for k, _ in flags.shapes:
            format.check_k("metal_profile", k)
        if element_axis(format.element) is None:
            raise FormatError(f"--formats: the Metal kernels have no codes of {format.name!r}.")
    return found


def main(words: Sequence[str] | None = None) -> None:
    made = parser()
    flags = made.parse_args(words)
    with command.errors_end(made):
        formats = formats_of(flags)
        counts, operations = count_all(formats, flags.shapes, flags.m), count_operations()
    print_counts(counts, sys.stdout)
    print()
    print_operations(operations, sys.stdout)
    about = {
        "machine": {"cpu": machine.cpu_name(), "architecture": platform.machine(), "threads": available_cores()}
        | machine.today(),
        "versions": versions(),
    }
    content = {"records": [asdict(count) for count in counts], "decode": [asdict(each) for each in operations]}
    records.write(flags.json, about | {"compiler": counted_with()} | content)


def versions() -> dict[str, str]:
    """Whose kernels were counted, and what compiled them."""
    found = machine.versions("mlx") | {"compiler": find_compiler().version}
    return {"MLX" if name == "mlx" else name: version for name, version in found.items()}


def counted_with() -> str:
    """What the counts depend on beside the kernels: the compiler, and the machine that it compiles for."""
    return f"{find_compiler().version} for {platform.machine()}"


def count_all(formats: list[Format], shapes: list[tuple[int, int]], rows: list[int]) -> list[Count]:
    """MLX's kernel and ours for every problem. What a kernel executes does not depend on its numbers."""
    kernels, counts = Kernels(emulator.metal_kernel), []
    for format in formats:
        for k, n in shapes:
            size = format.check_group_size("metal_profile", None, k)
            q = Case(format, size, k, n, "exact").tensor()
            for m in rows:
                x = np.random.default_rng(m).standard_normal((m, k), np.float32).astype(np.float16)
                counts += count_product(kernels, q, x)
    return counts


# ---- tables -----------------------------------------------------------------------------------------------------


def print_counts(counts: list[Count], out: TextIO) -> None:
    """Cycles for each weight, and the estimated time on each chip with what bounds it; ours beside MLX's."""
    chips = [chip.name for chip in CHIPS]
    head = ["format", "K x N", "kernel", "M", "cycles/weight", *(f"{chip}, us" for chip in chips)]
    rows = [[*head, "of MLX", "of least", "tg memory"]]
    theirs: Count | None = None
    for count in counts:
        theirs = count if count.owner == MLX else theirs
        cells: list[Any] = [count.format, f"{count.k} x {count.n}", count.kernel, count.m]
        cells += [f"{count.cycles_per_weight:.2f}"]
        cells += [f"{count.estimated_us[chip]:.0f} {count.bound_by[chip]}" for chip in chips]
        cells += [of_mlx(count, theirs), f"{count.ratio():.2f}", count.threadgroup_memory]
        rows.append([str(cell) for cell in cells])
    print_table(rows, out, left=3, keys=4)


def of_mlx(count: Count, theirs: Count | None) -> str:
    """The estimated time as a part of MLX's, on the chip where it is the largest; "-" where MLX has no such kernel."""
    problem = (count.format, count.m, count.k, count.n)
    if count.owner == MLX or theirs is None or problem != (theirs.format, theirs.m, theirs.k, theirs.n):
        return "-"
    return f"{max(us / theirs.estimated_us[chip] for chip, us in count.estimated_us.items()):.2f}"


def print_operations(operations: list[Operations], out: TextIO) -> None:
    """Issue slots for each decoded value, by class, and cycles."""
    kinds = list(operations[0].issue)
    rows = [["element", "decoded by", *kinds, "cycles"]]
    for each in operations:
        rows.append([each.element, each.way, *(f"{each.issue[kind]:.2f}" for kind in kinds), f"{each.cycles:.2f}"])
    print_table(rows, out, left=2, keys=2)
