"""x in bytes on CUDA, without a GPU: what kernels multiply (bytes.cuh, quantize_rows.cu on the CPU), plans, refusals."""

from __future__ import annotations

import ctypes
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from cuda_on_cpu import at, compiled_file

import billfish as bf
from billfish.activations import quantize_rows
from billfish.backends.cuda.describe import describe
from billfish.backends.cuda.layout import brick_shape, pack, split
from billfish.scales import decode_e4m3

ORDER = [k for c in range(4) for k in (2 * c, 2 * c + 8, 2 * c + 1, 2 * c + 9)]  # of bytes.cuh, in each 16 k


@cache
def emulated() -> ctypes.CDLL:
    library = compiled_file("bytes.cpp", ("device.cuh", "decode.cuh", "bytes.cuh", "quantize_rows.cu"))
    for name in ("int4_fp8", "int4_int8", "e2m1_fp8", "e2m1_folded"):
        getattr(library, f"{name}_reduced").restype = ctypes.c_float
    return library


def in_order(k: int) -> np.ndarray:
    """Where the bytes of a row of x come from, for whole blocks of 16 k."""
    return (np.arange(k) // 16 * 16) + np.tile(ORDER, k // 16)


def decoded(q: bf.QuantizedTensor, name: str) -> np.ndarray:
    """W [N, K] as wgmma gets it, by PTX's picture of the A operand of m64n..k32, less its row scales: float64."""
    about, (n, k) = describe(q), q.shape
    down, along = brick_shape(n, k)
    bricks = split(about.kind, pack(about), n, k).reshape(down * along, -1).copy()
    registers = np.zeros((down, along, 32, 4, 4), np.uint32)  # lane, step of 32 k, register
    getattr(emulated(), name)(at(bricks), at(registers), down * along)
    octets = registers.view(np.uint8).reshape(down, along, 8, 4, 4, 2, 2, 4)  # g, c, step, later, upper, byte
    rows = octets.transpose(0, 6, 2, 1, 4, 5, 3, 7).reshape(down * 16, along * 128)
    numbers = {
        "int4_int8": lambda: rows.view(np.int8).astype(np.float64),
        "int4_fp8": lambda: decode_e4m3(rows).astype(np.float64),
    }.get(name, lambda: rows.view(ml_dtypes.float8_e5m2).astype(np.float64))()
    there = np.empty_like(numbers)
    there[:, in_order(along * 128)] = numbers
    values = there[:n, :k] / getattr(emulated(), f"{name}_reduced")() * about.row_scale[:, None]
    if name == "e2m1_folded":
        return values
    return values * np.repeat(about.scales.astype(np.float64), 128, axis=1)[:, :k]


CASES = {"int4_fp8": "u4b8", "int4_int8": "u4b8", "e2m1_fp8": "fp4", "e2m1_folded": "mxfp4"}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_the_weights_exactly(name):
    rng = np.random.default_rng(0)
    size = 32 if CASES[name] == "mxfp4" else 128
    w = rng.standard_normal((37, 384)) * np.exp2(rng.integers(-9, 1, (37, 384 // size))).repeat(size, axis=1)
    q = bf.quantize(w.astype(np.float32), CASES[name], group_size=size)
    assert np.array_equal(decoded(q, name), bf.dequantize(q).astype(np.float64))


@pytest.mark.parametrize("octaves", [0, 16, 17])
def test_powers_of_two_are_folded_over_16_octaves(octaves):
    planes = {"codes": np.tile(np.arange(16, dtype=np.uint8), (16, 16)), "scale": np.full((16, 8), 120, np.uint8)}
    planes["scale"][5, 3] -= octaves
    format = bf.get_format("mxfp4")
    q = bf.QuantizedTensor.from_storage(format, format.pack(planes), 32)
    assert describe(q).kind.narrow == (octaves <= 16)
    if octaves <= 16:
        assert np.array_equal(decoded(q, "e2m1_folded"), bf.dequantize(q).astype(np.float64))


@pytest.mark.parametrize(("call", "activations"), [("fp8", "fp8"), ("int8", "q8"), ("int8_of_bfloat16", "q8")])
@pytest.mark.parametrize("k", [1, 16, 100, 2048, 2200])
def test_rows_are_rounded_as_the_model_says(call, activations, k):
    rng = np.random.default_rng(1)
    type = ml_dtypes.bfloat16 if "bfloat16" in call else np.float16
    m, stride, x_stride = 7, -(-k // 16) * 16, -(-k // 8) * 8 + 8
    x = np.full((m, x_stride), 7, type)
    x[:, :k] = rng.standard_normal((m, k)) * np.exp(3 * rng.standard_normal((m, 1)))
    x[1, :k], x[2, k // 2], x[3, k - 1] = 0, np.nan, -np.inf
    work = np.full(m * stride + 4 * m, 255, np.uint8)
    getattr(emulated(), f"quantize_{call}")(at(x), at(work), m, k, x_stride, stride)
    expected = quantize_rows(x[:, :k], activations)
    finite = np.isfinite(expected.scale)
    scale = work[m * stride :].view(np.float32)
    assert np.array_equal(scale, expected.scale, equal_nan=True)
    assert finite.tolist() == [True, True, False, False, True, True, True]
    padded = np.zeros((m, stride), np.uint8)
    padded[:, :k] = expected.codes
    assert np.array_equal(work[: m * stride].reshape(m, stride)[finite], padded[:, in_order(stride)][finite])
