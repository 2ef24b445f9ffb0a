"""`billfish profile`: what is promised of bytes and threadgroup memory, and that operations are counted as they are."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from metal_support import FORMATS, KERNELS, quantized
from support import gaussian

import billfish as bf
from billfish import profile
from billfish.cli import main
from billfish.profile.counts import count_mlx, count_ours, kernels_for
from billfish.profile.mlx_kernels import MLX_FORMATS, run_mlx
from billfish.profile.operations import classify, count_operations

ROOT = Path(__file__).parent.parent
PLANES = ("codes", "high", "scales", "offsets")


def half(m: int, k: int) -> np.ndarray:
    return gaussian((m, k), m).astype(np.float16)


# ---- bytes ------------------------------------------------------------------------------------------------------


WHOLE_ROWS = [name for name in FORMATS if bf.FORMATS[name.split()[0]].whole_row_groups]


@pytest.mark.parametrize(
    ("name", "group_size"), [*((name, None) for name in FORMATS), *((name, -1) for name in WHOLE_ROWS)]
)
def test_matvec_reads_weights_and_scales_once(name, group_size):
    """At M = 1, at most 1.03 times, even where each simdgroup reads the one scale of a row."""
    for k in (512, 2048):
        (count,) = count_ours(KERNELS, quantized(name, 64, k, group_size), half(1, k), "gemv")
        assert 1 <= count.ratio(*PLANES) <= 1.03


@pytest.mark.parametrize("m", [2, 3, 8])
def test_matvec_reads_weights_once_for_all_rows(m):
    (count,) = count_ours(KERNELS, quantized("fp4", 64, 512), half(m, 512), "gemv")
    assert count.ratio(*PLANES) == 1


@pytest.mark.parametrize("name", MLX_FORMATS)
@pytest.mark.parametrize("m", [1, 8, 9, 33, 64, 130])
def test_no_kernel_reads_more_than_mlx(name, m):
    """All launches of a product together, so for striped the partial sums too."""
    q = bf.quantize(gaussian((256, 512)), name)
    theirs = count_mlx(q, half(m, 512)).total_read
    for kernel in kernels_for(m):
        assert sum(count.total_read for count in count_ours(KERNELS, q, half(m, 512), kernel)) <= theirs


@pytest.mark.parametrize("name", MLX_FORMATS)
@pytest.mark.parametrize("m", [1, 8, 9])
def test_mlx_kernels_compute_the_same_product(name, m):
    """What is compared is the same problem."""
    q, x = bf.quantize(gaussian((40, 512)), name), half(m, 512)
    expected = x.astype(np.float64) @ bf.dequantize(q).astype(np.float64).T
    y = run_mlx(q, x).astype(np.float64) * float(q.planes.get("global_scale", 1))
    assert np.abs(y - expected).max() <= 2.0**-9 * np.abs(expected).max()


# ---- threadgroup memory, barriers, products ---------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "slabs"), [("gemm", 16384), ("striped", 16384), ("fused", 4608)])
@pytest.mark.parametrize("name", ["fp4", "u4", "q8_0"])
def test_threadgroup_memory_is_as_designed(kernel, slabs, name):
    count = count_ours(KERNELS, quantized(name, 64, 64), half(64, 64), kernel)[0]
    assert count.threadgroup_memory - count.padding == slabs
    assert count.padding == (1024 if kernel == "fused" else 4096)


def test_one_barrier_for_each_tile_of_k():
    """And one before the tiles become scratch memory. Every MMA is needed: 8 x 8 x 8 of M, N and K each."""
    (count,) = count_ours(KERNELS, quantized("fp4", 64, 256), half(64, 256), "gemm")
    assert count.threadgroup_barriers == 256 // 32 + 1
    assert count.matrix_multiplies == 64 * 64 * 256 // 512


# ---- operations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("  %4 = and i32 %0, 983055", ("integer", 1)),
        ("  %9 = fmul <2 x half> %8, splat (half 0xH4000)", ("floating", 2)),
        ("  %10 = tail call float @llvm.fma.f32(float %9, float %8, float %7)", ("floating", 1)),
        ("  %5 = load float, ptr %4, align 4", ("memory", 1)),
        ("  %11 = fmul double %10, 2.000000e+00", ("floating", 1)),
        ("  %12 = fadd double %11, -1.000000e+00", ("", 0)),
        ("  %6 = fpext half %5 to float", ("conversions", 1)),
        ("  br i1 %7, label %8, label %11", ("integer", 1)),
        ("  br label %19", ("", 0)),
        ("8:                    ; preds = %3", ("", 0)),
        ("  store float %3, ptr %2, align 4", ("", 0)),
    ],
)
def test_lines_are_counted_by_kind(line, expected):
    assert classify(line) == expected


def test_what_is_unknown_is_not_passed_over():
    with pytest.raises(ValueError, match="no kind"):
        classify("  %1 = frem float %2, %3")


def test_tables_load_and_bits_do_not():
    counts = {(each.element, each.way.split(" ")[0]): each for each in count_operations()}
    for (element, way), each in counts.items():
        assert each.memory == (1 if way == "table" else 0), (element, way)
        assert each.floating >= 1  # the scale
    assert counts["e2m1", "field"].integer > 2 * counts["e2m1", "moved"].integer
    assert counts["u4b8", "magic"].integer < counts["u4b8", "integer"].integer


# ---- the command --------------------------------------------------------------------------------------------------


def test_command(tmp_path, capsys):
    files = [tmp_path / "counts.json", tmp_path / "counts.png"]
    flags = ["--formats", "fp4,mxfp4", "--shape", "64x64", "--m", "1,9"]
    assert main(["profile", *flags, "--json", str(files[0]), "--plot", str(files[1])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["format", "kernel", "M", "read", "KiB"]
    # Each format: gemv, gemm, fused, striped and reduce; MLX has two for mxfp4.
    content = json.loads(files[0].read_text())
    kernels = [launch["kernel"] for launch in content["launches"]]
    assert len(kernels) == 2 * 5 + 2
    assert {"marlin_gemv_fp4", "marlin_gemm_fp4_striped", "marlin_reduce", "fp_qmv", "fp_qmm_t"} <= set(kernels)
    assert content["decode"]
    assert content["machine"].keys() == {"cpu", "architecture", "threads", "date"}
    assert content["versions"]["billfish"] == bf.__version__
    assert files[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shape", "64"], "--shape: got '64'; takes KxN, such as 512x256"),
        (["--shape", "0x64"], "--shape: got '0x64'; takes KxN, such as 512x256"),
        (["--m", "1,x"], "--m: got '1,x'; takes positive integers, such as 1,8,64"),
        (["--formats", "q6_k"], "--formats: got 'q6_k'; takes formats with codes that the Metal kernels have"),
        (["--formats", "mxfp4", "--shape", "40x8"], "K: got 40; takes a positive multiple of 32 for mxfp4"),
        (["--json", "no/where.json"], "--json: got 'no/where.json'; takes a file in a folder that exists"),
    ],
)
def test_complaints(flags, message, capsys):
    assert main(["profile", *flags]) == 2
    assert capsys.readouterr().err == f"billfish: [profile] {message}\n"


def test_tables_need_no_terminal():
    out = io.StringIO()
    profile.print_operations(count_operations()[:1], out)
    assert out.getvalue().splitlines()[0].split() == [
        "element",
        "decoded",
        "by",
        "integer",
        "floating",
        "conversions",
        "memory",
    ]


# ---- the page -----------------------------------------------------------------------------------------------------


def recorded() -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / "metal_profile.json").read_text())


def test_what_is_recorded_is_what_is_counted_today():
    """By the same compiler; another may do with an operation more or less."""
    if profile.counted_with() != recorded()["compiler"]:
        pytest.skip(f"recorded with {recorded()['compiler']}, and this is {profile.counted_with()}")
    assert recorded()["decode"] == [each.__dict__ for each in count_operations()]
    counts = profile.count_all(profile.Settings.parse(formats="mxfp4", m="1,16"))
    launches = [each for each in recorded()["launches"] if each["format"] == "mxfp4" and each["m"] in (1, 16)]
    assert launches == [count.as_json() for count in counts]


def test_the_example_of_the_page_runs():
    page = (ROOT / "docs" / "metal.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(program, names)
    assert tuple(names["y"].shape) == (4, 96)
