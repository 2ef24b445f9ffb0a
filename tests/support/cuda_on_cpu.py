"""CUDA sources compiled for the CPU, every instruction of PTX in them emulated: tests/support/emulated/ptx.h."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from build_cache import kept

from billfish.backends.cuda.axes import Kind
from billfish.backends.cuda.compile import SOURCES

EMULATED = Path(__file__).parent / "emulated"
KERNELS = ("device.cuh", "decode.cuh", "values.cuh", "dequantize.cu", "pack.cu", "unpack.cu")
LITERAL = r'"((?:[^"\\]|\\.)*)"'


@cache
def emulated(headers: tuple[str, ...]) -> frozenset[str]:
    """The instructions that headers have."""
    text = "".join((EMULATED / name).read_text() for name in headers)
    return frozenset(re.findall(r"^EMULATED void (\w+)\(", text, re.MULTILINE))


def closing(text: str, start: int) -> int:
    """Where the parenthesis that is open at `start` ends. Those in string literals come in pairs."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise AssertionError(text[start : start + 80])


def translated(source: str, headers: tuple[str, ...] = ("ptx.h",)) -> str:
    """A file with calls of `headers` for inline assembly, and such that it can be included in several namespaces."""
    source = source.replace("#pragma once", "").replace('extern "C" __global__', "__global__")
    parts, position = [], 0
    for statement in re.finditer(r"\basm(?: volatile)?\(", source):
        end = closing(source, statement.end() - 1)
        parts += [source[position : statement.start()], calls(source[statement.end() : end], emulated(headers))]
        position = end + len(");")
    return "".join(parts) + source[position:]


def calls(statement: str, known: frozenset[str]) -> str:
    """What is between the parentheses of an asm statement, as calls of `known` instructions."""
    literal = re.match(rf"(?:\s*{LITERAL})+", statement)
    assert literal is not None, statement
    text = "".join(re.findall(LITERAL, literal[0])).replace(r"\n", "\n").strip("{}\n ")
    operands = []
    for operand in re.finditer(r'"[=+]?[a-z]"\s*\(', statement[literal.end() :]):
        start = literal.end() + operand.end() - 1
        operands.append(statement[start : closing(statement, start) + 1])
    found = []
    for instruction in filter(None, (line.strip() for line in text.split(";"))):
        name, _, arguments = instruction.partition(" ")
        if name == ".reg":
            found.append("uint16_t " + arguments.removeprefix(".b16 "))
            continue
        if name == "mov.b32":  # halves to a pair, or a pair to halves
            name = "unpack.b32" if arguments.startswith("{") else "pack.b32"
        name = re.sub(r"\W+", "_", name)
        if name not in known:
            return "ptx::not_emulated();"
        filled = re.sub(r"%(\d+)", lambda number: operands[int(number[1])], re.sub(r"[][{}]", "", arguments))
        found.append(f"ptx::{name}({filled})")
    return "{ " + "".join(f"{call}; " for call in found) + "}"


def of_kind(number: int, kind: Kind) -> str:
    """dequantize.cu, pack.cu and unpack.cu for a kind of weights, in namespaces of their own."""
    macros = kind.macros() | {"ONE_ZERO": str(int(kind.one_zero))}
    defined = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    undefined = "".join(f"#undef {name}\n" for name in ("TABLE", "MIDDLE", "TYPE", "OUTPUT", *macros))
    return f"""
{defined}
#define OUTPUT float
namespace dequantizing_{number} {{
#include "dequantize.cu"
}}
#undef TYPE
namespace packing_{number} {{
#include "pack.cu"
}}
#undef TYPE
namespace unpacking_{number} {{
#include "unpack.cu"
}}
{undefined}
extern "C" void dequantize_{number}(const uint8_t* bricks, const float* row_scale, float* out, int n, int k) {{
  launch((k + 127) / 128 * ((n + 15) / 16), 32, 2,
         [=] {{ dequantizing_{number}::marlin_dequantize(bricks, row_scale, out, n, k); }});
}}
extern "C" void pack_{number}(const uint8_t* codes, const uint8_t* groups, uint8_t* bricks, int n, int k) {{
  launch((k + 127) / 128 * ((n + 15) / 16), 32, 0,
         [=] {{ packing_{number}::marlin_pack(codes, groups, bricks, n, k); }});
}}
extern "C" void unpack_{number}(const uint8_t* bricks, uint8_t* codes, int n, int k, int shift) {{
  launch((k + 127) / 128 * ((n + 15) / 16), 32, 0,
         [=] {{ unpacking_{number}::marlin_unpack(bricks, codes, n, k, shift); }});
}}
"""


def of_storage(number: int, macros: dict[str, str]) -> str:
    """pack.cu, for codes that lie as `macros` say."""
    code = "uint16_t" if macros.get("CODE") == "u16" else "uint8_t"
    defined = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    undefined = "".join(f"#undef {name}\n" for name in ("TABLE", "MIDDLE", "TYPE", "CODE", *macros))
    return f"""
{defined}
namespace reading_{number} {{
#include "pack.cu"
}}
{undefined}
extern "C" void read_{number}(const uint8_t* codes, const uint8_t* groups, uint8_t* bricks, int n, int k) {{
  launch((k + 127) / 128 * ((n + 15) / 16), 32, 0,
         [=] {{ reading_{number}::marlin_pack((const {code}*)codes, groups, bricks, n, k); }});
}}
"""


def compiled(kinds: Sequence[Kind], readings: Sequence[dict[str, str]]) -> ctypes.CDLL:
    """decode.cuh's elements, and dequantize_i, pack_i, unpack_i for each of `kinds`; Table4 has the table of one.

    readings: the macros of read_i, which is pack.cu for codes as files have them.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    table = next(kind.macros()["TABLE"] for kind in kinds if kind.table)
    files = {name: translated((SOURCES / name).read_text()) for name in KERNELS}
    files |= {name: (EMULATED / name).read_text() for name in ("ptx.h", "decode_elements.cpp")}
    files["elements.cpp"] = f'#define TABLE {table}\n#include "decode_elements.cpp"\n'
    files["kinds.cpp"] = '#include "ptx.h"\n' + "".join(of_kind(*each) for each in enumerate(kinds))
    files["readings.cpp"] = '#include "ptx.h"\n' + "".join(of_storage(*each) for each in enumerate(readings))
    command = [
        compiler,
        "-std=c++17",
        "-O0",
        "-ffp-contract=off",
        "-w",
        "-fPIC",
        "-shared",
        "elements.cpp",
        "kinds.cpp",
        "readings.cpp",
    ]

    def compile_to(path: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                (Path(folder) / name).write_text(text)
            result = subprocess.run([*command, "-o", path], cwd=folder, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr[:4000]

    return ctypes.CDLL(str(kept("decode.so", (files, command), compile_to)))


def compiled_file(name: str, sources: Sequence[str]) -> ctypes.CDLL:
    """A file of tests/support/emulated whose kernels may meet (warps.h), with these CUDA sources to include."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    files = {source: translated((SOURCES / source).read_text()) for source in sources}
    files |= {header: (EMULATED / header).read_text() for header in ("ptx.h", "warps.h", name)}
    command = [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-fPIC", "-shared", "-pthread", name]

    def compile_to(path: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for file, text in files.items():
                (Path(folder) / file).write_text(text)
            result = subprocess.run([*command, "-o", path], cwd=folder, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr[:4000]

    return ctypes.CDLL(str(kept(f"{Path(name).stem}.so", (files, command), compile_to)))


def at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
