"""Testing a Metal kernel for MLX without a Mac: a softmax over rows, under pytest on any machine.

    pip install '.[metal-emulator]' mlx pytest       # on Linux: 'mlx[cpu]'
    pytest examples/test_my_mlx_kernel.py

The kernel is the author's own; all that the tests do is to hand it to `emulator.metal_kernel` instead of
`mx.fast.metal_kernel`. docs/emulator.md says what each report means.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from billfish.backends import emulator
from billfish.backends.emulator import lint

SOFTMAX = """
    // One threadgroup of 128 threads, four simdgroups, for each row of x.
    threadgroup float partial[4];
    uint row = threadgroup_position_in_grid.x, columns = x_shape[1];
    uint t = thread_index_in_threadgroup, lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
    const device T* in = x + row * columns;

    float largest = -INFINITY;
    for (uint i = t; i < columns; i += 128) largest = max(largest, float(in[i]));
    largest = simd_max(largest);
    if (lane == 0) partial[simdgroup] = largest;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    largest = max(max(partial[0], partial[1]), max(partial[2], partial[3]));
    threadgroup_barrier(mem_flags::mem_threadgroup);  // before partial is written again

    float sum = 0;
    for (uint i = t; i < columns; i += 128) sum += exp(float(in[i]) - largest);
    sum = simd_sum(sum);
    if (lane == 0) partial[simdgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = partial[0] + partial[1] + partial[2] + partial[3];
    for (uint i = t; i < columns; i += 128) y[row * columns + i] = T(exp(float(in[i]) - largest) / sum);
"""


def softmax(x: Any, metal_kernel: Any = mx.fast.metal_kernel, source: str = SOFTMAX) -> Any:
    """The softmax of each row of x [rows, columns]. This is what an application calls, on a Mac."""
    kernel = metal_kernel(name="softmax", input_names=["x"], output_names=["y"], source=source)
    return kernel(
        inputs=[x],
        template=[("T", x.dtype)],
        grid=(128 * x.shape[0], 1, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )[0]


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("columns", [8, 128, 300])
def test_it_is_right_in_every_order(columns: int, order: str) -> None:
    x = mx.random.normal((5, columns)).astype(mx.float16)
    with emulator.options(check=True, order=order, seed=1):
        y = softmax(x, emulator.metal_kernel)
    assert mx.allclose(y, mx.softmax(x, axis=1, precise=True), rtol=2**-9, atol=1e-4).item()


def test_a_careless_compiler_does_no_harm() -> None:
    x = np.random.default_rng(0).standard_normal((3, 300)).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    with emulator.options(hostile=True):
        y = softmax(x, emulator.metal_kernel)
    np.testing.assert_allclose(y, exact / exact.sum(1, keepdims=True), rtol=1e-5)


def test_x_is_read_three_times_and_no_more() -> None:
    x = np.zeros((4, 256), np.float32)
    with emulator.launches() as log:
        softmax(x, emulator.metal_kernel)
    assert log[0].read["x"] == 3 * x.nbytes
    assert log[0].written["y"] == x.nbytes
    assert log[0].threadgroup_memory == 16


def test_the_lint_is_silent() -> None:
    kernel = emulator.metal_kernel("softmax", ["x"], ["y"], SOFTMAX)
    assert lint.check_kernel(kernel, [np.zeros((4, 256), np.float32)], [np.float32], [("T", np.float32)]) == []


def test_without_its_second_barrier_the_emulator_says_where_it_fails() -> None:
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);  // before partial is written again"
    with emulator.options(check=True), pytest.raises(emulator.KernelFault) as caught:
        softmax(np.zeros((1, 256), np.float32), emulator.metal_kernel, SOFTMAX.replace(barrier, ""))
    assert (caught.value.kind, caught.value.buffer) == ("race", "partial")
