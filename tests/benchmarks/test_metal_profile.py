"""benchmarks.metal_profile: bytes and threadgroup memory as promised, instructions and estimates as counted."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import diagonal
from common import gaussian
from metal_support import FORMATS, KERNELS, quantized

import billfish as bf
from benchmarks import metal_profile
from benchmarks.metal_profile.cost import CHIPS, Chip, device_bytes, estimate, estimate_all, threadgroups_on_a_core
from benchmarks.metal_profile.counts import count_mlx, count_ours
from benchmarks.metal_profile.mlx_kernels import MLX_FORMATS, mlx_kernel, run_mlx
from benchmarks.metal_profile.operations import count_operations
from billfish.backends import emulator
from billfish.backends.emulator import Launch
from billfish.backends.emulator.counting import CLASSES, Instructions
from billfish.backends.metal import lay_out

ROOT = Path(__file__).parents[2]


def half(m: int, k: int) -> np.ndarray:
    return gaussian((m, k), m).astype(np.float16)


# ---- bytes ------------------------------------------------------------------------------------------------------


WHOLE_ROWS = [name for name in FORMATS if bf.FORMATS[name.split()[0]].whole_row_groups]


def ours(q, x, kernel: str) -> list[Launch]:
    with emulator.launches() as log:
        KERNELS.multiply(x, lay_out(q), None, kernel)
    return log


def of_least(launch: Launch) -> float:
    """How often the planes of the weights are read."""
    planes = [name for name in launch.sizes if launch.read[name] and name not in ("x", "partials")]
    return sum(launch.read[name] for name in planes) / sum(launch.sizes[name] for name in planes)


@pytest.mark.parametrize(
    ("name", "group_size"), diagonal(3, [*((name, None) for name in FORMATS), *((name, -1) for name in WHOLE_ROWS)])
)
def test_matvec_reads_weights_and_scales_once(name, group_size):
    """At M = 1, at most 1.03 times, even where each simdgroup reads the one scale of a row."""
    for k in (512, 2048):
        (launch,) = ours(quantized(name, 64, k, group_size), half(1, k), "gemv")
        assert 1 <= of_least(launch) <= 1.03


@pytest.mark.parametrize("m", [2, 3, 8])
def test_matvec_reads_weights_once_for_all_rows(m):
    (launch,) = ours(quantized("fp4", 64, 512), half(m, 512), "gemv")
    assert of_least(launch) == 1


@pytest.mark.parametrize(("name", "m"), diagonal(6, MLX_FORMATS, [1, 8, 9, 33, 64, 130]))
def test_no_kernel_reads_more_than_mlx(name, m):
    """All launches of a product together."""
    q = bf.quantize(gaussian((256, 512)), name)
    with emulator.launches() as log:
        run_mlx(q, half(m, 512))
    theirs = sum(sum(launch.read.values()) for launch in log)
    for kernel in ("gemv",) if m <= 8 else ("gemm", "fused", "striped"):
        launches = ours(q, half(m, 512), kernel)
        assert sum(sum(launch.read.values()) for launch in launches) <= theirs


@pytest.mark.parametrize(("name", "m"), diagonal(3, MLX_FORMATS, [1, 8, 9, 33]))
def test_mlx_kernels_compute_the_same_product(name, m):
    """What is compared is the same problem."""
    q, x = bf.quantize(gaussian((40, 512)), name), half(m, 512)
    expected = x.astype(np.float64) @ bf.dequantize(q).astype(np.float64).T
    y = run_mlx(q, x).astype(np.float64) * float(q.planes.get("global_scale", 1))
    assert np.abs(y - expected).max() <= 2.0**-9 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("family", "m", "n", "k", "name"),
    [
        ("fp", 1, 4096, 4096, "fp_qmv_fast"),
        ("affine", 1, 4092, 4096, "affine_qmv"),
        ("fp", 8, 4096, 4096, "fp_qmv_wide"),
        ("affine", 8, 4096, 4096, "affine_qmv_fast"),
        ("affine", 8, 14336, 4096, "affine_qmm_t"),
        ("fp", 64, 4096, 4096, "fp_qmm_t_splitk"),
        ("fp", 512, 4096, 4096, "fp_qmm_t"),
    ],
)
def test_mlx_takes_the_kernel_that_it_takes_on_m1_and_m2(family, m, n, k, name):
    assert mlx_kernel(family, 4, m, n, k, 32).name == name


def test_slices_of_k_are_added_up_by_a_kernel_of_mlx():
    q, x = bf.quantize(gaussian((64, 512)), "affine4"), half(64, 512)
    count = count_mlx(q, x)
    assert count.kernel == "affine_qmm_t_splitk + col_reduce_small"
    slices = 512 // q.group_size
    assert count.read["partials"] == slices * 64 * 64 * 4


# ---- threadgroup memory, barriers, products ---------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kernel"), diagonal(3, ["fp4", "u4", "q8_0"], ["gemm", "striped", "fused"]))
def test_seven_threadgroups_fit_on_a_core(kernel, name):
    (launch, *_) = ours(quantized(name, 64, 64), half(64, 64), kernel)
    assert launch.threadgroup_memory <= 65536 // 7


def test_one_barrier_for_each_tile_of_k():
    """Of two tiles. Every MMA is needed: 8 x 8 x 8 of M, N and K each."""
    (launch,) = ours(quantized("fp4", 64, 256), half(64, 256), "gemm")
    assert launch.threadgroup_barriers == 2 * 256 // 32
    assert launch.matrix_multiplies == 64 * 64 * 256 // 512


# ---- instructions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 16])
def test_a_count_adds_up(m):
    q, x = bf.quantize(gaussian((64, 512)), "affine4"), half(m, 512)
    for count in (count_mlx(q, x), count_ours(KERNELS, q, x)):
        assert set(count.issue) == set(CLASSES)
        assert count.cycles_per_weight == pytest.approx(max(sum(count.issue.values()), count.pipe))
        assert (count.issue["matrix"] > 0) == (count.matrix_multiplies > 0) == (m > 8)
        assert count.device_bytes == sum(count.read.values()) + count.written
        moved = sum(int(width) * n for by in (count.loads, count.stores) for width, n in by["device"].items())
        assert moved >= count.device_bytes  # shapes are read too, from constant memory
        assert set(count.estimated_us) == set(count.bound_by) == {chip.name for chip in CHIPS}


def test_mlx_converts_and_ours_does_not():
    """Each affine code costs MLX a conversion, and ours a mask."""
    q, x = bf.quantize(gaussian((64, 2048)), "affine4"), half(1, 2048)
    theirs, mine = count_mlx(q, x), count_ours(KERNELS, q, x)
    assert theirs.issue["complex"] >= 1 > mine.issue["complex"]


def test_tables_load_and_bits_do_not():
    counts = {(each.element, each.way.split(" ")[0]): each for each in count_operations()}
    for (element, way), each in counts.items():
        assert each.issue["memory"] == (1 if way == "table" else 0), (element, way)
        assert each.issue["simple"] >= 1  # the scale
    assert counts["e2m1", "field"].cycles > 2 * counts["e2m1", "moved"].cycles
    assert counts["u4b8", "magic"].cycles < counts["u4b8", "integer"].cycles


# ---- the cost model -----------------------------------------------------------------------------------------------


def launch_of(**given: Any) -> Launch:
    """A launch of 64 threadgroups of 128 threads that does nothing, but for what is given."""
    nothing = dict.fromkeys(CLASSES, 0.0)
    fields: dict[str, Any] = {"read": {"x": 0}, "written": {"y": 0}, "sizes": {"x": 10**6, "y": 10**6}}
    fields |= {
        "threadgroup_read": {},
        "threadgroup_written": {},
        "threadgroup_variables": {},
        "loads": {},
        "stores": {},
    }
    fields |= dict.fromkeys(("threadgroup_barriers", "simdgroup_barriers", "matrix_multiplies", "atomics"), 0)
    fields |= {"threadgroup_memory": 0, "threadgroups": 64, "threads": 128}
    fields["instructions"] = Instructions(nothing, nothing | given.pop("issue", {}), given.pop("pipe", 0.0))
    return Launch("name", "full name", **(fields | given))


ONE = Chip("one", 1, 1.0, 100)  # a core of 128 lanes at 1 GHz: 128,000 cycles of lanes in a microsecond
FAST = replace(ONE, cores=64)


@pytest.mark.parametrize(
    ("given", "bound", "us"),
    [
        ({"issue": {"simple": 128e3}}, "instructions", 1),
        ({"issue": {"simple": 128e3, "complex": 128e3}, "pipe": 4 * 128e3}, "complex", 4),
        ({"issue": {"simple": 128e3, "matrix": 256e3}}, "instructions", 3),
        ({"threadgroup_read": {"t": 64000}, "threadgroup_written": {"t": 64000}}, "core data", 2),
        ({"read": {"x": 10**6}, "sizes": {"x": 64}}, "core data", 15.625),  # from a cache
        ({"read": {"x": 500_000}, "chip": FAST}, "memory", 5),
        ({"read": {"x": 1_500_000}, "written": {"y": 10**6}, "chip": FAST}, "memory", 20),  # each byte comes once
    ],
)
def test_the_longest_bounds(given, bound, us):
    chip = given.get("chip", ONE)
    found = estimate(launch_of(**{name: value for name, value in given.items() if name != "chip"}), chip)
    assert found.bound_by == bound
    assert found.us == pytest.approx(us)
    assert found.us == max(found.bounds.values())


def test_few_simdgroups_leave_lanes_idle():
    """Of 20 KB of threadgroup memory three threadgroups fit; with one simdgroup each, 3 of 12.8 that are needed."""
    lean = launch_of(issue={"simple": 128e3})
    assert threadgroups_on_a_core(lean, 1) == 96 // 4
    assert threadgroups_on_a_core(replace(lean, threadgroup_memory=20480), 1) == 3
    assert threadgroups_on_a_core(replace(lean, threadgroups=2), 1) == 2
    heavy = replace(lean, threadgroup_memory=20480, threads=32)
    assert estimate(heavy, ONE).us == pytest.approx(12.8 / 3)


def test_the_core_with_the_most_threadgroups_is_the_last():
    one = launch_of(issue={"simple": 128e3}, threadgroups=4)
    assert estimate(replace(one, threadgroups=5), Chip("four", 4, 1.0, 1)).us == pytest.approx(
        2 / 5 * 12.8 / 8  # two of five threadgroups, and eight simdgroups
    )


def test_launches_follow_each_other():
    first, second = launch_of(issue={"simple": 64 * 128e3}), launch_of(read={"x": 500_000})
    assert estimate_all([first, second], FAST) == (pytest.approx(12.8 / 4 + 5), "memory")
    assert device_bytes(second) == 500_000


# ---- the command --------------------------------------------------------------------------------------------------


KEYS = {"kernel", "owner", "format", "m", "k", "n", "cycles_per_weight", "device_bytes", "estimated_us"}


def test_command(tmp_path, capsys):
    file = tmp_path / "counts.json"
    flags = ["--formats", "fp4,mxfp4", "--shapes", "64x64,64x32", "--m", "1"]
    metal_profile.main([*flags, "--json", str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["format", "K", "x", "N"]
    # MLX has a kernel for mxfp4 and none for fp4.
    content = json.loads(file.read_text())
    owners = [(record["format"], record["n"], record["owner"]) for record in content["records"]]
    assert owners == [
        *(("fp4", n, "billfish") for n in (64, 32)),
        *(("mxfp4", n, owner) for n in (64, 32) for owner in ("mlx", "billfish")),
    ]
    for record in content["records"]:
        assert record.keys() >= KEYS
        assert (record["k"], record["m"]) == (64, 1)
        assert record["estimated_us"].keys() == {"M1", "M1 Max", "M2", "M2 Max"}
        assert record["cycles_per_weight"] > 0
    assert content["decode"]
    assert content["machine"].keys() == {"cpu", "architecture", "threads", "date"}
    assert content["versions"]["billfish"] == bf.__version__


def test_large_problems_are_counted_on_a_part_of_the_grid(monkeypatch):
    """Here that is exact: every threadgroup does the same."""
    q, x = quantized("u4b8", 512, 64), half(1, 64)
    whole = count_ours(KERNELS, q, x)
    monkeypatch.setattr("benchmarks.metal_profile.counts.LARGEST_WHOLE", 0)
    monkeypatch.setattr("benchmarks.metal_profile.counts.PART", 2)
    assert count_ours(KERNELS, q, x) == whole


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (["--shapes", "64"], ["--shapes", "'64'", "KxN"]),
        (["--shapes", "0x64"], ["--shapes", "'0x64'", "KxN"]),
        (["--m", "1,x"], ["--m", "'x'", "positive integer"]),
        (["--formats", "nf4"], ["--formats", "'nf4'", "Metal kernels"]),
        (["--formats", "mxfp4", "--shapes", "40x8"], ["40", "multiple of 32", "mxfp4"]),
        (["--json", "no/where.json"], ["--json", "'no/where.json'", "folder that exists"]),
    ],
)
def test_complaints(flags, facts, capsys):
    with pytest.raises(SystemExit) as caught:
        metal_profile.main(flags)
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(fact in last for fact in facts), last


def test_tables_need_no_terminal():
    out = io.StringIO()
    metal_profile.print_operations(count_operations()[:1], out)
    assert out.getvalue().split()[:4] == ["element", "decoded", "by", "simple"]


# ---- the page -----------------------------------------------------------------------------------------------------


def recorded() -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / "metal_profile.json").read_text())


def test_what_is_recorded_is_what_is_counted_today():
    """By the same compiler; another may do with an instruction more or less."""
    if metal_profile.counted_with() != recorded()["compiler"]:
        pytest.skip(f"recorded with {recorded()['compiler']}, and this is {metal_profile.counted_with()}")
    assert recorded()["decode"] == [each.__dict__ for each in count_operations()]
    counts = metal_profile.count_all([bf.get_format("mxfp4")], [(4096, 4096)], [1])
    same = [r for r in recorded()["records"] if (r["format"], r["n"], r["m"]) == ("mxfp4", 4096, 1)]
    assert same == [asdict(count) for count in counts]


def test_the_example_of_the_page_runs():
    page = (ROOT / "docs" / "metal.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(program, names)
    assert tuple(names["y"].shape) == (4, 96)
