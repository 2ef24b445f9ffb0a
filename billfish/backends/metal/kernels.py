"""From arrays to kernels: which kernel multiplies, the sources as MLX wants them, and the calls.

A `metal_kernel` is `mx.fast.metal_kernel`, the emulator's or the one for torch (mps.py), which take the same arguments;
arrays are MLX's, NumPy's or torch's.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np

from billfish.backends.metal.layout import LEAST_SIZE, Axes, MetalWeights
from billfish.core.mixture import GATES

# Threadgroups that keep a GPU at work. Apple's GPUs have 8 to 80 cores, and a core hides the latency of memory by going
# from one threadgroup to another: 256 are 32 for each of 8 cores, or 3.2 for each of 80. Estimated, not yet measured.
BUSY = 256

# Tiles have two panels of 16 columns, one for each simdgroup of their threadgroups.
PANEL, TILE_M, TILE_N, RUN, THREADS = 16, 64, 32, 32, 64
# Those of the matrix units are 64 x 64, four panels and simdgroups.
UNIT_N, UNIT_THREADS = 64, 128
MATVEC_ROWS = 8
# Simdgroups of a matvec's threadgroup, which share K: one for so many k; more where there are few columns, until there
# are MATVEC_BUSY simdgroups, 13 for each of 40 cores, or each lane has one run.
MOST_PARTS, PART_K, MATVEC_BUSY, LANES_K = 8, 2048, 512, 256
# Rows of each expert, on average, from which on tiles are better: matvec reads the weights of an expert for each row.
TILED_ROWS = 4


@dataclass(frozen=True)
class Dispatch:
    """A kernel by name and its grid in threads: nothing that is compiled depends on M, N or K."""

    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def choose_kernel(m: int, n: int, k: int, itemsize: int, matrix_units: bool = False) -> str:
    """The kernel for x [m, k] of a type of so many bytes and W [n, k].

    gemv     up to 8 rows: the weights are the traffic, and it reads them once
    fused    float32: two buffers of float32 slabs would leave room for one threadgroup less, and it needs one
    tensor   GPUs with matrix units (matrix_units.py); it has slices of its own
    striped  few tiles: several threadgroups share each, and a second kernel adds up
    gemm     everything else
    """
    if m <= MATVEC_ROWS:
        return "gemv"
    if itemsize == 4:
        return "fused"
    if matrix_units:
        return "tensor"
    return "striped" if slices(m, n, k) > 1 else "gemm"


def choose_experts(choices: int, experts: int, itemsize: int) -> str:
    """The kernel for so many choices of a row of x and an expert.

    gemv_experts   few rows for each expert
    fused_experts  float32, as above
    gemm_experts   everything else
    """
    if choices < TILED_ROWS * experts:
        return "gemv_experts"
    return "fused_experts" if itemsize == 4 else "gemm_experts"


def slices(m: int, n: int, k: int, tile_n: int = TILE_N) -> int:
    """In how many slices of K there are enough tiles: at least four runs each, as partial sums are traffic too."""
    return max(1, min(up(BUSY, up(m, TILE_M) * up(n, tile_n)), k // (4 * RUN), 8))


def launch(kernel: str, m: int, n: int, k: int) -> Dispatch:
    """How to launch it. Matvec has two kernels, for one row and for more."""
    if kernel == "gemv":
        return _matvec("gemv" if m == 1 else "gemv_rows", n, k, 1)
    if kernel == "tensor":
        grid = up(n, UNIT_N) * UNIT_THREADS, up(m, TILE_M), slices(m, n, k, UNIT_N)
        return Dispatch(kernel, grid, (UNIT_THREADS, 1, 1))
    return _tiles(kernel, n, up(m, TILE_M), slices(m, n, k) if kernel == "striped" else 1)


def launch_experts(kernel: str, choices: int, experts: int, n: int, k: int) -> Dispatch:
    """How to launch it: matvec for each choice by itself, or tiles of about as many choices as an expert has."""
    if kernel == "gemv_experts":
        return _matvec(kernel, n, k, choices)
    rows = next((rows for rows in (16, 32) if up(choices, experts) <= rows), TILE_M)
    return _tiles(kernel, n, up(choices, rows), 1)


def _tiles(kernel: str, n: int, down: int, deep: int) -> Dispatch:
    return Dispatch(kernel, (up(n, TILE_N) * THREADS, down, deep), (THREADS, 1, 1))


def _matvec(kernel: str, n: int, k: int, times: int) -> Dispatch:
    panels = up(n, PANEL)
    parts = min(max(k // PART_K, up(MATVEC_BUSY, panels)), up(k, LANES_K), MOST_PARTS)
    return Dispatch(kernel, (panels * 32 * parts, times, 1), (32 * parts, 1, 1))


# ---- arrays of NumPy, MLX and torch, where they differ ---------------------------------------------------------------


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def library(array: Any) -> Any:
    """NumPy, mlx.core or torch, whose array it is. Names that are not in this module are the same in all."""
    return np if isinstance(array, np.ndarray) else sys.modules["torch" if is_torch(array) else "mlx.core"]


def count(array: Any) -> int:
    """How many numbers an array has."""
    return math.prod(array.shape)


def cast(array: Any, dtype: Any) -> Any:
    return array.to(dtype) if is_torch(array) else array.astype(dtype)


def zeros(shape: tuple[int, ...], dtype: Any, beside: Any) -> Any:
    """Of the library, and in the place, of another array."""
    return beside.new_zeros(shape, dtype=dtype) if is_torch(beside) else library(beside).zeros(shape, dtype)


def constants_array(numbers: Sequence[int], beside: Any) -> Any:
    """A few int32. Kernels get so small an array as constants: torch's stays in CPU memory."""
    xp = library(beside)
    return xp.tensor(numbers, dtype=xp.int32) if is_torch(beside) else xp.array(numbers, xp.int32)


