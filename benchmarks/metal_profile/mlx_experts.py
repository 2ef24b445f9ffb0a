"""MLX's kernels for mixtures of experts (`mx.gather_qmm`) in the emulator, from the headers inside its wheel."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.metal_profile.mlx_kernels import MLX_FORMATS, PLACE, PLANES, header, mlx_arrays
from billfish.backends import emulator
from billfish.backends.metal.kernels import up
from billfish.core.quantized_experts import QuantizedExperts

Array = NDArray[Any]

# From so many choices, and so many for each expert, MLX sorts them and takes tiles of ROWS x COLUMNS.
LEAST_SORTED, LEAST_EACH = 16, 4
ROWS, COLUMNS = 16, 32


def run_mlx_experts(stack: QuantizedExperts, x: Array, ids: Array) -> Array:
    """y [choices, N]: row i of x [choices, K] with expert ids[i] of a stack [E, N, K]; nvfp4 without its global scale.

    The emulator's function constants are zero. So MLX takes K for no multiple of 32, makes one step more, of zeros, and
    reads weights behind the last ones.
    """
    sorted_pays = len(ids) >= LEAST_SORTED and len(ids) // stack.shape[0] >= LEAST_EACH
    return (_tiles if sorted_pays else _rows)(stack, x, ids)


def _rows(stack: QuantizedExperts, x: Array, ids: Array) -> Array:
    """gather_qmv: one row with one expert at a time."""
    experts, n, k = stack.shape
    family, arrays = MLX_FORMATS[stack.format.name], mlx_arrays(stack, x.dtype)
    name = "gather_qmv_fast" if n % 8 == 0 and k % 512 == 0 else "gather_qmv"
    shapes: dict[str, Any] = {"DIMS_X": np.array([len(x), 1, k], np.int32), "STEP_X": np.array([k, k, 1])}
    shapes |= {"DIMS_W": np.array([experts, n, k // 8], np.int32), "COUNT": np.array([len(ids)], np.int32)}
    strides = {"w": "STEP_W", "scales": "STEP_S", "biases": "STEP_B"}
    shapes |= {strides[plane]: np.array([array[0].size, array[0][0].size, 1]) for plane, array in arrays.items()}
    shapes |= {"ONE": np.array([1])}
    batches = f"1, DIMS_X, STEP_X, 1, DIMS_W, {', '.join(strides[plane] for plane in arrays)}, 1, COUNT, ONE, ONE"
    source = (
        f"{family}_{name}<T, GROUP, 4>({PLANES[family]}, x, which_x, which_w, y, K, N, {batches}, "
        f"threadgroup_position_in_grid, {PLACE});"
    )
    inputs = {**arrays, "x": x, "which_x": np.arange(len(ids), dtype=np.uint32), "which_w": ids.astype(np.uint32)}
    grid, threadgroup = (32, 2 * up(n, 8), len(ids)), (32, 2, 1)
    return _run(f"{family}_{name}", source, family, stack, inputs | {"K": k, "N": n} | shapes, grid, threadgroup)


def _tiles(stack: QuantizedExperts, x: Array, ids: Array) -> Array:
    """gather_qmm_rhs: rows sorted by their experts, which MLX does before."""
    experts, n, k = stack.shape
    family, arrays = MLX_FORMATS[stack.format.name], mlx_arrays(stack, x.dtype)
    order = np.argsort(ids, kind="stable")
    starts = np.searchsorted(ids[order], np.arange(experts)).astype(np.int32)
    behind = {name: np.concatenate([array, np.zeros_like(array[:1])]) for name, array in arrays.items()}
    inputs = {"x": x[order], **behind, "starts": np.resize(starts, max(experts, 8))}  # fewer would be constant
    name = f"{family}_gather_qmm_rhs"
    source = (
        f"{name}<T, GROUP, 4, {ROWS}, {COLUMNS}, 32, 1, 2, true>(x, {PLANES[family]}, starts, y, M, N, K, E, "
        f"threadgroup_position_in_grid, {PLACE});"
    )
    sizes = {"M": len(ids), "N": n, "K": k, "E": experts}
    grid = (32 * up(n, COLUMNS), 2 * (up(len(ids), ROWS) + experts), 1)
    y = np.empty((len(ids), n), x.dtype)
    y[order] = _run(name, source, family, stack, inputs | sizes, grid, (32, 2, 1))
    return y


def _run(
    name: str,
    source: str,
    family: str,
    stack: QuantizedExperts,
    inputs: dict[str, Any],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
) -> Array:
    built = emulator.metal_kernel(
        name=name, input_names=list(inputs), output_names=["y"], source=source, header=header(family)
    )
    x = inputs["x"]
    (y,) = built(
        inputs=list(inputs.values()),
        template=[("T", x.dtype), ("GROUP", stack.group_size)],
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[(len(x), stack.shape[1])],
        output_dtypes=[x.dtype],
    )
    return np.asarray(y)
