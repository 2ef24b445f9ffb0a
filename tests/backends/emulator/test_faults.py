"""Faults planted in kernels, one kind after another: each is found, its line named; the sound twin reports none."""

from __future__ import annotations

from typing import Any

import faulty_kernels_memory
import faulty_kernels_order
import numpy as np
import pytest
from cases import diagonal
from emulator_support import ORDERS

from billfish.backends import emulator
from billfish.backends.emulator import KernelFault

CASES = faulty_kernels_memory.CASES | faulty_kernels_order.CASES


@pytest.mark.parametrize(("name", "order"), diagonal(3, CASES, ORDERS))
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
    for part in ("metal_kernel: planted: ", case.kind, f"line {fault.site.line}", f"thread {fault.thread}"):
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
    with pytest.raises(KernelFault, match=r"large.*32784 bytes of threadgroup memory \(big 32772\)") as caught:
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
