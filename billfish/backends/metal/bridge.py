"""From arrays to kernels: the sources as MLX wants them, and the calls.

A `metal_kernel` is `mx.fast.metal_kernel`, the emulator's or the one for torch (mps.py), which take the same arguments;
arrays are MLX's, NumPy's or torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np

from billfish.backends.metal import libraries
from billfish.backends.metal.choose import MOST_PARTS, choose, choose_experts, launch, launch_experts, up
from billfish.backends.metal.layout import LEAST_SIZE, Axes, MetalWeights
from billfish.backends.metal.libraries import library, more_numbers, more_rows

FOLDER = Path(__file__).parent
WEIGHT_INPUTS = ["codes", "high", "scales", "offsets", "factor", "size"]
SAFE = {"math_mode": "safe"}  # fast mode may reorder what decode.metal does on purpose


class Kernel(NamedTuple):
    """The name it gets for a format, its body, what that calls besides decode and scales, and how many buffers of x."""

    pattern: str
    body: str
    headers: tuple[str, ...] = ()
    buffers: int = 0


MATVEC, TILES, EXPERTS = "matvec.metal", "tiles.metal", "experts.metal"
KERNELS = {
    "gemv": Kernel("marlin_gemv_{}", "gemv.metal", (MATVEC,)),
    "gemv_rows": Kernel("marlin_gemv_rows_{}", "gemv_rows.metal", (MATVEC,)),
    "gemm": Kernel("marlin_gemm_{}", "gemm.metal", (TILES,), 2),
    "fused": Kernel("marlin_gemm_fused_{}", "gemm.metal", (TILES,), 1),
    "striped": Kernel("marlin_gemm_{}_striped", "gemm_striped.metal", (TILES,), 2),
    "gemv_experts": Kernel("marlin_gemv_experts_{}", "gemv_experts.metal", (MATVEC, EXPERTS)),
    "gemm_experts": Kernel("marlin_gemm_experts_{}", "gemm_experts.metal", (TILES, EXPERTS), 2),
    "fused_experts": Kernel("marlin_gemm_fused_experts_{}", "gemm_experts.metal", (TILES, EXPERTS), 1),
    "dequantize": Kernel("dequant_{}", "dequantize.metal"),
}
PRODUCTS = ("gemv", "gemm", "fused", "striped")  # gemv takes gemv_rows for more than one row
EXPERT_PRODUCTS = ("gemv_experts", "gemm_experts", "fused_experts")
# What kernels are given: the weights, and what is beside them.
INPUTS = {
    **{kernel: ["x", *WEIGHT_INPUTS, "bias"] for kernel in (*PRODUCTS, "gemv_rows")},
    "gemv_experts": ["x", *WEIGHT_INPUTS, "bias", "ids"],
    "gemm_experts": ["x", *WEIGHT_INPUTS, "bias", "ids", "order", "choices"],
    "fused_experts": ["x", *WEIGHT_INPUTS, "bias", "ids", "order", "choices"],
    "dequantize": WEIGHT_INPUTS,
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
    """The kernels of one `metal_kernel`, each built once. `flushed` is for GPUs that flush subnormal halves to zero."""

    def __init__(self, metal_kernel: Callable[..., Any], flushed: bool = False) -> None:
        self._metal_kernel, self._flushed = metal_kernel, flushed
        self._built: dict[tuple[Any, ...], Any] = {}

    def _get(self, key: tuple[Any, ...], arguments: Callable[[], dict[str, Any]]) -> Any:
        if key not in self._built:
            self._built[key] = self._metal_kernel(**arguments())
        return self._built[key]

    def product(self, kernel: str, w: MetalWeights) -> Any:
        return self._get((kernel, w.name, w.axes), lambda: kernel_arguments(kernel, w.name, w.axes, self._flushed))

    def multiply(self, x: Any, w: MetalWeights, bias: Any = None, kernel: str | None = None) -> Any:
        """x [M, K] @ W.T + bias [N] -> [M, N] of x's type. `kernel` is one of PRODUCTS; the best unless given."""
        (m, k), n = x.shape, w.shape[0]
        if libraries.count(x) < LEAST_SIZE:
            return self.multiply(more_rows(x), w, bias, kernel)[:m]
        chosen = launch(kernel or choose(m, n, k, x.itemsize), m, n, k)
        added = x if bias is None else more_numbers(bias)
        striped = chosen.kernel == "striped"
        template = {"T": x.dtype, "GROUP": w.group}
        if not striped:
            template["HAS_BIAS"] = bias is not None
        (y,) = self.product(chosen.kernel, w)(
            inputs=[x, *(w.arrays[name] for name in WEIGHT_INPUTS), added],
            template=list(template.items()),
            grid=chosen.grid,
            threadgroup=chosen.threadgroup,
            output_shapes=[(chosen.grid[2], m, n) if striped else (m, n)],
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
        keys, routing = libraries.keys(ids), []
        if chosen.kernel != "gemv_experts":
            order = xp.argsort(keys)
            keys = keys[order]
            routing = [libraries.words(order), libraries.constants([choices], beside=ids)]
        (y,) = self.product(chosen.kernel, w)(
            inputs=[
                x,
                *(w.arrays[name] for name in WEIGHT_INPUTS),
                x if bias is None else more_rows(bias),
                libraries.words(keys),
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
        (y,) = self._get(("reduce",), lambda: REDUCE)(
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
        (y,) = self._get(("zero",), lambda: ZERO)(
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
