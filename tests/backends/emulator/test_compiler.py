"""How kernels are compiled and kept: which compiler, which folder, several processes at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from billfish.backends import emulator
from billfish.backends.emulator import compiler
from billfish.core.errors import BackendUnavailable

PROGRAM = """
import numpy as np
from billfish.backends import emulator
source = "y[thread_position_in_grid.x] = 3 * x[thread_position_in_grid.x];"
kernel = emulator.metal_kernel("thrice", ["x"], ["y"], source)
(y,) = kernel(inputs=[np.arange(9, dtype=np.int32)], grid=(9, 1, 1), threadgroup=(9, 1, 1), output_shapes=[(9,)],
              output_dtypes=[np.int32])
print(y.tolist())
"""
CACHED = (compiler.find_compiler, compiler.libraries, compiler.runtime_library)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, and everything that is remembered about the compiler forgotten, before and after."""
    monkeypatch.setenv("BILLFISH_CACHE", str(tmp_path))
    for function in CACHED:
        function.cache_clear()
    yield tmp_path / "metal-emulator"
    monkeypatch.undo()
    for function in CACHED:
        function.cache_clear()


def only(monkeypatch: pytest.MonkeyPatch, paths: dict[str, str]) -> None:
    """Neither ziglang nor any clang but these."""
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", paths.get)


def test_without_a_compiler_the_message_says_what_to_install(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, {})
    kernel = emulator.metal_kernel("k", [], ["y"], "y[0] = 1;")
    call: dict[str, Any] = {"inputs": [], "grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    with pytest.raises(BackendUnavailable, match=r"pip install '\.\[metal-emulator\]'"):
        kernel(**call, output_shapes=[(1,)], output_dtypes=[np.float32])


@pytest.mark.parametrize(("version", "good"), [("18.1.8", False), ("19.1.0", True), ("21.1.0", True)])
def test_clang_must_be_new_enough(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, good: bool
) -> None:
    clang = tmp_path / "clang"
    clang.write_text(f"#!/bin/sh\necho 'Some clang version {version} (of somebody)'\n")
    clang.chmod(0o755)
    only(monkeypatch, {"clang": str(clang)})
    if good:
        assert compiler.find_compiler().command == (str(clang),)
    else:
        with pytest.raises(BackendUnavailable, match=r"neither ziglang >= 0\.14 nor clang >= 19"):
            compiler.find_compiler()


@pytest.mark.parametrize(("version", "good"), [("0.13.0", False), ("0.14.1", True), ("1.0.0-dev.5", True)])
def test_zig_must_be_new_enough(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, good: bool
) -> None:
    zig = tmp_path / "zig"
    zig.write_text(f"#!/bin/sh\necho {version}\n")
    zig.chmod(0o755)
    package = ModuleSpec("ziglang", None, is_package=True)
    package.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: package)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    if good:
        assert compiler.find_compiler().command == (str(zig), "cc")
    else:
        with pytest.raises(BackendUnavailable, match="neither ziglang"):
            compiler.find_compiler()


def test_the_second_time_nothing_is_compiled(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = emulator.kernel.translate(
        emulator.metal_kernel("k", [], ["y"], "y[0] = 1;").signature([], [np.float32]), "k"
    )
    first = compiler.kernel_library(text, instrumented=False, hostile=False)
    before = sorted(path.name for path in fresh.iterdir())
    monkeypatch.setattr(compiler.Compiler, "run", lambda *arguments: pytest.fail("compiled again"))
    assert compiler.kernel_library(text, instrumented=False, hostile=False) == first
    assert sorted(path.name for path in fresh.iterdir()) == before
    assert len([name for name in before if name.endswith(".so")]) == 2  # the kernel and the runtime, nothing half made


def test_other_text_or_flags_make_another_library(fresh: Path) -> None:
    def text(value: int) -> str:
        kernel = emulator.metal_kernel("k", [], ["y"], f"y[0] = {value};")
        return emulator.kernel.translate(kernel.signature([], [np.float32]), "k")

    paths = {compiler.kernel_library(text(value), instrumented=False, hostile=False) for value in (1, 2)}
    paths |= {compiler.kernel_library(text(1), instrumented=True, hostile=False)}
    paths |= {compiler.kernel_library(text(1), instrumented=False, hostile=True)}
    assert len(paths) == 4


def test_several_processes_at_once(tmp_path: Path) -> None:
    environment = os.environ | {"BILLFISH_CACHE": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate()[0] for process in running] == ["[0, 3, 6, 9, 12, 15, 18, 21, 24]\n"] * 3


def test_it_can_be_imported_without_ziglang() -> None:
    program = "import sys; sys.modules['ziglang'] = None\n"
    program += "from billfish.backends import emulator; print(emulator.KINDS[1])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "race\n"
