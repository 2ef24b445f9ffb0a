"""`billfish profile`: what the Metal kernels do, counted where no Mac is at hand.

Each kernel runs in the emulator, beside MLX's kernel for the same problem; device bytes are held against the least
possible, which is every buffer once. For the decode functions, operations are counted in compiled code.
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

from billfish import pictures
from billfish.backends.metal import Kernels, emulator
from billfish.backends.metal.emulator.compiler import find_compiler
from billfish.backends.metal.layout import element_axis
from billfish.errors import DataError, FormatError, ShapeError, complaint
from billfish.files import write_atomically
from billfish.format import Format, get_format
from billfish.info import cpu_name, version_of
from billfish.machine import available_cores
from billfish.profile.counts import Count, count_mlx, count_ours, kernels_for, mlx_counts
from billfish.profile.operations import Operations, count_operations
from billfish.quantizing import quantize
from billfish.tables import print_table
from billfish.version import __version__


@dataclass(frozen=True)
class Settings:
    """What to count. :meth:`parse` makes it of the words of the command line."""

    formats: list[Format]
    k: int
    n: int
    m: list[int]
    json: Path | None = None
    plot: Path | None = None

    @classmethod
    def parse(
        cls,
        *,
        formats: str = "mxfp4,nvfp4,affine4",
        shape: str = "512x256",
        m: str = "1,8,16,64",
        json: str | None = None,
        plot: str | None = None,
    ) -> Settings:
        """Comma-separated lists, checked."""
        sizes = shape.split("x")
        if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
            raise ShapeError(complaint("profile", "--shape", repr(shape), "KxN, such as 512x256"))
        rows = m.split(",")
        if not all(row.isdecimal() and int(row) for row in rows):
            raise ShapeError(complaint("profile", "--m", repr(m), "positive integers, such as 1,8,64"))
        k, n = map(int, sizes)
        found = [get_format(name, "profile") for name in formats.split(",")]
        for format in found:
            format.check_k("profile", k)
            if element_axis(format.element) is None:
                takes = "formats with codes that the Metal kernels have"
                raise FormatError(complaint("profile", "--formats", repr(format.name), takes))
        for flag, name in (("--json", json), ("--plot", plot)):
            if name is not None and (Path(name).is_dir() or not Path(name).absolute().parent.is_dir()):
                raise DataError(complaint("profile", flag, repr(name), "a file in a folder that exists"))
        files = (None if name is None else Path(name) for name in (json, plot))
        return cls(found, k, n, [int(row) for row in rows], *files)


def run(settings: Settings, out: TextIO | None = None) -> tuple[list[Count], list[Operations]]:
    """Count, print the tables, write the files."""
    if settings.plot is not None:
        from billfish.profile import plot

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
            "launches": [count.as_json() for count in counts],
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
    """Every kernel of ours for every problem, and MLX's."""
    kernels = Kernels(emulator.metal_kernel)
    rng = np.random.default_rng(0)
    counts = []
    for format in settings.formats:
        q = quantize(rng.standard_normal((settings.n, settings.k), np.float32), format)
        for m in settings.m:
            x = rng.standard_normal((m, settings.k), np.float32).astype(np.float16)
            if mlx_counts(q):
                counts.append(count_mlx(q, x))
            for kernel in kernels_for(m):
                counts += count_ours(kernels, q, x, kernel)
    return counts


# ---- tables -----------------------------------------------------------------------------------------------------

# The buffers of both, under one name.
ROLES = {"x": ("x",), "codes": ("codes", "high", "w"), "scales": ("scales", "offsets", "biases")}


def print_counts(counts: list[Count], out: TextIO) -> None:
    """KiB, and how often each buffer is read; for all threadgroups together."""
    rows = [
        [
            "format",
            "kernel",
            "M",
            "read KiB",
            "of least",
            *ROLES,
            "written",
            "tg KiB",
            "tg barriers",
            "MMAs",
            "tg memory",
        ]
    ]
    for count in counts:
        padding = f"+{count.padding}" if count.padding else ""
        rows.append(
            [
                count.format,
                count.kernel,
                str(count.m),
                f"{count.total_read / 1024:.1f}",
                f"{count.ratio():.2f}",
                *(f"{count.ratio(*names):.2f}" if count.ratio(*names) else "-" for names in ROLES.values()),
                f"{count.written / 1024:.1f}",
                f"{count.threadgroup_bytes / 1024:.0f}",
                str(count.threadgroup_barriers),
                str(count.matrix_multiplies),
                f"{count.threadgroup_memory - count.padding}{padding}",
            ]
        )
    print_table(rows, out, left=2, keys=3)


def print_operations(operations: list[Operations], out: TextIO) -> None:
    """Operations for each decoded value."""
    rows = [["element", "decoded by", "integer", "floating", "conversions", "memory"]]
    for each in operations:
        numbers = (each.integer, each.floating, each.conversions, each.memory)
        rows.append([each.element, each.way, *(f"{number:.2f}" for number in numbers)])
    print_table(rows, out, left=2, keys=2)
