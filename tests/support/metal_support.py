"""What the tests of the Metal engine share: the kernels in the emulator, and what "right" means for a product."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from common import gaussian

import billfish as bf
from billfish.backends import emulator
from billfish.backends.metal import Kernels, lay_out

KERNELS = Kernels(emulator.metal_kernel)
# Hostile launches flush subnormal numbers: they are for the build that has none.
FLUSHED = Kernels(emulator.metal_kernel, flushed=True)

FLOAT16, FLOAT32, BFLOAT16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
# Formats with their options: u4 has two kinds of zero points.
FORMATS: dict[str, dict[str, str]] = {
    "fp4": {},
    "mxfp4": {},
    "nvfp4": {},
    "u4": {},
    "u4 fractional": {"zero_point": "fractional"},
    "u4b8": {},
    "u8b128": {},
    "q4_0": {},
    "q4_1": {},
    "q5_0": {},
    "q5_1": {},
    "q8_0": {},
}
# These are combinations of the same axes; a few kernels show it.
MORE_FORMATS: dict[str, dict[str, str]] = {
    "u8": {},
    "affine4": {},
    "affine8": {},
    "iq4_nl": {},
    "q8_1": {},
    "mxfp4_gguf": {},
    "nvfp4_gguf": {},
    "q4_k": {},
    "q5_k": {},
    "q6_k": {},
    "q2_k": {},
    "q3_k": {},
    "iq4_xs": {},
    "fp8": {},
    "mxfp8": {},
}
ALL_M = (1, 2, 3, 8, 9, 16, 31, 33, 64, 65, 130)
ALL_N = (8, 64, 70, 96, 200)
# Two buffers of float32 tiles leave room for fewer threadgroups: kernels.py takes one.
PRODUCTS = [
    (kernel, dtype)
    for kernel in ("gemv", "gemm", "fused", "striped", "tensor")
    for dtype in (FLOAT16, BFLOAT16, FLOAT32)
    if dtype != FLOAT32 or kernel in ("gemv", "fused")
]
MORE_PRODUCTS = [("gemv", FLOAT16), ("gemm", BFLOAT16), ("fused", FLOAT32), ("striped", FLOAT16), ("tensor", BFLOAT16)]


@lru_cache(maxsize=256)
def quantized(name: str, n: int, k: int, group_size: int | None = None, seed: int = 0) -> bf.QuantizedTensor:
    return bf.quantize(gaussian((n, k), seed), name.split()[0], group_size=group_size, **(FORMATS | MORE_FORMATS)[name])


def sizes_of_k(name: str) -> list[tuple[int, int | None]]:
    """(K, group size): whole tiles and partial ones, whole groups and partial ones, and one group for all of K."""
    format = bf.FORMATS[name.split()[0]]
    block = format.block_size
    if not format.whole_row_groups:  # whole blocks only
        return sorted({(block * -(-size // block), None) for size in (32, 96, 304)})
    sizes = [(40, 32), (72, 64), (128 + block, 128), (304, -1)]
    sizes = [(k, group) for k, group in sizes if group in (*format.group_sizes, -1)]
    return [*sizes, (80, 16)] if 16 in format.group_sizes else sizes


@lru_cache(maxsize=256)
def dequantized(q: bf.QuantizedTensor, dtype: np.dtype = FLOAT32) -> np.ndarray:
    return bf.dequantize(q, dtype, backend="reference")


def exact_product(x: np.ndarray, q: bf.QuantizedTensor, bias: np.ndarray | None) -> np.ndarray:
    y = x.astype(np.float64) @ dequantized(q).astype(np.float64).T
    return y if bias is None else y + bias.astype(np.float64)


def dense_product(x: np.ndarray, q: bf.QuantizedTensor, bias: np.ndarray | None) -> np.ndarray:
    """What a library without our formats does: weights in x's type, float32 sums, one rounding."""
    w = dequantized(q, x.dtype).astype(np.float32)
    y = x.astype(np.float32) @ w.T
    return (y if bias is None else y + bias.astype(np.float32)).astype(x.dtype)


def assert_within_contract(y: np.ndarray, x: np.ndarray, q: bf.QuantizedTensor, bias: np.ndarray | None) -> None:
    """The error against float64 is at most twice a dense product's, over all of y and in its worst element.

    The worst element of a dense product may be lucky, so there it also counts what one rounding of y and 16 of float32
    sums could do; and all of them may be, if they are few.
    """
    expected = exact_product(x, q, bias)
    error = np.abs(y.astype(np.float64) - expected)
    dense = np.abs(dense_product(x, q, bias).astype(np.float64) - expected)
    size = np.abs(x.astype(np.float64)) @ np.abs(dequantized(q).astype(np.float64)).T
    float32 = float(np.finfo(np.float32).eps)
    roundings = float(ml_dtypes.finfo(y.dtype).eps) / 2 * np.abs(expected).max() + 16 * float32 * size.max()
    luck = 1 + 2 / np.sqrt(error.size)
    assert np.sqrt((error**2).mean()) <= luck * (2 * np.sqrt((dense**2).mean()) + float32 * size.mean())
    assert error.max() <= 2 * max(dense.max(), roundings)


def multiply(
    kernel: str, x: np.ndarray, q: bf.QuantizedTensor, bias: np.ndarray | None = None, **options: Any
) -> np.ndarray:
    """One product in the emulator."""
    with emulator.options(**options):
        return kernels_for(**options).multiply(x, q.made("test", lambda: lay_out(q)), bias, kernel)


def kernels_for(*, hostile: bool = False, **_: Any) -> Kernels:
    """The build for a launch with these options."""
    return FLUSHED if hostile else KERNELS
