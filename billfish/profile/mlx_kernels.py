"""MLX's own quantized kernels in the emulator, from the headers inside its wheel: the measure for ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.metal import emulator
from billfish.backends.metal.choose import up
from billfish.tensor import QuantizedTensor

Array = NDArray[Any]

# Formats that both have, and the family of kernels that MLX has for each.
MLX_FORMATS = {"mxfp4": "fp", "nvfp4": "fp", "affine4": "affine"}
FOLDER = "mlx/backend/metal/kernels"
HEADERS = {
    "fp": ("steel/gemm/gemm.h", "quantized_utils.h", "fp_quantized.h"),
    "affine": ("steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"),
}
# What follows the sizes in each of their signatures: the strides of batches, of which there are none.
NO_BATCH = {
    "fp": "0, nullptr, nullptr, 0, nullptr, nullptr, nullptr",
    "affine": "0, nullptr, nullptr, 0, nullptr, nullptr, nullptr, nullptr",
}
PLACE = "simdgroup_index_in_threadgroup, thread_index_in_simdgroup"
# Rows that qmv_wide takes at a time, and lanes that share a column. MLX has a table of them by GPU; with 8 rows the
# weights are read once for all of them, which is the least.
WIDE_ROWS, WIDE_LANES = 8, 8


@dataclass(frozen=True)
class MlxKernel:
    """A kernel of theirs: its call, and its grid."""

    name: str
    source: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def mlx_kernel(family: str, m: int, n: int, k: int) -> MlxKernel:
    """The one that MLX takes for x [m, k] and W [n, k]."""
    no_batch = NO_BATCH[family]
    planes = "w, scales, nullptr" if family == "fp" else "w, scales, biases"
    if m == 1:
        name, template = ("qmv_fast", "4, false, false") if n % 8 == 0 and k % 512 == 0 else ("qmv", "4, false")
        arguments = f"{planes}, x, y, K, N, {no_batch}, threadgroup_position_in_grid, {PLACE}"
        grid, threadgroup = (32, 2 * up(n, 8), 1), (32, 2, 1)
    elif m <= WIDE_ROWS:
        name, template = "qmv_wide", f"4, {WIDE_ROWS}, {WIDE_LANES}, false"
        planes = planes.removesuffix(", nullptr")
        arguments = f"{planes}, x, y, K, N, M, {no_batch}, threadgroup_position_in_grid, {PLACE}"
        grid, threadgroup = (32, 2 * up(n, 2 * 32 // WIDE_LANES), 1), (32, 2, 1)
    else:
        name, template = "qmm_t", "4, false, false"
        place = f"threadgroup_position_in_grid, thread_index_in_threadgroup, {PLACE}"
        arguments = f"{planes}, x, y, K, N, M, {no_batch}, {place}"
        grid, threadgroup = (32 * up(n, 32), 2 * up(m, 32), 2), (32, 2, 2)
    return MlxKernel(f"{family}_{name}", f"{family}_{name}<T, GROUP, {template}>({arguments});", grid, threadgroup)


def mlx_arrays(tensor: QuantizedTensor, dtype: np.dtype[Any]) -> dict[str, Array]:
    """The weights as MLX has them; affine scales are of x's type."""
    storage = tensor.storage
    arrays = {"w": np.ascontiguousarray(storage["packed"]).view(np.uint32), "scales": storage["scales"]}
    if MLX_FORMATS[tensor.format.name] == "affine":
        arrays |= {"scales": storage["scales"].astype(dtype), "biases": storage["biases"].astype(dtype)}
    return arrays


def run_mlx(tensor: QuantizedTensor, x: Array) -> Array:
    """x [M, K] times a tensor of one of MLX_FORMATS; nvfp4 without its global scale."""
    (m, k), n = x.shape, tensor.shape[0]
    family = MLX_FORMATS[tensor.format.name]
    kernel = mlx_kernel(family, m, n, k)
    arrays = mlx_arrays(tensor, x.dtype)
    built = emulator.metal_kernel(
        name=kernel.name,
        input_names=[*arrays, "x", "K", "N", "M"],
        output_names=["y"],
        source=kernel.source,
        header="".join(f'#include "{FOLDER}/{file}"\n' for file in HEADERS[family]),
    )
    (y,) = built(
        inputs=[*arrays.values(), x, k, n, m],
        template=[("T", x.dtype), ("GROUP", tensor.group_size)],
        grid=kernel.grid,
        threadgroup=kernel.threadgroup,
        output_shapes=[(m, n)],
        output_dtypes=[x.dtype],
    )
    return np.asarray(y)