def more_rows(x: Any) -> Any:
    """With rows of zeros behind, until there are 8 numbers; see layout.LEAST_SIZE."""
    if count(x) >= LEAST_SIZE:
        return x
    width = x.shape[-1]
    return library(x).concatenate([x, zeros((up(LEAST_SIZE - count(x), width), width), x.dtype, x)])


def more_numbers(v: Any) -> Any:
    """As `more_rows`, of a vector."""
    return more_rows(v.reshape(1, -1)).reshape(-1)


def sort_keys(ids: Any) -> Any:
    """Integers to sort by: 32 bits wide, and without a sign where the library can sort such."""
    xp = library(ids)
    if not is_torch(ids):
        return ids.astype(xp.uint32)
    return ids.view(xp.int32) if ids.dtype is xp.uint32 else ids.to(xp.int32)


def as_words(integers: Any) -> Any:
    """At least 8 integers as uint32, with which torch cannot compute."""
    padded = more_numbers(sort_keys(integers))
    return padded.view(library(padded).uint32) if is_torch(padded) else padded


# ---- sources and calls -----------------------------------------------------------------------------------------------


FOLDER = Path(__file__).parent
WEIGHT_INPUTS = ["codes", "high", "scales", "offsets", "factor", "size"]
SAFE = {"math_mode": "safe"}  # fast mode may reorder what decode.metal does on purpose


class KernelSource(NamedTuple):
    """The name it gets for a format, its body, what that calls besides decode and scales, and how many buffers of x."""

    pattern: str
    body: str
    headers: tuple[str, ...] = ()
    buffers: int = 0


ROUNDING, MATVEC, TILES, EXPERTS = "rounding.metal", "matvec.metal", "tiles.metal", "experts.metal"
UNITS = "matrix_units.metal"
KERNELS = {
    "gemv": KernelSource("marlin_gemv_{}", "gemv.metal", (ROUNDING, MATVEC)),
    "gemv_rows": KernelSource("marlin_gemv_rows_{}", "gemv_rows.metal", (ROUNDING, MATVEC)),
    "gemm": KernelSource("marlin_gemm_{}", "gemm.metal", (TILES,), 2),
    "fused": KernelSource("marlin_gemm_fused_{}", "gemm.metal", (TILES,), 1),
    "striped": KernelSource("marlin_gemm_{}_striped", "gemm_striped.metal", (TILES,), 2),
    "tensor": KernelSource("marlin_gemm_{}_tensor", "gemm_tensor.metal", (ROUNDING, TILES, UNITS)),
    "gemv_experts": KernelSource("marlin_gemv_experts_{}", "gemv_experts.metal", (ROUNDING, MATVEC, EXPERTS)),
    "gemm_experts": KernelSource("marlin_gemm_experts_{}", "gemm_experts.metal", (TILES, EXPERTS), 2),
    "fused_experts": KernelSource("marlin_gemm_fused_experts_{}", "gemm_experts.metal", (TILES, EXPERTS), 1),
    "dequantize": KernelSource("dequant_{}", "dequantize.metal"),
    "embed": KernelSource("marlin_embed_{}", "embed.metal"),
}
PRODUCTS = ("gemv", "gemm", "fused", "striped", "tensor")  # gemv takes gemv_rows for more than one row
EXPERT_PRODUCTS = ("gemv_experts", "gemm_experts", "fused_experts")
# What kernels are given: the weights, and what is beside them.
INPUTS = {
    **{kernel: ["x", *WEIGHT_INPUTS, "bias"] for kernel in (*PRODUCTS, "gemv_rows")},
    "gemv_experts": ["x", *WEIGHT_INPUTS, "bias", "ids"],
    "gemm_experts": ["x", *WEIGHT_INPUTS, "bias", "ids", "order", "choices"],
    "fused_experts": ["x", *WEIGHT_INPUTS, "bias", "ids", "order", "choices"],
    "dequantize": WEIGHT_INPUTS,
    "embed": [*WEIGHT_INPUTS, "tokens", "count"],
}


