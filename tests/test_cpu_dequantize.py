"""The CPU engine's dequantize against the oracle where rows are long, ragged, or have scales of another type."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support import assert_same_bits, random_storage
from test_cpu import FORMATS, LEVELS, backend_at

import billfish as bf
from billfish.backends.cpu import _cpu

DTYPES = ("float32", "float16", "bfloat16")


def check(level: str, q: bf.QuantizedTensor) -> None:
    for dtype in DTYPES:
        expected = bf.dequantize(q, dtype, backend="reference")
        out = np.empty_like(expected)
        backend_at(level).dequantize(q, out)
        assert_same_bits(out, expected)


def random_tensor(format: str, n: int, k: int, group_size: int | None = None, **scales: type) -> bf.QuantizedTensor:
    """Every byte random; `scales` names arrays that get another type."""
    found = bf.get_format(format)
    storage = random_storage(found, n, k, np.random.default_rng(k), group_size)
    for name, dtype in scales.items():
        size = storage[name].size * np.dtype(dtype).itemsize
        raw = np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8)
        storage[name] = raw.view(dtype).reshape(storage[name].shape)
    return bf.QuantizedTensor.from_storage(found, storage, group_size)


@LEVELS
@FORMATS
def test_rows_longer_than_what_is_decoded_at_a_time(level, format):
    """17408 codes are more than a run of 16384; three rows are one run after the other, of several threads' pieces."""
    check(level, random_tensor(format.name, 3, 17408))


@LEVELS
@pytest.mark.parametrize(
    ("name", "k"), [("nvfp4", 16), ("nvfp4", 1040), ("nvfp4", 17424), ("u4b8", 1032), ("u8", 1028)]
)
def test_rows_that_end_within_a_block_of_32(level, name, k):
    check(level, random_tensor(name, 5, k))


@LEVELS
@pytest.mark.parametrize(("name", "k", "group_size"), [("affine4", 96, 64), ("affine8", 1184, 128)])
def test_a_last_group_that_is_partial(level, name, k, group_size):
    check(level, random_tensor(name, 70, k, group_size))


@LEVELS
@pytest.mark.parametrize("name", ["fp4", "u4", "u4b8", "u8", "u8b128"])
@pytest.mark.parametrize(("n", "k", "group_size"), [(1, 8, 32), (67, 1064, 64), (130, 2056, -1), (3, 40, -1)])
def test_words(level, name, n, k, group_size):
    """More columns than are turned at a time, and rows of one group."""
    q = bf.quantize(np.random.default_rng(n).standard_normal((n, k), np.float32), name, group_size=group_size)
    check(level, q)
    check(
        level,
        bf.QuantizedTensor.from_storage(
            name, {**q.storage, "scales": q.storage["scales"].astype(np.float32)}, group_size
        ),
    )


@LEVELS
@pytest.mark.parametrize("name", ["affine4", "affine8"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=["f16", "bf16", "f32"])
def test_every_type_of_scale(level, name, dtype):
    """Products with float32 and bfloat16 scales may overflow or be rounded before the minimum is added."""
    check(level, random_tensor(name, 90, 256, 64, scales=dtype, biases=dtype))


@LEVELS
@pytest.mark.parametrize("name", ["u4", "u8"])
def test_fractional_zero_points(level, name):
    check(level, random_tensor(name, 90, 256, 64, zeros=np.float16))


@LEVELS
def test_products_that_overflow_only_before_the_minimum_is_added(level):
    """2 * 2^127 is infinite, though 2 * 2^127 - 2^127 is not."""
    scales, biases = (np.full((1, 1), x, ml_dtypes.bfloat16) for x in (2.0**127, -(2.0**127)))
    q = bf.QuantizedTensor.from_storage(
        "affine4", {"packed": np.full((1, 16), 0x21, np.uint8), "scales": scales, "biases": biases}, 32
    )
    check(level, q)
    assert np.isinf(bf.dequantize(q, backend="reference")[0, 1])


@LEVELS
@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_gguf"])
def test_every_scale_with_every_code(level, name):
    """All of what the tables of products hold."""
    codes = np.tile(np.arange(32, dtype=np.uint8) % 16, (256, 1))
    q = bf.QuantizedTensor.from_planes(name, {"codes": codes, "scale": np.arange(256, dtype=np.uint8)[:, None]})
    check(level, q)


@LEVELS
@FORMATS
def test_same_bits_for_any_number_of_threads(level, format):
    q = random_tensor(format.name, 33, 512)
    before = _cpu.threads()
    try:
        for count in (1, 2, 5):
            _cpu.set_threads(count)
            check(level, q)
    finally:
        _cpu.set_threads(before)
