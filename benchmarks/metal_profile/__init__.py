"""`billfish profile`: what the Metal kernels do, counted where no Mac is at hand, and how long that should take.

Each kernel runs in the emulator, beside MLX's kernel for the same problem: instructions, bytes, and the time that
`cost` estimates of them for four chips. For the decode functions, operations are counted in compiled code.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from benchmarks.metal_profile.cost import CHIPS
from benchmarks.metal_profile.counts import MLX, Count, count_mlx, count_ours, mlx_counts
from benchmarks.metal_profile.operations import Operations, count_operations
from billfish.backends import emulator
from billfish.backends.emulator.compiler import find_compiler
from billfish.backends.metal import Kernels
from billfish.backends.metal.layout import element_axis
from billfish.cli import pictures
from billfish.cli.info import cpu_name, version_of
from billfish.core.errors import DataError, FormatError, ShapeError, complaint
from billfish.core.files import write_atomically
from billfish.core.format import Format, get_format
from billfish.core.machine import available_cores
from billfish.core.tables import print_table
from billfish.core.tensor import QuantizedTensor
from billfish.core.version import __version__
from billfish.ops.quantization import quantize

# Rows of weights that are quantized; more are the same again. What a kernel executes does not depend on them.
DIFFERENT_ROWS = 256


@dataclass(frozen=True)
class Settings:
    """What to count. :meth:`parse` makes it of the words of the command line."""

    formats: list[Format]
    shapes: list[tuple[int, int]]  # K and N
    m: list[int]
    json: Path | None = None
    plot: Path | None = None

    @classmethod
    def parse(
        cls,
        *,
        formats: str = "u4b8,q4_0,fp4,mxfp4,nvfp4,u4,q4_1,q4_k,q8_0,affine4",
        shape: str = "4096x4096,4096x14336",
        m: str = "1,2,4,8,64,512",
        json: str | None = None,
        plot: str | None = None,
    ) -> Settings:
        """Comma-separated lists, checked."""
        shapes = [each.split("x") for each in shape.split(",")]
        if not all(len(each) == 2 and all(size.isdecimal() and int(size) for size in each) for each in shapes):
            raise ShapeError(complaint("profile", "--shape", repr(shape), "KxN, such as 4096x4096,4096x14336"))
        rows = m.split(",")
        if not all(row.isdecimal() and int(row) for row in rows):
            raise ShapeError(complaint("profile", "--m", repr(m), "positive integers, such as 1,8,64"))
        found = [get_format(name, "profile") for name in formats.split(",")]
        for format in found:
            for k, _ in shapes:
                format.check_k("profile", int(k))
            if element_axis(format.element) is None:
                takes = "formats with codes that the Metal kernels have"
                raise FormatError(complaint("profile", "--formats", repr(format.name), takes))
        for flag, name in (("--json", json), ("--plot", plot)):
            if name is not None and (Path(name).is_dir() or not Path(name).absolute().parent.is_dir()):
                raise DataError(complaint("profile", flag, repr(name), "a file in a folder that exists"))
        files = (None if name is None else Path(name) for name in (json, plot))
        return cls(found, [(int(k), int(n)) for k, n in shapes], [int(row) for row in rows], *files)


def run(settings: Settings, out: TextIO | None = None) -> tuple[list[Count], list[Operations]]:
    """Count, print the tables, write the files."""
    if settings.plot is not None:
        from benchmarks.metal_profile import plot

        pictures.require()
    counts = count_all(settings)
    operations = count_operations()
    out = sys.stdout if out is None else out
    print_counts(counts, out)
    print(file=out)
    print_operations(operations, out)
    about = {"machine": counted_on(), "versions": versions()}
    if settings.json is not None:
        content = {
            **about,
            "compiler": counted_with(),
            "records": [count.as_json() for count in counts],
            "decode": [asdict(each) for each in operations],
        }
        write_atomically(settings.json, (json.dumps(content, indent=1) + "\n").encode())
    if settings.plot is not None:
        write_atomically(settings.plot, pictures.png(plot.picture(counts, operations, **about)))
    return counts, operations


def counted_on() -> dict[str, Any]:
    """The machine and the day."""
    about = {"cpu": cpu_name(), "architecture": platform.machine(), "threads": available_cores()}
    return about | {"date": time.strftime("%Y-%m-%d")}


def versions() -> dict[str, str]:
    """Whose kernels were counted, and what compiled them."""
    found = {"billfish": __version__, "MLX": version_of("mlx"), "compiler": find_compiler().version}
    return {name: version for name, version in found.items() if version is not None}


def counted_with() -> str:
    """What the counts depend on beside the kernels: the compiler, and the machine that it compiles for."""
    return f"{find_compiler().version} for {platform.machine()}"


def count_all(settings: Settings) -> list[Count]:
    """MLX's kernel and ours for every problem."""
    kernels = Kernels(emulator.metal_kernel)
    rng = np.random.default_rng(0)
    counts = []
    for format in settings.formats:
        for k, n in settings.shapes:
            q = weights(format, n, k, rng)
            for m in settings.m:
                x = rng.standard_normal((m, k), np.float32).astype(np.float16)
                counts += [count_mlx(q, x)] if mlx_counts(q) else []
                counts.append(count_ours(kernels, q, x))
    return counts


def weights(format: Format, n: int, k: int, rng: np.random.Generator) -> QuantizedTensor:
    """W [n, k], DIFFERENT_ROWS of it over and over."""
    some = quantize(rng.standard_normal((min(n, DIFFERENT_ROWS), k), np.float32), format)
    planes = {
        name: np.resize(plane, (n, *plane.shape[1:])) if plane.ndim else plane for name, plane in some.planes.items()
    }
    return QuantizedTensor.from_storage(format, format.pack(planes), some.group_size)


# ---- tables -----------------------------------------------------------------------------------------------------


def print_counts(counts: list[Count], out: TextIO) -> None:
    """Cycles for each weight, and the estimated time on each chip with what bounds it; ours beside MLX's."""
    rows = [
        [
            "format",
            "K x N",
            "kernel",
            "M",
            "cycles/weight",
            *(f"{chip.name}, us" for chip in CHIPS),
            "of MLX",
            "of least",
            "tg memory",
        ]
    ]
    theirs: Count | None = None
    for count in counts:
        theirs = count if count.owner == MLX else theirs
        estimates = [f"{count.estimated_us[chip.name]:.0f} {count.bound_by[chip.name]}" for chip in CHIPS]
        rows.append(
            [
                count.format,
                f"{count.k} x {count.n}",
                count.kernel,
                str(count.m),
                f"{count.cycles_per_weight:.2f}",
                *estimates,
                of_mlx(count, theirs),
                f"{count.ratio():.2f}",
                str(count.threadgroup_memory),
            ]
        )
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
