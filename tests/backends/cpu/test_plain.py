"""The CPU engine with plain weights, float32, float16 and bfloat16, against NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import diagonal
from common import ALL_HALVES, assert_same_bits, gaussian, multiply

import billfish as bf
from billfish.backends.base import Product
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.backend import CpuBackend
from billfish.core.activations import DIGITS
from billfish.core.arrays import Input

LEVELS = pytest.mark.parametrize("level", _cpu.levels())
TYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
DTYPES = pytest.mark.parametrize("dtype", TYPES, ids=["f32", "f16", "bf16"])
ALL_BFLOATS = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)

M_SIZES = (0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 64, 200)
SHAPES = ((1, 1), (7, 31), (16, 32), (33, 40), (50, 256), (20, 259), (96, 547))  # N, K


def backend_at(level: str) -> CpuBackend:
    backend = CpuBackend()
    backend.level = level
    return backend


def with_threads(count: int, call: Callable[[], Any]) -> Any:
    before = _cpu.threads()
    _cpu.set_threads(count)
    try:
        return call()
    finally:
        _cpu.set_threads(before)


@pytest.mark.parametrize(("level", "dtype", "m"), diagonal(3, _cpu.levels(), TYPES, M_SIZES))
def test_products(level, dtype, m):
    """Every M with every shape, with one thread and with several, with and without a bias."""
    backend = backend_at(level)
    for i, (n, k) in enumerate(SHAPES):
        w, x = gaussian((n, k), n).astype(dtype), gaussian((m, k), m)
        bias = gaussian((n,), 3) if i % 2 else None
        packed = backend.pack_all([w])[0]
        y = with_threads(1, lambda x=x, packed=packed, bias=bias: multiply(backend, x, packed, bias))
        assert (y.dtype, y.shape) == (np.float32, (m, n))
        wide, weights = x.astype(np.float64), w.astype(np.float64)
        expected = wide @ weights.T + (0 if bias is None else bias)
        size = np.abs(wide) @ np.abs(weights).T + np.abs(expected)
        assert (np.abs(y - expected) <= 4 * np.finfo(np.float32).eps * size).all()
        for count in (2, 3, 7):
            again = with_threads(count, lambda x=x, packed=packed, bias=bias: multiply(backend, x, packed, bias))
            assert_same_bits(again, y)


@LEVELS
@DTYPES
def test_a_row_gets_the_same_bits_alone_and_beside_others(level, dtype):
    backend = backend_at(level)
    packed = backend.pack_all([gaussian((37, 600)).astype(dtype)])[0]
    x = gaussian((200, 600), 1)
    together = multiply(backend, x, packed)
    for m in (1, 2, 3, 4, 5, 7, 8, 9, 17):
        assert_same_bits(multiply(backend, x[:m], packed), together[:m])


@LEVELS
@DTYPES
def test_x_is_never_rounded(level, dtype):
    backend = backend_at(level)
    packed = backend.pack_all([gaussian((20, 96)).astype(dtype)])[0]
    for m in (1, 9):
        exact, *others = (multiply(backend, gaussian((m, 96), m), packed, None, a) for a in DIGITS)
        for other in others:
            assert_same_bits(other, exact)


@LEVELS
@pytest.mark.parametrize("numbers", [ALL_HALVES, ALL_BFLOATS], ids=["f16", "bf16"])
@pytest.mark.parametrize("m", [1, 4, 9])
def test_every_number_of_16_bits_is_converted_exactly(level, numbers, m):
    """Subnormal and infinite ones, and NaN, too. A sum begins with +0, so -0 comes back as +0."""
    backend = backend_at(level)
    packed = backend.pack_all([numbers[:, None]])[0]
    with np.errstate(invalid="ignore"):
        expected = numbers.astype(np.float32) + np.float32(0)
    y = multiply(backend, np.ones((m, 1), np.float32), packed)
    for row in y:
        assert_same_bits(row, expected)


@LEVELS
@DTYPES
@pytest.mark.parametrize("m", [1, 3, 9])
def test_what_is_not_finite_follows_ieee(level, dtype, m):
    """Infinity times a number has its sign, times 0 it is NaN, and so is the sum of two infinities."""
    w, x = gaussian((24, 300)).astype(dtype), gaussian((m, 300), 1)
    w[3, 7], w[5, 299], w[6, 8], w[7, [0, 1]] = np.inf, np.nan, -np.inf, [np.inf, -np.inf]
    x[0, 8], x[:, :2] = 0, 1
    x[-1, 200] = np.inf if m > 1 else 1
    backend = backend_at(level)
    with np.errstate(invalid="ignore"):
        y = multiply(backend, x, backend.pack_all([w])[0])
        expected = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@LEVELS
def test_plain_and_quantized_weights_with_one_x(level):
    """Made together, each product has the bits that it has alone."""
    backend = backend_at(level)
    matrices = [
        gaussian((n, 96), n).astype(t) for n, t in ((40, np.float16), (9, np.float32), (33, ml_dtypes.bfloat16))
    ]
    matrices[1:1] = [bf.quantize(gaussian((50, 96), 4), name) for name in ("q4_0", "q8_0")]
    all_packed = backend.pack_all(matrices)
    for m in (1, 5, 12):
        x = Input("test", "x", gaussian((m, 96), m))
        for activations in DIGITS:
            products = [Product(x, packed, packed.shape[0]) for packed in all_packed]
            together = backend.linears(products, activations)
            for product, y in zip(products, together, strict=True):
                assert_same_bits(y, backend.linears([product], activations)[0])


@DTYPES
def test_weights_keep_their_type(dtype):
    """Padded to whole tiles of at most 32 rows, and to 32 k."""
    packed = CpuBackend().pack_all([gaussian((64, 96)).astype(dtype)])[0]
    assert packed.nbytes == 64 * 96 * np.dtype(dtype).itemsize


@DTYPES
def test_weights_may_lie_anywhere(dtype):
    """Columns of a larger array, and a file's bytes that begin at an odd address."""
    backend, x = CpuBackend(), gaussian((3, 48))
    w = gaussian((20, 48)).astype(dtype)
    expected = multiply(backend, x, backend.pack_all([w])[0])
    wide = np.zeros((20, 96), dtype)
    wide[:, ::2] = w
    odd = np.frombuffer(b"-" + w.tobytes(), np.uint8)[1:].view(dtype).reshape(w.shape)
    for other in (wide[:, ::2], np.asfortranarray(w), odd):
        assert_same_bits(multiply(backend, x, backend.pack_all([other])[0]), expected)
