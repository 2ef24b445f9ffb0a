"""ISA levels: no two share a function, and those of x86 run on any machine, compiled against emulated instructions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from build_cache import kept
from cases import first

import billfish.backends.cpu
from billfish.backends.cpu import _cpu

SOURCES = Path(billfish.backends.cpu.__file__).parent
BUILD = Path(__file__).parents[3] / "build"
EMULATED = Path(__file__).parents[2] / "support" / "emulated"
FLAGS = ["-std=c++17", "-O0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", f"-I{SOURCES}"]


def sources() -> list[tuple[str, str]]:
    """All that the program is made of, and more."""
    files = [path for folder in (SOURCES, EMULATED) for path in folder.rglob("*") if path.suffix in (".h", ".cpp")]
    return sorted((str(path), path.read_text()) for path in files)


@pytest.fixture
def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if found is None:
        pytest.skip("no C++ compiler")
    return found


# Of a level: what multiplies. Few rows have kernels of their own where a level has instructions for them.
PRODUCTS = ["level", "level_exact", "level_floats"]
FEW_ROWS = ["level_few", "level_few_nibbles"]


def of_level(name: str, header: str) -> list[str]:
    return [f"-DBILLFISH_ISA={name}", f'-DBILLFISH_SIMD="{header}"']


@pytest.mark.parametrize("level", first(1, ["avx2", "avx_vnni"]))
def test_sums_of_blocks_are_exact(compiler, level):
    """Sums of 16 bits do not overflow, whatever codes and x are."""
    flags = [*FLAGS, f"-I{EMULATED}", *of_level(level, f"simd/{level}.h")]
    command = [compiler, *flags, str(EMULATED / "compare_sums.cpp")]

    def build(program: Path) -> None:
        subprocess.run([*command, "-o", str(program)], check=True)

    program = kept(f"compare-sums-{level}", (command, sources()), build)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert result.stdout.endswith("sums, 0 wrong\n")


@pytest.mark.parametrize("name", [*PRODUCTS, *FEW_ROWS])
def test_emulated_instructions_are_all_that_avx512_needs(compiler, name):
    """Quick, so that a machine with AVX-512 finds out, too."""
    flags = [*FLAGS, f"-I{EMULATED}", *of_level("avx512_vnni", "simd/avx512.h"), "-fsyntax-only"]
    result = subprocess.run([compiler, *flags, str(SOURCES / f"level/{name}.cpp")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def level(name: str, header: str, files: list[str], *more: str) -> list[tuple[str, Path, list[str]]]:
    """Objects of a level to compile: their names, sources and flags."""
    return [(f"{name}-{file}.o", SOURCES / f"level/{file}.cpp", [*of_level(name, header), *more]) for file in files]


def run_comparison(name: str, compiler: str, folder: Path, levels: list[tuple[str, Path, list[str]]]) -> None:
    """Compile levels with `name`.cpp, which compares their products, and run it."""

    def compile_to(name: str, source: Path, *more: str) -> str:
        out = str(folder / name)
        result = subprocess.run([compiler, *more, *FLAGS, "-c", str(source), "-o", out], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return out

    def build(program: Path) -> None:
        jobs = [
            *levels,
            ("compare.o", EMULATED / f"{name}.cpp", []),
            *((f"{name}.o", SOURCES / f"threads/{name}.cpp", []) for name in ("threads", "cores", "openmp")),
        ]
        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(lambda job: compile_to(job[0], job[1], *job[2]), jobs))
        subprocess.run([compiler, *objects, "-pthread", "-ldl", "-o", str(program)], check=True)

    program = kept(name.replace("_", "-"), (compiler, FLAGS, sources()), build)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert result.stdout.endswith("products, 0 differ\n")


def emulated_avx512() -> list[tuple[str, Path, list[str]]]:
    return level("avx512_vnni", "simd/avx512.h", [*FEW_ROWS, *PRODUCTS], f"-I{EMULATED}")


@pytest.mark.full
@pytest.mark.skipif("avx512_vnni" in _cpu.levels(), reason="test_products.py runs the level itself here")
def test_avx512_emulated_multiplies_like_portable(compiler, tmp_path):
    levels = [*emulated_avx512(), *level("portable", "simd/portable.h", PRODUCTS)]
    run_comparison("compare_levels", compiler, tmp_path, levels)


@pytest.mark.full
@pytest.mark.skipif("amx" in _cpu.levels(), reason="test_amx.py runs the level itself here")
def test_amx_emulated_has_the_bits_of_avx512(compiler, tmp_path):
    levels = [*emulated_avx512(), *level("amx", "simd/amx.h", ["level_amx"], f"-I{EMULATED}")]
    run_comparison("compare_amx", compiler, tmp_path, levels)


def test_emulated_instructions_are_all_that_amx_needs(compiler):
    flags = [f"-I{EMULATED}", *FLAGS, *of_level("amx", "simd/amx.h"), "-fsyntax-only"]
    result = subprocess.run([compiler, *flags, str(SOURCES / "level/level_amx.cpp")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def when_linked(objects: Path) -> float:
    return max((module.stat().st_mtime for module in objects.parent.glob("_cpu*")), default=0)


def exported(program: str, objects: list[str]) -> list[str]:
    """The weak symbols of object files. Functions, templates and variables that are `inline` become such."""
    listing = subprocess.run(
        [program, "--demangle", "--defined-only", *objects], capture_output=True, text=True, check=True
    )
    symbols = (line.split(maxsplit=2) for line in listing.stdout.splitlines())
    return [symbol[2] for symbol in symbols if len(symbol) == 3 and symbol[1] in "uVvWw"]


@pytest.mark.skipif(sys.platform != "linux", reason="weak symbols as ELF has them")
def test_levels_share_no_weak_symbols():
    """The linker keeps one of all weak symbols of a name. Were it that of avx512_vnni, other levels would run it on
    machines that cannot. So what a level exports is in its namespace; see simd/room.h."""
    if not any(BUILD.glob("*/CMakeCache.txt")):
        pytest.skip("not compiled in this folder")
    builds = sorted(BUILD.glob("*/level_objects.txt"), key=when_linked)
    assert builds, "these were compiled before CMake wrote that list: compile again"
    levels = [line.split(":") for line in builds[-1].read_text().splitlines()]  # others may be of older sources
    assert {name for name, *_ in levels} >= set(_cpu.levels())
    program = shutil.which("nm")
    assert program is not None, "nm comes with the compiler that compiled the objects"
    for name, *objects in levels:
        symbols = exported(program, objects)
        outside = [symbol for symbol in symbols if f"{name}::" not in symbol]
        assert not outside, f"level {name}: {outside}"
        assert symbols, "templates of kernels are such"
