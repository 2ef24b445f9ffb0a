"""Faults planted in kernels, one kind after another: each is found and its line named, and the sound twin reports none.

A line that ends in `// HERE` is the one that must be named, `// THERE` the other party's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from billfish.backends.metal import emulator
from billfish.backends.metal.emulator import KernelFault

ORDERS = ("forward", "reverse", "random")
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
DEVICE_BARRIER = "threadgroup_barrier(mem_flags::mem_device);"
FENCE = "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);"


@dataclass(frozen=True)
class Case:
    """`PLANT` in the source stands for `sound` or for `faulty`."""

    kind: str
    buffer: str | None
    source: str
    sound: str
    faulty: str
    grid: tuple[int, int, int] = (64, 1, 1)
    threadgroup: tuple[int, int, int] = (64, 1, 1)
    inputs: dict[str, np.ndarray] = field(default_factory=lambda: {"x": np.arange(64, dtype=np.float32)})
    outputs: int = 64
    init_value: float | None = None
    orders: tuple[str, ...] = ORDERS  # in which it is found
    header: str = ""

    def run(self, plant: str) -> np.ndarray:
        source = self.source.replace("PLANT", plant)
        kernel = emulator.metal_kernel("planted", list(self.inputs), ["y"], source, self.header.replace("PLANT", plant))
        (y,) = kernel(
            inputs=list(self.inputs.values()),
            grid=self.grid,
            threadgroup=self.threadgroup,
            output_shapes=[(self.outputs,)],
            output_dtypes=[np.float32],
            init_value=self.init_value,
        )
        return y

    def line(self, mark: str) -> int | None:
        lines = self.source.replace("PLANT", self.faulty).split("\n")
        return next((i for i, line in enumerate(lines, 1) if line.rstrip().endswith(f"// {mark}")), None)


CASES = {
    "missing barrier, read after write": Case(
        "race",
        "tile",
        f"""
        threadgroup float tile[64];
        uint i = thread_index_in_threadgroup;
        tile[i] = 0;
        {BARRIER}
        tile[i] = x[i]; // THERE
        PLANT
        y[i] = tile[63 - i]; // HERE
        """,
        BARRIER,
        "",
    ),
    "missing barrier, write after read": Case(
        "race",
        "tile",
        f"""
        threadgroup float tile[64];
        uint i = thread_index_in_threadgroup;
        float s = 0;
        for (int round = 0; round < 2; round++) {{
            tile[i] = x[i] + round; // HERE
            {BARRIER}
            s += tile[63 - i]; // THERE
            PLANT
        }}
        y[i] = s;
        """,
        BARRIER,
        "",
    ),
    "two threads write the same element": Case(
        "race",
        "tile",
        f"""
        threadgroup float tile[64];
        uint i = thread_index_in_threadgroup;
        tile[PLANT] = x[i]; // HERE
        {BARRIER}
        y[i] = tile[i / 2];
        """,
        "i",
        "i / 2",
    ),
    "the barrier is for other memory": Case(
        "race",
        "y",
        """
        uint i = thread_index_in_threadgroup;
        y[i] = x[i]; // THERE
        PLANT
        float v = y[63 - i]; // HERE
        threadgroup_barrier(mem_flags::mem_device);
        y[i] = v;
        """,
        DEVICE_BARRIER,
        BARRIER,
    ),
    "simdgroups need more than a simdgroup barrier": Case(
        "race",
        "tile",
        """
        threadgroup float tile[64];
        uint i = thread_index_in_threadgroup;
        tile[i] = 0;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        tile[i] = x[i]; // THERE
        simdgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = tile[PLANT]; // HERE
        """,
        "i ^ 5",
        "i ^ 37",
    ),
    "a simdgroup without its barrier": Case(
        "race",
        "tile",
        """
        threadgroup half tile[64];
        simdgroup_half8x8 m;
        uint i = thread_index_in_simdgroup;
        for (uint j = i; j < 64; j += 32) tile[j] = half(x[j]); // THERE
        PLANT
        simdgroup_load(m, tile); // HERE
        y[i] = m.thread_elements()[0];
        """,
        "simdgroup_barrier(mem_flags::mem_threadgroup);",
        "",
        grid=(32, 1, 1),
    ),
    "a plain read of what others change atomically": Case(
        "race",
        "y",
        """
        uint i = thread_index_in_threadgroup;
        atomic_fetch_add_explicit((device atomic_float*)y, 1.0f, memory_order_relaxed); // THERE
        PLANT
        if (i == 63) y[1] = y[0]; // HERE
        """,
        DEVICE_BARRIER,
        "",
        init_value=0,
        orders=("forward",),
    ),
    "some threads skip the barrier": Case(
        "divergent-barrier",
        None,
        """
        uint i = thread_index_in_threadgroup;
        if (PLANT) {
            threadgroup_barrier(mem_flags::mem_threadgroup); // HERE
        }
        y[i] = x[i];
        """,
        "i < 64",
        "i < 40",
    ),
    "two barriers at once": Case(
        "divergent-barrier",
        None,
        """
        uint i = thread_index_in_threadgroup;
        if (PLANT) {
            threadgroup_barrier(mem_flags::mem_threadgroup); // THERE
        } else {
            threadgroup_barrier(mem_flags::mem_threadgroup); // HERE
        }
        y[i] = x[i];
        """,
        "i < 64",
        "i < 32",
        orders=("forward",),
    ),
    "a thread returns before the barrier": Case(
        "divergent-barrier",
        None,
        """
        uint i = thread_index_in_threadgroup;
        y[i] = 0;
        if (PLANT) return;
        threadgroup_barrier(mem_flags::mem_threadgroup); // HERE
        y[i] = x[i];
        """,
        "i > 63",
        "i > 62",
    ),
    "device read out of bounds": Case(
        "out-of-bounds",
        "x",
        """
        uint i = thread_index_in_threadgroup;
        y[i] = x[PLANT]; // HERE
        """,
        "i",
        "i + 1",
    ),
    "device write out of bounds": Case(
        "out-of-bounds",
        "y",
        """
        uint i = thread_index_in_threadgroup;
        y[PLANT] = x[i]; // HERE
        """,
        "i",
        "i + 16000",
    ),
    "device write before the start": Case(
        "out-of-bounds",
        "y",
        """
        uint i = thread_index_in_threadgroup;
        y[int(i) - PLANT] = x[i]; // HERE
        """,
        "0",
        "1",
    ),
    "constant input out of bounds": Case(
        "out-of-bounds",
        "x",
        """
        uint i = thread_index_in_threadgroup;
        y[i] = x[i / PLANT]; // HERE
        """,
        "16",
        "8",
        inputs={"x": np.arange(4, dtype=np.float32)},
    ),
    "threadgroup write out of bounds": Case(
        "out-of-bounds",
        "tile",
        f"""
        threadgroup float tile[8][8];
        uint i = thread_index_in_threadgroup;
        tile[i / 8 + PLANT][i % 8] = x[i]; // HERE
        {BARRIER}
        y[i] = tile[i / 8][i % 8];
        """,
        "0",
        "1",
    ),
    "from one threadgroup array into the next": Case(
        "out-of-bounds",
        "left",
        f"""
        threadgroup float left[64];
        threadgroup float right[64];
        uint i = thread_index_in_threadgroup;
        right[i] = 0;
        left[i + PLANT] = x[i]; // HERE
        {BARRIER}
        y[i] = left[i] + right[i];
        """,
        "0",
        "64",
    ),
    "simdgroup_store over the edge": Case(
        "out-of-bounds",
        "y",
        """
        simdgroup_float8x8 m(1.0f);
        simdgroup_store(m, y + PLANT, 8); // HERE
        """,
        "0",
        "8",
        grid=(32, 1, 1),
    ),
    "uninitialised threadgroup memory": Case(
        "uninitialised",
        "tile",
        f"""
        threadgroup float tile[64];
        uint i = thread_index_in_threadgroup;
        if (PLANT) tile[i] = x[i];
        {BARRIER}
        y[i] = tile[63 - i]; // HERE
        """,
        "i < 64",
        "i < 63",
    ),
    "threadgroup memory does not outlive its threadgroup": Case(
        "uninitialised",
        "tile",
        f"""
        threadgroup float tile[32];
        uint i = thread_index_in_threadgroup;
        if (PLANT) tile[i] = x[i];
        {BARRIER}
        y[thread_position_in_grid.x] = tile[31 - i]; // HERE
        """,
        "true",
        "threadgroup_position_in_grid.x == 0",
        threadgroup=(32, 1, 1),
    ),
    "uninitialised output": Case(
        "uninitialised",
        "y",
        """
        uint i = thread_index_in_threadgroup;
        PLANT
        y[i] += x[i]; // HERE
        """,
        "y[i] = 0;",
        "",
    ),
    "a write to an input": Case(
        "read-only",
        "x",
        """
        uint i = thread_index_in_threadgroup;
        y[i] = 0;
        ((device float*)PLANT)[i] = 1; // HERE
        """,
        "y",
        "x",
    ),
    "a misaligned vector": Case(
        "misaligned",
        "x",
        """
        uint i = thread_index_in_threadgroup;
        y[i] = length(((const device float4*)(x + PLANT))[i / 16]); // HERE
        """,
        "4",
        "2",
    ),
    "partial sums without release and acquire": Case(
        "cross-threadgroup",
        "y",
        f"""
        threadgroup bool last;
        uint t = thread_index_in_threadgroup, g = threadgroup_position_in_grid.x, n = threadgroups_per_grid.x;
        device float* part = y + 64;
        part[g * 32 + t] = x[g * 32 + t]; // THERE
        PLANT
        {DEVICE_BARRIER}
        if (t == 0)
            last = atomic_fetch_add_explicit((device atomic_uint*)y, 1u, memory_order_relaxed) == n - 1;
        {BARRIER}
        if (last) {{
            PLANT
            float s = 0;
            for (uint i = 0; i < n; i++)
                s += part[i * 32 + t]; // HERE
            y[1 + t] = s;
        }}
        """,
        FENCE,
        "",
        grid=(128, 1, 1),
        threadgroup=(32, 1, 1),
        inputs={"x": np.arange(128, dtype=np.float32)},
        outputs=64 + 128,
        init_value=0,
    ),
    "release without acquire": Case(
        "cross-threadgroup",
        "y",
        f"""
        uint t = thread_index_in_threadgroup, g = threadgroup_position_in_grid.x;
        device atomic_uint* flag = (device atomic_uint*)y;
        if (g == 0) {{
            y[32 + t] = x[t]; // THERE
            {FENCE}
            atomic_fetch_add_explicit(flag, 1u, memory_order_relaxed);
        }} else if (atomic_load_explicit(flag, memory_order_relaxed) == 32) {{
            PLANT
            y[64 + t] = y[32 + t]; // HERE
        }}
        """,
        FENCE,
        "",
        threadgroup=(32, 1, 1),
        outputs=96,
        init_value=0,
        orders=("forward",),
    ),
    "acquire without release": Case(
        "cross-threadgroup",
        "y",
        f"""
        uint t = thread_index_in_threadgroup, g = threadgroup_position_in_grid.x;
        device atomic_uint* flag = (device atomic_uint*)y;
        if (g == 0) {{
            y[32 + t] = x[t]; // THERE
            PLANT
            atomic_fetch_add_explicit(flag, 1u, memory_order_relaxed);
        }} else if (atomic_load_explicit(flag, memory_order_relaxed) == 32) {{
            {FENCE}
            y[64 + t] = y[32 + t]; // HERE
        }}
        """,
        FENCE,
        "threadgroup_barrier(mem_flags::mem_device);",
        threadgroup=(32, 1, 1),
        outputs=96,
        init_value=0,
        orders=("forward",),
    ),
    "two threadgroups write one element": Case(
        "cross-threadgroup",
        "y",
        """
        uint i = thread_position_in_grid.x;
        y[PLANT] = x[i]; // HERE
        """,
        "i",
        "i % 32",
        threadgroup=(32, 1, 1),
    ),
    "a simdgroup operation for some lanes only": Case(
        "divergent-simdgroup",
        None,
        f"""
        uint i = thread_index_in_threadgroup;
        float s = x[i];
        if (PLANT)
            s = simd_sum(s); // HERE
        {BARRIER}
        y[i] = s;
        """,
        "i < 32",
        "i < 16",
        orders=("forward",),
    ),
    "two simdgroup operations at once": Case(
        "divergent-simdgroup",
        None,
        """
        uint i = thread_index_in_threadgroup;
        float s;
        if (PLANT)
            s = simd_max(x[i]); // THERE
        else
            s = simd_min(x[i]); // HERE
        y[i] = s;
        """,
        "i < 32",
        "i < 40",
        orders=("forward",),
    ),
    "a matrix operation in a partial simdgroup": Case(
        "divergent-simdgroup",
        None,
        """
        uint i = thread_index_in_threadgroup;
        if (i < PLANT) {
            simdgroup_float8x8 m;
            simdgroup_load(m, x); // HERE
            y[i] = m.thread_elements()[0];
        }
        """,
        "32",
        "64",
        grid=(48, 1, 1),
    ),
    "a shuffle from a lane that has returned": Case(
        "divergent-simdgroup",
        None,
        """
        uint i = thread_index_in_threadgroup;
        if (i >= 20) return;
        y[i] = simd_shuffle(x[i], PLANT); // HERE
        """,
        "19",
        "20",
        grid=(32, 1, 1),
    ),
    "simdgroup_load with a pointer for each lane": Case(
        "non-uniform",
        None,
        """
        simdgroup_float8x8 m;
        simdgroup_load(m, x + PLANT); // HERE
        y[thread_index_in_simdgroup] = m.thread_elements()[0];
        """,
        "0",
        "thread_index_in_simdgroup",
        grid=(32, 1, 1),
        inputs={"x": np.zeros(128, np.float32)},
    ),
    "waiting for another threadgroup": Case(
        "endless",
        None,
        """
        device atomic_uint* flag = (device atomic_uint*)y;
        if (threadgroup_position_in_grid.x == 0)
            while (atomic_load_explicit(flag, memory_order_relaxed) == PLANT) {} // HERE
        else
            atomic_store_explicit(flag, 1u, memory_order_relaxed);
        """,
        "7",
        "0",
        threadgroup=(32, 1, 1),
        init_value=0,
        orders=("forward",),
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CASES)
def test_the_sound_twin_reports_nothing(name: str, order: str) -> None:
    case = CASES[name]
    with emulator.options(check=True, order=order, seed=3):
        case.run(case.sound)


@pytest.mark.parametrize(("name", "order"), [(name, order) for name, case in CASES.items() for order in case.orders])
def test_the_fault_is_found(name: str, order: str) -> None:
    case = CASES[name]
    with emulator.options(check=True, order=order, seed=3), pytest.raises(KernelFault) as caught:
        case.run(case.faulty)
    fault = caught.value
    assert fault.kind == case.kind
    assert fault.kernel == "planted"
    assert fault.buffer == case.buffer
    assert fault.site is not None
    assert fault.site.file == "planted"
    assert fault.site.text == case.source.replace("PLANT", case.faulty).split("\n")[fault.site.line - 1]
    if case.line("THERE") is None:
        assert fault.site.line == case.line("HERE"), str(fault)
    else:  # which of the two comes first is a matter of order
        assert fault.other_site is not None
        assert {fault.site.line, fault.other_site.line} == {case.line("HERE"), case.line("THERE")}, str(fault)
    assert fault.thread is not None
    assert fault.threadgroup is not None
    for part in ("[metal_kernel] planted: ", case.kind, f"line {fault.site.line}", f"thread {fault.thread}"):
        assert part in str(fault)
    if case.buffer is not None:
        assert f" of {case.buffer} " in str(fault)


def test_there_is_a_case_of_every_kind() -> None:
    elsewhere = {"none", "threadgroup-memory", "stack-overflow"}
    assert {case.kind for case in CASES.values()} == set(emulator.KINDS) - elsewhere


@pytest.mark.parametrize(("count", "fits"), [(8192, True), (8193, False)])
def test_more_threadgroup_memory_than_there_is(count: int, fits: bool) -> None:
    source = f"threadgroup float big[{count}]; big[thread_index_in_threadgroup] = 1; y[0] = big[0];"
    kernel = emulator.metal_kernel("large", [], ["y"], source)
    call: dict[str, Any] = {
        "inputs": [],
        "grid": (1, 1, 1),
        "threadgroup": (1, 1, 1),
        "output_shapes": [(1,)],
        "output_dtypes": [np.float32],
    }
    if fits:
        assert kernel(**call)[0][0] == 1
        return
    with pytest.raises(KernelFault, match=r"large: 32784 bytes of threadgroup memory \(big 32772\)") as caught:
        kernel(**call)
    assert caught.value.kind == "threadgroup-memory"


def test_a_line_of_the_header_is_named() -> None:
    header = "inline float pick(const device float* x, uint i) {\n  return x[i + 64];\n}\n"
    kernel = emulator.metal_kernel("planted", ["x"], ["y"], "y[0] = pick(x, 0);", header)
    with emulator.options(check=True), pytest.raises(KernelFault) as caught:
        kernel(
            inputs=[np.zeros(64, np.float32)],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[np.float32],
        )
    site = caught.value.site
    assert site is not None
    assert (site.file, site.line, site.text) == ("planted header", 2, "  return x[i + 64];")


def test_positions_are_named_in_partial_threadgroups() -> None:
    # A grid of 5 x 3 in threadgroups of 4 x 2: the last one is a single thread.
    source = "uint2 p = thread_position_in_grid.xy; y[p.x == 4 && p.y == 2 ? 9999 : p.x + 5 * p.y] = 1;"
    for row, thread, threadgroup in ((2, (0, 0, 0), (1, 1, 0)), (1, (0, 1, 0), (1, 0, 0))):
        kernel = emulator.metal_kernel("planted", [], ["y"], source.replace("p.y == 2", f"p.y == {row}"))
        call: dict[str, Any] = {"inputs": [], "grid": (5, 3, 1), "threadgroup": (4, 2, 1)}
        with emulator.options(check=True), pytest.raises(KernelFault) as caught:
            kernel(**call, output_shapes=[(15,)], output_dtypes=[np.float32])
        assert (caught.value.thread, caught.value.threadgroup) == (thread, threadgroup)


def test_too_much_memory_of_a_thread() -> None:
    source = """
        volatile float mine[60000];
        for (int i = 0; i < 60000; i++) mine[i] = x[i % 8];
        threadgroup_barrier(mem_flags::mem_none);
        y[0] = mine[7];
    """
    kernel = emulator.metal_kernel("deep", ["x"], ["y"], source)
    call: dict[str, Any] = {"inputs": [np.zeros(8, np.float32)], "grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    call |= {"output_shapes": [(1,)], "output_dtypes": [np.float32]}
    assert kernel(**call)[0][0] == 0
    kernel = emulator.metal_kernel("deep", ["x"], ["y"], source.replace("60000", "70000"))
    with pytest.raises(KernelFault, match=r"thread \(0, 0, 0\) .* more than 256 KiB") as caught:
        kernel(**call)
    assert caught.value.kind == "stack-overflow"


def test_without_check_nothing_is_reported() -> None:
    case = CASES["uninitialised output"]
    assert np.isnan(case.run(case.faulty)).all()