@cache
def source(file: str) -> str:
    """The text of a .metal file."""
    return (FOLDER / file).read_text()


def constants(flushed: bool = False, buffers: int = 0) -> str:
    """What the .metal files are told."""
    return f"""namespace billfish {{
constexpr constant bool FLUSHED = {str(flushed).lower()};
constexpr constant int BUFFERS = {buffers}, MOST_PARTS = {MOST_PARTS};
}}  // namespace billfish
"""


def kernel_arguments(kernel: str, name: str, axes: Axes, flushed: bool = False) -> dict[str, Any]:
    """What `metal_kernel` is given to build one kernel for one format. `flushed`: it meets no subnormal numbers."""
    made = KERNELS[kernel]
    axes_text = Template(source("format.metal")).substitute(ELEMENT=axes.element, SCALE=axes.scale)
    files = ["decode.metal", "scales.metal", *made.headers]
    return {
        "name": made.pattern.format(name),
        "input_names": INPUTS[kernel],
        "output_names": ["y"],
        "source": source(made.body),
        "header": constants(flushed, made.buffers) + "".join(map(source, files)) + axes_text,
        "compile_options": SAFE,
    }


REDUCE = {
    "name": "marlin_reduce",
    "input_names": ["partials", "bias"],
    "output_names": ["y"],
    "source": source("reduce.metal"),
    "compile_options": SAFE,
}
ZERO = {
    "name": "marlin_zero_reduction",
    "input_names": [],
    "output_names": ["y"],
    "source": source("zero.metal"),
    "compile_options": SAFE,
}


