"""MLX's own quantized kernels in the emulator, from the headers inside its wheel: the measure for ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends import emulator
from billfish.backends.metal.kernels import up
from billfish.core.tensor import QuantizedTensor

Array = NDArray[Any]

# Formats that both have, and the family of kernels that MLX has for each, with the bits of a code.
MLX_FORMATS = {
    "mxfp4": ("fp", 4),
    "nvfp4": ("fp", 4),
    "affine4": ("affine", 4),
    "mxfp8": ("fp", 8),
    "affine8": ("affine", 8),
}
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
PLANES = {"fp": "w, scales, nullptr", "affine": "w, scales, biases"}
PLACE = "simdgroup_index_in_threadgroup, thread_index_in_simdgroup"
TILE_PLACE = f"threadgroup_position_in_grid, thread_index_in_threadgroup, {PLACE}"
# Rows that qmv_wide takes at a time, at most, and lanes that share a column.
WIDE_ROWS, WIDE_LANES = 5, 16
# Threadgroups that MLX would like to have for tiles; where there are fewer it cuts K.
ENOUGH_TILES = 512
# What adds slices of K up, where there are fewer than 32: 4 numbers for each of 32 lanes, and up to 8 rows of lanes.
REDUCTION, REDUCTION_NUMBERS, REDUCTION_ROWS = "col_reduce_small", 128, 8
# As in MLX's ops.h, without the atomics that it has for others.
REDUCTION_OPERATION = """
constexpr constant uint8_t simd_size = 32;
template <typename U>
struct Sum {
  static constexpr constant U init = U(0);
  U operator()(U a, U b) thread { return a + b; }
};
"""


@dataclass(frozen=True)
class MlxKernel:
    """A kernel of theirs: its call, and its grid."""

    name: str
    source: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    slices: int = 1  # of K; partial sums are float32 [slices, STRIDE], which REDUCTION adds up
    sizes: dict[str, int] = field(default_factory=dict)  # more inputs


def first_tiled(n: int, k: int) -> int:
    """The M from which MLX takes tiles, on M1 and M2 but for their Ultras."""
    if max(k, n) <= 2048:
        return 14
    return 10 if max(k, n) <= 4096 else 6


def mlx_kernel(family: str, bits: int, m: int, n: int, k: int, group: int) -> MlxKernel:
    """The one that MLX 0.32 takes on M1 and M2 for x [m, k] and W [n, k]."""
    if m >= first_tiled(n, k):
        return _tiled(family, bits, m, n, k, group)
    # On these GPUs affine weights are read again for every row: MLX found qmv_wide slower there.
    return _wide(family, bits, m, n) if m > 1 and family == "fp" else _qmv(family, bits, m, n, k)


def _qmv(family: str, bits: int, m: int, n: int, k: int) -> MlxKernel:
    is_fast = n % 8 == 0 and k % 512 == 0
    name, template = ("qmv_fast", f"{bits}, false, false") if is_fast else ("qmv", f"{bits}, false")
    arguments = f"{PLANES[family]}, x, y, K, N, {NO_BATCH[family]}, threadgroup_position_in_grid, {PLACE}"
    return _kernel(family, name, template, arguments, (32 * m, 2 * up(n, 8), 1), (32, 2, 1))


def _wide(family: str, bits: int, m: int, n: int) -> MlxKernel:
    """As few passes over the weights as WIDE_ROWS allows, and as few rows for each as those need."""
    passes = up(m, WIDE_ROWS)
    planes = PLANES[family].removesuffix(", nullptr")
    arguments = f"{planes}, x, y, K, N, M, {NO_BATCH[family]}, threadgroup_position_in_grid, {PLACE}"
    rows = up(m, passes)
    grid = (32 * passes, 2 * up(n, 2 * 32 // WIDE_LANES), 1)
    return _kernel(family, "qmv_wide", f"{bits}, {rows}, {WIDE_LANES}, false", arguments, grid, (32, 2, 1))


def _tiled(family: str, bits: int, m: int, n: int, k: int, group: int) -> MlxKernel:
    across, down, aligned = up(n, 32), up(m, 32), str(n % 32 == 0).lower()
    slices = slices_of_k(across * down, k, group)
    grid, threadgroup = (32 * across, 2 * down, 2 * slices), (32, 2, 2)
    if slices == 1:
        arguments = f"{PLANES[family]}, x, y, K, N, M, {NO_BATCH[family]}, {TILE_PLACE}"
        return _kernel(family, "qmm_t", f"{bits}, {aligned}, false", arguments, grid, threadgroup)
    planes = PLANES[family].removesuffix(", nullptr")
    arguments = f"{planes}, x, y, K, N, M, PART, STRIDE, {TILE_PLACE}"
    built = _kernel(family, "qmm_t_splitk", f"{bits}, {aligned}", arguments, grid, threadgroup)
    # Padded: threads of REDUCTION that have no number return before a barrier, which the emulator reports.
    stride = REDUCTION_NUMBERS * up(m * n, REDUCTION_NUMBERS)
    return MlxKernel(built.name, built.source, grid, threadgroup, slices, {"PART": k // slices, "STRIDE": stride})


def slices_of_k(tiles: int, k: int, group: int) -> int:
    """Whole tiles of 32 and whole groups each."""
    unit = max(group, 32)
    slices = min(max(ENOUGH_TILES // tiles, 1), k // unit)
    while slices > 1 and k % (slices * unit):
        slices -= 1
    return max(slices, 1)


def _kernel(
    family: str,
    name: str,
    template: str,
    arguments: str,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
) -> MlxKernel:
    return MlxKernel(f"{family}_{name}", f"{family}_{name}<T, GROUP, {template}>({arguments});", grid, threadgroup)


def mlx_arrays(tensor: QuantizedTensor, dtype: np.dtype[Any]) -> dict[str, Array]:
    """The weights as MLX has them; affine scales are of x's type."""
    storage = tensor.storage
    arrays = {"w": np.ascontiguousarray(storage["packed"]).view(np.uint32), "scales": storage["scales"]}
    if MLX_FORMATS[tensor.format.name][0] == "affine":
        arrays |= {"scales": storage["scales"].astype(dtype), "biases": storage["biases"].astype(dtype)}
    return arrays


