"""What lanes execute is counted: kernels whose content is known, and the rules by which LLVM's code is charged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from billfish.backends import emulator
from billfish.backends.emulator.counting import charges, read_functions

THREADS = 64


def count(source: str, x: Any, y: Any = np.float32, *, grid: int = THREADS, most: int = 0) -> emulator.Launch:
    """One launch of `source`, from x to y, a threadgroup of 64."""
    kernel = emulator.metal_kernel(name="counted", input_names=["x"], output_names=["y"], source=source)
    with emulator.launches(instructions=True, most=most) as log:
        kernel(inputs=[x], output_shapes=[(grid,)], output_dtypes=[y], grid=(grid, 1, 1), threadgroup=(THREADS, 1, 1))
    return log[0]


def executed(launch: emulator.Launch) -> dict[str, float]:
    """Of one lane, what is not zero."""
    return {kind: number / THREADS for kind, number in launch.instructions.executed.items() if number}


PLACE = "uint i = thread_position_in_grid.x;"


# ---- whole kernels ------------------------------------------------------------------------------------------------


def test_multiply_adds_are_counted_for_each_lane():
    source = f"{PLACE} float v = x[i]; for (int j = 0; j < 5; j++) v = v * v + 0.5f; y[i] = v;"
    launch = count(source, np.ones(THREADS, np.float32))
    assert executed(launch) == {"simple": 5, "memory": 2}
    assert launch.loads == {"device": {1: 0, 2: 0, 4: THREADS, 8: 0, 16: 0}, "threadgroup": dict.fromkeys(WIDTHS, 0)}
    assert launch.stores["device"][4] == THREADS
    assert launch.instructions.cycles == launch.instructions.slots == 7 * THREADS
    assert (launch.threadgroups, launch.threads) == (1, THREADS)


WIDTHS = (1, 2, 4, 8, 16)


def test_a_loop_is_counted_as_often_as_it_runs():
    """Of unknown length: an addition, a multiply-add, a comparison and a branch each time."""
    source = f"{PLACE} float v = 0; for (uint j = 0; j < x[i]; j++) v = v * 0.5f + 1.0f; y[i] = v;"
    few, many = (count(source, np.full(THREADS, times, np.uint32)) for times in (10, 110))
    assert executed(many)["simple"] - executed(few)["simple"] == 100 * 4


def test_classes_and_widths():
    source = f"""{PLACE}
        threadgroup float4 tile[64];
        const uint4 four = ((const device uint4*)x)[i];
        tile[i] = float4(four);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = simd_sum(tile[63 - i].x) + as_type<float>(four.x >> (four.y & 31));
    """
    launch = count(source, np.ones(4 * THREADS, np.uint32))
    lane = executed(launch)
    assert lane["complex"] == 4  # to float
    assert lane["worse"] == 1  # the shift by a register
    assert lane["between lanes"] == 1
    assert launch.instructions.issue["between lanes"] == 15 * THREADS
    assert launch.instructions.pipe == (4 * 4 + 8) * THREADS
    assert launch.loads["device"][16] == launch.stores["threadgroup"][16] == THREADS
    assert launch.loads["threadgroup"][4] + launch.loads["threadgroup"][16] == THREADS


def test_a_simdgroup_pays_for_a_branch_that_one_lane_takes():
    source = f"""{PLACE}
        if (thread_index_in_simdgroup == 3) {{
            float v = x[i];
            for (uint j = 0; j < uint(x[0]); j++) v = v * v + 0.5f;
            y[i] = v;
        }}
    """
    few, many = (count(source, np.full(THREADS, times, np.float32)).instructions for times in (10, 110))
    simdgroups = THREADS // 32
    assert many.executed["simple"] - few.executed["simple"] == 100 * 4 * simdgroups
    assert many.issue["simple"] - few.issue["simple"] == 100 * 4 * simdgroups * 32


def test_matrices_are_registers():
    source = """
        simdgroup_matrix<float, 8, 8> a, b, c(0);
        simdgroup_load(a, x);
        simdgroup_load(b, x, 8, ulong2(0, 0), true);
        for (int j = 0; j < 3; j++) simdgroup_multiply_accumulate(c, a, b, c);
        simdgroup_store(c, y);
    """
    launch = count(source, np.ones(64, np.float32))
    assert executed(launch)["matrix"] == 3
    assert executed(launch)["memory"] == 1 + 2 + 1
    assert launch.matrix_multiplies == 3 * THREADS // 32
    assert launch.loads["device"][4] == 4 * THREADS


def test_a_part_of_the_grid_stands_for_all_of_it():
    source = f"{PLACE} y[i] = x[i] * 2.0f;"
    x = np.ones(8 * THREADS, np.float32)
    whole, part = count(source, x, grid=8 * THREADS), count(source, x, grid=8 * THREADS, most=2)
    assert part == whole
    assert part.instructions.executed["simple"] == 8 * THREADS


def test_without_being_asked_nothing_is_counted():
    kernel = emulator.metal_kernel(
        name="counted", input_names=["x"], output_names=["y"], source=f"{PLACE} y[i] = x[i];"
    )
    with emulator.launches() as log:
        kernel(
            inputs=[np.ones(THREADS, np.float32)],
            output_shapes=[(THREADS,)],
            output_dtypes=[np.float32],
            grid=(THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
        )
    assert log[0].instructions is None


# ---- rules --------------------------------------------------------------------------------------------------------


def charged(lines: str) -> list[tuple[str, float, float]]:
    """Class, issue slots and cycles of the pipe, for the instructions of a function that are not free."""
    code = "define void @f(ptr %p, ptr %q, i32 %a, i32 %b, i64 %w, float %x, half %h, <4 x float> %v) #0 {\n"
    code += f"{lines}\n  ret void\n}}\nattributes #0 = {{ sanitize_thread }}\n"
    (function,) = read_functions(code)
    found = [each for block in function.blocks for each in charges(function, block)]
    return [(each.kind, each.issue * each.count, each.pipe * each.count) for each in found]


SIMPLE, COMPLEX, MEMORY = ("simple", 1, 0), ("complex", 1, 4), ("memory", 1, 0)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param("  %1 = and i32 %a, 15", [SIMPLE], id="mask"),
        pytest.param("  %1 = fadd contract <4 x float> %v, %v, !dbg !5", [("simple", 4, 0)], id="vector"),
        pytest.param("  %1 = shl i32 %a, 3\n  %2 = add i32 %1, %b", [SIMPLE], id="shift in an addition"),
        pytest.param("  %1 = shl i32 %a, 5\n  %2 = add i32 %1, %b", [COMPLEX, SIMPLE], id="shift too far"),
        pytest.param(
            "  %1 = shl i32 %a, 3\n  %2 = shl i32 %b, 2\n  %3 = add i32 %1, %2",
            [COMPLEX, SIMPLE],
            id="one of two shifts",
        ),
        pytest.param(
            "  %1 = bitcast <4 x float> %v to <4 x i32>\n  %2 = lshr <4 x i32> %1, <i32 0, i32 4, i32 8, i32 12>",
            [("complex", 4, 16)],
            id="known shifts",
        ),
        pytest.param("  %1 = mul i32 %a, %b\n  %2 = add i32 %1, %b", [COMPLEX], id="integer multiply-add"),
        pytest.param("  %1 = lshr i32 %a, 4\n  %2 = and i32 %1, 15", [COMPLEX], id="bit-field extract"),
        pytest.param("  %1 = lshr i32 %a, 4\n  %2 = and i32 %1, 240", [COMPLEX, SIMPLE], id="shift and mask"),
        pytest.param("  %1 = lshr i32 %a, 16\n  %2 = trunc nuw i32 %1 to i16", [], id="upper half"),
        pytest.param("  %1 = lshr i32 %a, %b", [("worse", 1, 8)], id="shift by a register"),
        pytest.param("  %1 = fmul float %x, %x\n  %2 = fadd float %1, %x", [SIMPLE], id="fma"),
        pytest.param(
            "  %1 = fmul float %x, %x\n  %2 = fmul float %x, 2.0\n  %3 = fadd float %1, %2",
            [SIMPLE, SIMPLE],
            id="fma of one of two products",
        ),
        pytest.param("  %1 = fpext half %h to float\n  %2 = fneg float %1\n", [], id="on the way in"),
        pytest.param(
            "  %1 = fpext half %h to double\n  %2 = fmul double %1, %1\n  %3 = fadd double %2, %1\n"
            "  %4 = fptrunc double %3 to half",
            [SIMPLE],
            id="fma of half",
        ),
        pytest.param("  %1 = icmp eq i32 %a, 0\n  %2 = select i1 %1, i32 %a, i32 %b", [SIMPLE], id="select"),
        pytest.param("  %1 = uitofp nneg i32 %a to float", [COMPLEX], id="to float"),
        pytest.param("  %1 = fdiv float %x, %x", [("complex", 1, 6)], id="division"),
        pytest.param("  %1 = add i64 %w, %w", [("worse", 4, 0)], id="64 bits"),
        pytest.param(
            "  %1 = sext i32 %a to i64\n  %2 = mul nsw i64 %1, %1", [("worse", 1, 8)], id="product of 64 bits"
        ),
        pytest.param(
            "  %1 = zext i32 %a to i64\n  %2 = getelementptr inbounds i32, ptr %p, i64 %1\n  %3 = load i32, ptr %2",
            [MEMORY],
            id="base and index",
        ),
        pytest.param("  %1 = getelementptr i32, ptr %p, i64 %w\n  %2 = load i32, ptr %1", [("worse", 4, 0), MEMORY]),
        pytest.param(
            "  %1 = load half, ptr %p, align 2\n  %2 = getelementptr i8, ptr %p, i64 2\n  %3 = load half, ptr %2",
            [MEMORY],
            id="neighbours",
        ),
        pytest.param("  %1 = load half, ptr %p\n  %2 = load half, ptr %q", [MEMORY, MEMORY], id="strangers"),
        pytest.param("  %1 = alloca i32\n  store i32 %a, ptr %1\n  %2 = load i32, ptr %1", [], id="registers"),
        pytest.param("  %1 = call float @llvm.fma.f32(float %x, float %x, float %x)", [SIMPLE], id="intrinsic"),
        pytest.param(
            "  %1 = call float @_ZN5metal12simd_shuffleIfEET_S1_t(float %x, i16 noundef zeroext 3)",
            [("between lanes", 2, 0)],
            id="shuffle by a constant",
        ),
        pytest.param(
            "  %1 = trunc i32 %a to i16\n"
            "  %2 = call float @_ZN5metal12simd_shuffleIfEET_S1_t(float %x, i16 noundef zeroext %1)",
            [("between lanes", 30, 0)],
            id="shuffle by a register",
        ),
        pytest.param("  call void @__tsan_read4(ptr %p)", [], id="the sanitizer"),
    ],
)
def test_rules(lines, expected):
    assert charged(lines) == expected


def test_what_is_unknown_is_not_passed_over():
    with pytest.raises(ValueError, match="no class for frem"):
        charged("  %1 = frem float %x, %x")