class Kernels:
    """The kernels of one `metal_kernel`, each built once. `flushed` is for GPUs that flush subnormal halves to zero.

    without_units: why the matrix units of an M5 are not used; "" if they are. See matrix_units.py.
    """

    def __init__(self, metal_kernel: Callable[..., Any], flushed: bool = False) -> None:
        self._metal_kernel, self._flushed = metal_kernel, flushed
        self.without_units = "not looked for"
        self._built: dict[tuple[Any, ...], Any] = {}

    def get(self, key: tuple[Any, ...], arguments: Callable[[], dict[str, Any]]) -> Any:
        """The kernel of that key, built when it is first wanted."""
        if key not in self._built:
            self._built[key] = self._metal_kernel(**arguments())
        return self._built[key]

    def product(self, kernel: str, w: MetalWeights) -> Any:
        return self.get((kernel, w.name, w.axes), lambda: kernel_arguments(kernel, w.name, w.axes, self._flushed))

    def multiply(
        self, x: Any, w: MetalWeights, bias: Any = None, kernel: str | None = None, *, gate: str | None = None
    ) -> Any:
        """x [M, K] @ W.T + bias [N] -> [M, N] of x's type. `kernel` is one of PRODUCTS; the best unless given.

        gate: one of core.mixture.GATES, for M up to MATVEC_ROWS. Rows of W are eight of a gate, eight of up, and so on,
        and y [M, N / 2] is gate(gate) * up.
        """
        (m, k), n = x.shape, w.shape[0]
        if count(x) < LEAST_SIZE:
            return self.multiply(more_rows(x), w, bias, kernel, gate=gate)[:m]
        chosen = launch(kernel or choose_kernel(m, n, k, x.itemsize, not self.without_units), m, n, k)
        added = x if bias is None else more_numbers(bias)
        striped = chosen.kernel == "striped" or chosen.grid[2] > 1
        template = {"T": x.dtype, "GROUP": w.group}
        if chosen.kernel != "striped":
            template["HAS_BIAS"] = bias is not None and not striped
        if chosen.kernel.startswith("gemv"):
            template["GATE"] = 0 if gate is None else GATES.index(gate) + 1
        (y,) = self.product(chosen.kernel, w)(
            inputs=[x, *(w.arrays[name] for name in WEIGHT_INPUTS), added],
            template=list(template.items()),
            grid=chosen.grid,
            threadgroup=chosen.threadgroup,
            output_shapes=[(chosen.grid[2], m, n) if striped else (m, n if gate is None else n // 2)],
            output_dtypes=[library(x).float32 if striped else x.dtype],
        )
        return self._reduce(y, added, bias is not None, x.dtype) if striped else y

    def multiply_experts(
        self,
        x: Any,
        w: MetalWeights,
        ids: Any,
        bias: Any = None,
        *,
        dtype: Any = None,
        kernel: str | None = None,
    ) -> Any:
        """y [choices, N]: choice i is row i * len(x) // choices of x [rows, K] with expert ids[i] of W [E, N, K].

        bias: [E, N]. dtype: of y; x's unless given. kernel: one of EXPERT_PRODUCTS; the best unless given.
        A choice whose expert is not in the stack gets NaN. Nothing waits for the GPU: choices are sorted there.
        """
        xp, choices, (experts, n, k) = library(x), ids.shape[0], w.shape
        chosen = launch_experts(kernel or choose_experts(choices, experts, x.itemsize), choices, experts, n, k)
        template = {"T": x.dtype, "GROUP": w.group, "SHARE": choices // x.shape[0], "HAS_BIAS": bias is not None}
        x = more_rows(x)
        if ids.itemsize == 8:  # 2**32 + 1 is no expert, and is 1 in 32 bits
            ids = xp.clip(ids, -1, experts)
        keys, routing = sort_keys(ids), []
        if chosen.kernel != "gemv_experts":
            order = xp.argsort(keys)
            keys = keys[order]
            routing = [as_words(order), constants_array([choices], beside=ids)]
        (y,) = self.product(chosen.kernel, w)(
            inputs=[
                x,
                *(w.arrays[name] for name in WEIGHT_INPUTS),
                x if bias is None else more_rows(bias),
                as_words(keys),
                *routing,
            ],
            template=list(template.items()),
            grid=chosen.grid,
            threadgroup=chosen.threadgroup,
            output_shapes=[(choices, n)],
            output_dtypes=[dtype or x.dtype],
        )
        return y

    def _reduce(self, partials: Any, bias: Any, has_bias: bool, dtype: Any) -> Any:
        _, m, n = partials.shape
        template = {"T": dtype, "HAS_BIAS": has_bias}
        (y,) = self.get(("reduce",), lambda: REDUCE)(
            inputs=[partials, bias],
            template=list(template.items()),
            grid=(up(m * n, 256) * 256, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(m, n)],
            output_dtypes=[dtype],
        )
        return y

    def zero_reduction(self, count: int, xp: Any = np) -> Any:
        """Zeros, float32 [count], of NumPy or mlx.core."""
        (y,) = self.get(("zero",), lambda: ZERO)(
            inputs=[],
            grid=(count, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(count,)],
            output_dtypes=[xp.float32],
        )
        return y

    def dequantize(self, w: MetalWeights, dtype: Any) -> Any:
        """W [N, K], or a stack [E, N, K], in that type."""
        xp = library(w.arrays["codes"])
        if len(w.shape) == 3:
            return xp.stack([self.dequantize(w.expert(e), dtype) for e in range(w.shape[0])])
        n, k = w.shape
        (y,) = self.product("dequantize", w)(
            inputs=[w.arrays[name] for name in WEIGHT_INPUTS],
            template=[("T", dtype), ("GROUP", w.group)],
            grid=(up(k, 32 * 8) * 8, up(n, 16) * 16, 1),
            threadgroup=(8, 16, 1),
            output_shapes=[(n, k)],
            output_dtypes=[dtype],
        )
        return y

    def embed(self, w: MetalWeights, tokens: Any, dtype: Any) -> Any:
        """The rows [tokens, K] of a table W [N, K] in that type. tokens: integers [rows]."""
        rows, k = tokens.shape[0], w.shape[1]
        (y,) = self.product("embed", w)(
            inputs=[
                *(w.arrays[name] for name in WEIGHT_INPUTS),
                as_words(tokens),
                constants_array([rows], beside=tokens),
            ],
            template=[("T", dtype), ("GROUP", w.group)],
            grid=(up(k, 32 * 8) * 8, up(rows, 16) * 16, 1),
            threadgroup=(8, 16, 1),
            output_shapes=[(rows, k)],
            output_dtypes=[dtype],
        )
        return y
