"""Launches in the emulator, counted: what our kernels and MLX's read, write, wait for and multiply."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from billfish.backends.metal import Kernels, emulator, lay_out
from billfish.backends.metal.bridge import PRODUCTS, WEIGHT_INPUTS
from billfish.backends.metal.choose import MATVEC_ROWS
from billfish.backends.metal.emulator import Launch
from billfish.profile.mlx_kernels import MLX_FORMATS, mlx_arrays, run_mlx
from billfish.tensor import QuantizedTensor

OURS, MLX = "billfish", "mlx"
# Rows of these variables are padded; see tiles.metal.
PADDED = ("x_slabs", "w_slabs", "x_slab")
TILE_K, PADDING_BYTES = 32, 16


@dataclass(frozen=True)
class Count:
    """One launch. Bytes are those that its threads ask for, whether or not a cache has them."""

    who: str
    kernel: str
    format: str
    m: int
    k: int
    n: int
    read: dict[str, int]  # device bytes, by buffer
    least: dict[str, int]  # the size of each
    written: int
    threadgroup_bytes: int  # read and written
    threadgroup_memory: int
    padding: int  # of it
    threadgroup_barriers: int
    simdgroup_barriers: int
    matrix_multiplies: int

    @property
    def total_read(self) -> int:
        return sum(self.read.values())

    def ratio(self, *buffers: str) -> float:
        """How often these buffers are read, all of them unless named."""
        names = buffers or tuple(self.least)
        least = sum(self.least.get(name, 0) for name in names)
        return sum(self.read.get(name, 0) for name in names) / least if least else 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def count_launch(who: str, launch: Launch, q: QuantizedTensor, m: int, sizes: dict[str, int], itemsize: int) -> Count:
    """`sizes` are the buffers in device memory; what else a kernel reads, such as shapes, is in constant memory."""
    stride = TILE_K + PADDING_BYTES // itemsize
    variables = launch.threadgroup_variables
    padding = sum(variables.get(name, 0) * (stride - TILE_K) // stride for name in PADDED) if who == OURS else 0
    n, k = q.shape
    return Count(
        who,
        launch.name,
        q.format.name,
        m,
        k,
        n,
        {name: launch.read.get(name, 0) for name in sizes},
        sizes,
        sum(launch.written.values()),
        sum(launch.threadgroup_read.values()) + sum(launch.threadgroup_written.values()),
        launch.threadgroup_memory,
        padding,
        launch.threadgroup_barriers,
        launch.simdgroup_barriers,
        launch.matrix_multiplies,
    )


def count_ours(kernels: Kernels, q: QuantizedTensor, x: np.ndarray[Any, Any], kernel: str) -> list[Count]:
    """The launches of one product: two for striped."""
    weights = lay_out(q)
    with emulator.launches() as log:
        kernels.multiply(x, weights, None, kernel)
    sizes = {"x": x.nbytes}
    seen: set[int] = set()
    for name in WEIGHT_INPUTS[:-1]:  # the factor is one number
        if id(weights.arrays[name]) not in seen:  # absent planes are aliases
            seen.add(id(weights.arrays[name]))
            sizes[name] = weights.arrays[name].nbytes
    counts = [count_launch(OURS, log[0], q, len(x), sizes, x.itemsize)]
    for launch in log[1:]:
        counts.append(count_launch(OURS, launch, q, len(x), {"partials": launch.read["partials"]}, x.itemsize))
    return counts


def count_mlx(q: QuantizedTensor, x: np.ndarray[Any, Any]) -> Count:
    """The launch of MLX's kernel for the same product."""
    with emulator.launches() as log:
        run_mlx(q, x)
    sizes = {name: array.nbytes for name, array in mlx_arrays(q, x.dtype).items()} | {"x": x.nbytes}
    return count_launch(MLX, log[0], q, len(x), sizes, x.itemsize)


def kernels_for(m: int, itemsize: int = 2) -> list[str]:
    """All that can run so many rows of a type."""
    return [
        kernel
        for kernel in PRODUCTS
        if (kernel == "gemv") == (m <= MATVEC_ROWS) and (itemsize == 2 or kernel in ("gemv", "fused"))
    ]


def mlx_counts(q: QuantizedTensor) -> bool:
    """Whether MLX is there and has kernels for this format."""
    return q.format.name in MLX_FORMATS and importlib.util.find_spec("mlx") is not None
