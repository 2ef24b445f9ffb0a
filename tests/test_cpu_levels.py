"""The level avx512_vnni on any machine: its header compiled against instructions that are emulated, lane by lane."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kept import kept

import billfish.backends.cpu
from billfish.backends.cpu import _cpu

SOURCES = Path(billfish.backends.cpu.__file__).parent
EMULATED = Path(__file__).parent / "emulated"
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", f"-I{SOURCES}"]


def sources() -> list[tuple[str, str]]:
    """All that the program is made of, and more."""
    files = [path for folder in (SOURCES, EMULATED) for path in folder.rglob("*") if path.suffix in (".h", ".cpp")]
    return sorted((str(path), path.read_text()) for path in files)


@pytest.mark.skipif("avx512_vnni" in _cpu.levels(), reason="test_cpu.py runs the level itself here")
def test_avx512_emulated_multiplies_like_portable(tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")

    def compile_to(name: str, source: Path, *more: str) -> str:
        out = str(tmp_path / name)
        result = subprocess.run([compiler, *FLAGS, *more, "-c", str(source), "-o", out], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return out

    def level(name: str, header: str, *more: str) -> str:
        named = (f"-DBILLFISH_ISA={name}", f'-DBILLFISH_SIMD="{header}"', *more)
        return compile_to(f"{name}.o", SOURCES / "level/level.cpp", *named)

    def build(program: Path) -> None:
        jobs = [
            lambda: level("portable", "simd/portable.h"),
            lambda: level("avx512_vnni", "simd/avx512.h", f"-I{EMULATED}"),
            lambda: compile_to("compare.o", EMULATED / "compare_levels.cpp"),
            lambda: compile_to("threads.o", SOURCES / "threads/threads.cpp"),
        ]
        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(lambda job: job(), jobs))
        subprocess.run([compiler, *objects, "-pthread", "-o", str(program)], check=True)

    program = kept("compare-levels", (compiler, FLAGS, sources()), build)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert result.stdout.endswith("products, 0 differ\n")
