"""The lint: each rule finds what is planted, in its line, and is silent about the sound twin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from billfish.backends import emulator
from billfish.backends.emulator import lint, translate

SOUND = """
threadgroup float tile[64];
threadgroup atomic_uint counter;
uint i = thread_index_in_threadgroup;
device const half4* vectors = (device const half4*)x;
float4 v = float4(vectors[i]);
thread float* mine = (thread float*)&v;
tile[i] = mine[0] + table[i % 4] + first(x) + inner::Limits<float>(2).value;
threadgroup_barrier(mem_flags::mem_threadgroup);
threadgroup float* p = tile + 1;
simdgroup_float8x8 m, a[2][2];
simdgroup_load(m, tile);
fill(a);
atomic_fetch_add_explicit(&counter, 1u, memory_order_relaxed);
Pair pair = ((const device Pair*)x)[i];
y[i] = p[0] + float(i) * 2 + (half)3 + pair.left;
"""
HEADER = """
constant float table[4] = {1, 2, 3, 4};
struct Pair { half left, right; };
inline float first(const device half* x) { return x[0]; }
METAL_FUNC void fill(thread simdgroup_float8x8 (&a)[2][2]) { a[0][0] = simdgroup_float8x8(1.0f); }
namespace inner {
template <typename T> struct Limits { T value; Limits(T v) : value(v) {} };
}
"""
INPUTS = [np.zeros(256, np.float16)]

# (rule, what in the header or source is replaced, by what, words of the message)
PLANTED = {
    "threadgroup pointer from a device one": (
        "address-space",
        "threadgroup float* p = tile + 1;",
        "const threadgroup half* p = x + 1;",
        "cannot initialize",
    ),
    "cast between address spaces": (
        "address-space",
        "(device const half4*)x",
        "(device const half4*)tile",
        "threadgroup",
    ),
    "no address space": (
        "address-space",
        "threadgroup float* p = tile + 1;",
        "float* p = mine;",
        "`float* p` names no",
    ),
    "device pointer into a function that takes threadgroup": (
        "address-space",
        "float first(const device half* x)",
        "float first(const threadgroup half* x)",
        "no matching function",
    ),
    "simdgroup_load from thread memory": (
        "address-space",
        "simdgroup_load(m, tile);",
        "simdgroup_load(m, mine);",
        "no matching",
    ),
    "cast of what is read": (
        "address-space",
        "(const device Pair*)x",
        "(const threadgroup Pair*)x",
        "cast into another address space of 'device",
    ),
    "cast of what is written": (
        "address-space",
        "threadgroup float* p = tile + 1;",
        "*(device float*)tile = 1;\nauto p = tile;",
        "cast",
    ),
    "cast of a vector in C's way": ("vector-cast", "float4(vectors[i])", "(float4)vectors[i]", "write float4(...)"),
    "cast of a vec": ("vector-cast", "float4(vectors[i])", "(vec<float, 4>)(vectors[i])", "which converts"),
    "matrices to a function that is not inlined": (
        "matrix-array",
        "METAL_FUNC void fill",
        "inline void fill",
        "fill takes an array",
    ),
    "matrices as a pointer": (
        "matrix-array",
        "METAL_FUNC void fill(thread simdgroup_float8x8 (&a)[2][2]) { a[0][0] = simdgroup_float8x8(1.0f); }",
        "template <class A> METAL_FUNC void fill(thread A&) {}\nvoid clear(thread simdgroup_matrix<float, 8, 8>* a) {}",
        "clear takes an array",
    ),
    "a struct of the prelude": ("mlx-name", "struct Pair {", "struct Limits;\nstruct Pair {", "Limits is a name"),
    "a function of the prelude": (
        "mlx-name",
        "inline float first(",
        "inline float ceildiv(float a) { return a; }\ninline float first(",
        "ceildiv is a name",
    ),
    "a macro of the prelude": (
        "mlx-name",
        "constant float table",
        "#define MTL_CONST constant\nconstant float table",
        "MTL_CONST is a name",
    ),
    "a constant of the prelude": (
        "mlx-name",
        "constant float table",
        "constant int REDUCE_N_READS = 4;\nconstant float table",
        "REDUCE_N_READS is a name",
    ),
    "not Metal": ("compile", "uint i = ", "uint i == ", "did you mean"),
}


def findings(source: str, header: str) -> list[lint.Finding]:
    kernel = emulator.metal_kernel("planted", ["x"], ["y"], source, header)
    return lint.check_kernel(kernel, INPUTS, [np.float32])


def test_the_sound_kernel_is_clean() -> None:
    assert findings(SOUND, HEADER) == []


@pytest.mark.parametrize("name", PLANTED)
def test_planted(name: str) -> None:
    rule, old, new, words = PLANTED[name]
    assert (old in SOUND) != (old in HEADER)
    source, header = SOUND.replace(old, new), HEADER.replace(old, new)
    file, text = ("planted", source) if old in SOUND else ("planted header", header)
    # The line of the planted text, or where it is used.
    lines = {text.count("\n", 0, text.index(new)) + extra for extra in (1, 2)}
    lines |= {i for i, line in enumerate(SOUND.split("\n"), 1) if "first(x)" in line}
    found = [finding for finding in findings(source, header) if finding.rule == rule]
    assert found, "nothing found"
    assert any(finding.line in lines and words in finding.message for finding in found), found
    assert all(finding.file in (file, "planted") for finding in found)


def test_every_rule_is_planted() -> None:
    assert {rule for rule, *_ in PLANTED.values()} == set(lint.RULES)


def test_small_inputs_are_constant_for_the_lint_too() -> None:
    kernel = emulator.metal_kernel("small", ["x"], ["y"], "const device float* p = x;\ny[0] = p[0];")
    assert lint.check_kernel(kernel, [np.zeros(8, np.float32)], [np.float32]) == []
    (finding,) = lint.check_kernel(kernel, [np.zeros(7, np.float32)], [np.float32])
    assert (finding.rule, finding.line) == ("address-space", 1)
    assert "constant" in finding.message


def test_templates_are_instantiated() -> None:
    kernel = emulator.metal_kernel("generic", ["x"], ["y"], "const threadgroup T* p = x;\ny[0] = p[0];")
    (finding,) = lint.check_kernel(kernel, [np.zeros(8, np.float32)], [np.float32], [("T", np.float32)])
    assert (finding.rule, finding.file, finding.line) == ("address-space", "generic", 1)


def test_names_of_mlx() -> None:
    names = lint.mlx_names()
    assert {
        "Limits",
        "WorkPerThread",
        "elem_to_loc",
        "ceildiv",
        "log1p",
        "complex64_t",
        "bfloat16_t",
        "float16_t",
    } <= names
    assert {"MLX_MTL_PRAGMA_UNROLL", "instantiate_kernel", "SOFTMAX_N_READS", "simd_shuffle_down", "cast_to"} <= names
    assert not names & {"T", "x", "loc", "return", "i", "float", "constant"}


def test_mlx_kernels_keep_their_address_spaces() -> None:
    headers = ("steel/gemm/gemm.h", "quantized_utils.h", "fp_quantized.h")
    text = "".join(f'#include "mlx/backend/metal/kernels/{header}"\n' for header in headers)
    instance = "fp_dequantize<half, 32, 4, false>"
    text += f'template [[host_name("q")]] [[kernel]] decltype({instance}) {instance};\n'
    assert lint.check_text(text) == []


def test_command(tmp_path: Path) -> None:
    header, body = tmp_path / "header.metal", tmp_path / "body.metal"
    header.write_text("inline float twice(const device float* x) {\n  return 2 * x[0];\n}\n")
    body.write_text(
        "kernel void k(const device float* x, device float* y) {\n"
        "  y[0] = twice(x);\n"
        "  float4 v = (float4)y[0];\n"
        "  threadgroup float* p = y;\n"
        "}\n"
    )
    command = [sys.executable, "-m", "billfish.backends.emulator.lint", str(header)]
    clean = subprocess.run(command, capture_output=True, text=True)
    assert (clean.returncode, clean.stdout, clean.stderr) == (0, "", "")
    found = subprocess.run([*command, str(body)], capture_output=True, text=True)
    first, second = found.stdout.splitlines()
    assert found.returncode == 1
    assert first.startswith(f"{body}:3: vector-cast: (float4) is a cast of C")
    assert second.startswith(f"{body}:4: address-space: cannot initialize a variable of type 'threadgroup float *'")


def test_without_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translate, "mlx_headers", lambda: None)
    translate.prelude.cache_clear()
    try:
        assert lint.mlx_names() == frozenset()
        assert lint.check_text("struct Limits { float16_t a; bfloat16_t b; };\n") == []
    finally:
        translate.prelude.cache_clear()
