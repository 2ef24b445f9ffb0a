"""MLX's own quantized kernels, from the headers in its wheel: proof that the emulator runs Metal, not only ours."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from billfish.backends import emulator
from billfish.backends.emulator.translate import mlx_headers
from billfish.core.arrays import bfloat16

HEADER = """
#include "mlx/backend/metal/kernels/steel/gemm/gemm.h"
#include "mlx/backend/metal/kernels/quantized_utils.h"
#include "mlx/backend/metal/kernels/fp_quantized.h"
"""
GROUPS = {"mxfp4": 32, "nvfp4": 16}
MATVEC = """
    fp_qmv<T, group_size, 4, false>(
        w, scales, nullptr, x, y, K, N, 0, nullptr, nullptr, 0, nullptr, nullptr, nullptr,
        threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""
MATMUL = """
    fp_qmm_t<T, group_size, 4, false, false>(
        w, scales, nullptr, x, y, K, N, M, 0, nullptr, nullptr, 0, nullptr, nullptr, nullptr,
        threadgroup_position_in_grid, thread_index_in_threadgroup, simdgroup_index_in_threadgroup,
        thread_index_in_simdgroup);
"""
TYPES = {"float16": np.dtype(np.float16), "bfloat16": bfloat16}
TOLERANCES = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def run(
    source: str, mode: str, dtype: str, m: int, n: int, k: int, grid: Any, threadgroup: Any, header: str = HEADER
) -> float:
    """The largest error against float64, relative to the largest result."""
    rng = np.random.default_rng(m + n + k)
    w, scales = mx.quantize(mx.array(rng.standard_normal((n, k)).astype(np.float32)), mode=mode)
    exact = np.array(mx.dequantize(w, scales, mode=mode, dtype=mx.float32)).astype(np.float64)
    x = rng.standard_normal((m, k)).astype(TYPES[dtype])
    kernel = emulator.metal_kernel(
        name=f"mlx_{mode}",
        input_names=["w", "scales", "x", "K", "N", "M"],
        output_names=["y"],
        source=source,
        header=header,
    )
    (y,) = kernel(
        inputs=[np.array(w), np.array(scales), x, k, n, m],
        template=[("T", TYPES[dtype]), ("group_size", GROUPS[mode])],
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[(m, n)],
        output_dtypes=[TYPES[dtype]],
    )
    expected = x.astype(np.float64) @ exact.T
    return float(np.abs(y.astype(np.float64) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("m", [1, 3])
def test_matvec(mode: str, dtype: str, m: int) -> None:
    n, k = 40, 512
    with emulator.options(check=True):
        error = run(MATVEC, mode, dtype, m, n, k, (32 * m, 2 * (n // 8), 1), (32, 2, 1))
    assert error < TOLERANCES[dtype]


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_matmul(mode: str, order: str) -> None:
    m, n, k = 45, 72, 128  # tiles of 32 x 32, the last ones partial
    with emulator.options(check=True, order=order, seed=1):
        error = run(MATMUL, mode, "float16", m, n, k, (32 * -(-n // 32), 2 * -(-m // 32), 2), (32, 2, 2))
    assert error < TOLERANCES["float16"]


@pytest.mark.parametrize("which", [0, 1])
def test_a_barrier_taken_out_of_mlx_is_missed(which: int) -> None:
    folder = mlx_headers()
    assert folder is not None
    *before, last = HEADER.strip().split("\n")
    text = (folder / last.split('"')[1]).read_text()
    start = text.index("METAL_FUNC void fp_qmm_t_impl(")
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    # In the loop for partial tiles in both directions, which is the first.
    at = start
    for _ in range(which + 1):
        at = text.index(barrier, at) + len(barrier)
    header = "\n".join(before) + '\n#include "mlx/backend/metal/kernels/fp4.h"\n'
    header += text[: at - len(barrier)] + " " * len(barrier) + text[at:]
    with emulator.options(check=True), pytest.raises(emulator.KernelFault) as caught:
        run(MATMUL, "mxfp4", "float16", 45, 40, 128, (64, 4, 2), (32, 2, 2), header)
    assert caught.value.kind in ("race", "uninitialised")
    assert caught.value.buffer in ("Xs", "Ws")
