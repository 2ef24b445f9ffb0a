"""Kernels of any grid on the CPU, by fibers.h: launches as a GPU's Launcher makes them, on memory of NumPy."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build_cache import kept
from cuda_on_cpu import EMULATED, translated

from billfish.backends.cuda.compile import SOURCES
from billfish.backends.cuda.driver import Device, signature

HEADERS = ("ptx.h", "fibers.h")
SHARED = "extern __shared__ __align__(1024) u8 shared[];"
_LIBRARIES: dict[Any, ctypes.CDLL] = {}


def compiled(name: str, macros: dict[str, Any], kernel: str = "") -> ctypes.CDLL:
    """`kernel` of `name`.cu, or its marlin_`name`, as run(grid, threads, arguments)."""
    key = name, kernel, tuple(sorted(macros.items()))
    if key not in _LIBRARIES:
        _LIBRARIES[key] = _compiled(name, macros, kernel or f"marlin_{name}")
    return _LIBRARIES[key]


def _compiled(name: str, macros: dict[str, Any], kernel: str) -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    sources = [SOURCES / f"{name}.cu", *sorted(SOURCES.glob("*.cuh"))]
    files = {path.name: _on_fibers(path.read_text()) for path in sources}
    files |= {header: (EMULATED / header).read_text() for header in HEADERS}
    defined = "".join(f"#define {macro} {value}\n" for macro, value in sorted(macros.items()))
    files["kernel.cpp"] = (
        f'#include <utility>\n#include "ptx.h"\n#include "fibers.h"\n{defined}'
        f'namespace kernel {{\n#include "{name}.cu"\n}}\n'
        'extern "C" void run(const int* grid, int threads, const uint64_t* arguments) {\n'
        f"  fibers::launch(kernel::{kernel}, grid, threads, arguments);\n}}\n"
    )
    command = [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-fPIC", "-shared", "kernel.cpp"]

    def compile_to(path: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for file, text in files.items():
                (Path(folder) / file).write_text(text)
            result = subprocess.run([*command, "-o", path], cwd=folder, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr[:4000]

    return ctypes.CDLL(str(kept(f"{name}.so", (files, command), compile_to)))


def _on_fibers(source: str) -> str:
    """Each file is included once, as on a GPU: a kernel is a library of its own."""
    once = "#pragma once\n" if "#pragma once" in source else ""
    return once + translated(source, HEADERS).replace(SHARED, "u8* shared = fibers::dynamic;")


class Memory:
    """As a Buffer, in NumPy."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.ascontiguousarray(array)
        self.nbytes, self.pointer = self.array.nbytes, self.array.ctypes.data


class Matrix:
    """As a DeviceMatrix, of numbers. `weights` is itself."""

    def __init__(self, values: np.ndarray, bias: np.ndarray | None = None) -> None:
        self.values, self.bias, self.shape, self.weights = values, bias, values.shape, self


class FiberLauncher:
    """As a Launcher. `launches`: the kernels' names."""

    def __init__(self, epsilon: float, device: Device, type: str = "F16") -> None:
        self.epsilon, self.device, self.type = epsilon, device, type
        self.launches: list[str] = []

    def launch(
        self,
        stream: int,
        name: str,
        macros: dict[str, Any],
        grid: tuple[int, ...],
        threads: int,
        *arguments: int | float,
        shared_bytes: int = 0,
        cluster: int = 1,
    ) -> None:
        assert shared_bytes <= self.device.shared_bytes
        assert cluster == 1
        self.launches.append(name)
        letters = signature(f"{name}.cu", f"marlin_{name}")
        slots = np.zeros(len(letters), np.uint64)
        for slot, letter, value in zip(slots.reshape(-1, 1), letters, arguments, strict=True):
            assert isinstance(value, float) == (letter == "f")
            slot.view({"p": np.uint64, "i": np.int32, "f": np.float32}[letter])[0] = value
        sizes = np.array((*grid, 1, 1)[:3], np.int32)
        run = compiled(name, macros).run
        run(ctypes.c_void_p(sizes.ctypes.data), threads, ctypes.c_void_p(slots.ctypes.data))

    def products(self, stream: int, step: Any, matrices: Sequence[Matrix], x: int, y: int, rows: int) -> None:
        for matrix in matrices:
            n, k = matrix.shape
            made = numbers(x, (rows, k)).astype(np.float64) @ matrix.values.astype(np.float64).T
            numbers(y, (rows, n))[:] = made if matrix.bias is None else made + matrix.bias
            y += 2 * rows * n


def numbers(pointer: int, shape: tuple[int, ...], type: Any = np.float16) -> np.ndarray:
    """An array on memory that is there."""
    count = int(np.prod(shape)) * np.dtype(type).itemsize
    return np.frombuffer((ctypes.c_uint8 * count).from_address(pointer), type).reshape(shape)


class FiberStep:
    """As a StepMemory. Bytes are of no number before they are written."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._parts = {name: Memory(np.full(max(16, size), 0xFF, np.uint8)) for name, size in sizes.items()}

    def at(self, name: str) -> int:
        return self._parts[name].pointer