def run_mlx(tensor: QuantizedTensor, x: Array) -> Array:
    """x [M, K] times a tensor of one of MLX_FORMATS; nvfp4 without its global scale."""
    (m, k), n = x.shape, tensor.shape[0]
    family, bits = MLX_FORMATS[tensor.format.name]
    kernel = mlx_kernel(family, bits, m, n, k, tensor.group_size)
    arrays = mlx_arrays(tensor, x.dtype)
    sizes = {"K": k, "N": n, "M": m, **kernel.sizes}
    built = emulator.metal_kernel(
        name=kernel.name,
        input_names=[*arrays, "x", *sizes],
        output_names=["y"],
        source=kernel.source,
        header=_included(HEADERS[family]),
    )
    sliced = kernel.slices > 1
    (y,) = built(
        inputs=[*arrays.values(), x, *sizes.values()],
        template=[("T", x.dtype), ("GROUP", tensor.group_size)],
        grid=kernel.grid,
        threadgroup=kernel.threadgroup,
        output_shapes=[(kernel.slices, kernel.sizes["STRIDE"]) if sliced else (m, n)],
        output_dtypes=[np.float32 if sliced else x.dtype],
    )
    return _add_up(y, x.dtype)[: m * n].reshape(m, n) if sliced else np.asarray(y)


def _add_up(partials: Array, dtype: np.dtype[Any]) -> Array:
    """y [count] of partial sums [slices, count], straight in its type: the headers do not say whether MLX needs one
    kernel more for that."""
    slices, count = partials.shape
    arguments = "partials, y, SLICES[0], STRIDE[0], ONE, STRIDE, 0, ONE, STRIDE, 1, SINGLE[0]"
    place = (
        "threadgroup_position_in_grid, threadgroups_per_grid, thread_position_in_threadgroup, threads_per_threadgroup"
    )
    sizes = {
        "SLICES": np.array([slices], np.uint64),
        "STRIDE": np.array([count], np.int64),
        "ONE": np.array([1], np.int32),
        "SINGLE": np.array([1], np.uint64),
    }
    built = emulator.metal_kernel(
        name=REDUCTION,
        input_names=["partials", *sizes],
        output_names=["y"],
        source=f"{REDUCTION}<float, T, Sum<T>, uint, 1>({arguments}, {place});",
        header=REDUCTION_OPERATION + _included(["reduction/reduce_col.h"]),
    )
    rows = min(slices, REDUCTION_ROWS)
    (y,) = built(
        inputs=[partials, *sizes.values()],
        template=[("T", dtype)],
        grid=(count // REDUCTION_NUMBERS * 32, rows, 1),
        threadgroup=(32, rows, 1),
        output_shapes=[(count,)],
        output_dtypes=[dtype],
    )
    return np.asarray(y)


def _included(files: Sequence[str]) -> str:
    return "".join(f'#include "{FOLDER}/{file}"\n' for file in files)
