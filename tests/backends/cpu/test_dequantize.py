"""The CPU engine's dequantize against the oracle where rows are long, ragged, or have scales of another type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
import torch
from common import assert_same_bits, decode_into, random_storage
from cpu_levels import FORMATS, LEVELS, backend_at

import billfish as bf
from billfish.backends.cpu import _cpu

DTYPES = ("float32", "float16", "bfloat16")


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = _cpu.threads()
    _cpu.set_threads(count)
    try:
        yield
    finally:
        _cpu.set_threads(before)


def check(level: str, q: bf.QuantizedTensor) -> None:
    for dtype in DTYPES:
        expected = bf.dequantize(q, dtype, backend="reference")
        out = np.empty_like(expected)
        decode_into(backend_at(level), q, out)
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
    """Rows of one thread follow one another, and 2048 groups of them are a run: here at most 262144 codes."""
    with threads(1):
        check(level, random_tensor(format.name, 5, 66048))


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
def test_q8_0_with_every_scale(level):
    """Those that are raised by 2^133 and those that are not, with codes of either sign, zero and the extremes."""
    blocks = np.zeros((256, 256), bf.get_format("q8_0").struct)
    blocks["d"] = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(256, 256)
    blocks["qs"] = np.resize(np.int8([-128, -127, -1, 0, 1, 127]), 32)
    check(level, bf.QuantizedTensor.from_storage("q8_0", {"blocks": blocks.view(np.uint8).reshape(256, -1)}))


@LEVELS
@pytest.mark.parametrize(("name", "limit"), [("q2_k", 2**-3), ("q4_k", 2**-7), ("q5_k", 2**-11)])
@pytest.mark.parametrize("within", [True, False])
def test_small_scales_of_kquants(level, name, limit, within):
    """Random blocks whose scales are below those that are not raised, or one is not."""
    least = int(np.float16(limit).view(np.uint16))
    struct, rng = bf.get_format(name).struct, np.random.default_rng(3)
    blocks = rng.integers(0, 256, (3, 300 * struct.itemsize), dtype=np.uint8).view(struct)
    d = rng.integers(0, least, blocks.shape, dtype=np.uint16) | rng.integers(0, 2, blocks.shape, dtype=np.uint16) << 15
    d[1, 40] = least - within
    blocks["d"] = d.view(np.float16)
    check(level, bf.QuantizedTensor.from_storage(name, {"blocks": blocks.view(np.uint8)}))


@LEVELS
@pytest.mark.parametrize("name", ["q8_0", "q2_k", "q4_k", "q5_k"])
def test_on_a_thread_that_flushes_subnormals_to_zero(level, name):
    q = bf.quantize(np.random.default_rng(4).standard_normal((8, 512), np.float32) / 32, name)
    expected = bf.dequantize(q, backend="reference")
    out = np.empty_like(expected)
    with threads(1):
        torch.set_flush_denormal(True)
        try:
            decode_into(backend_at(level), q, out)
            assert not np.float32(1e-40) * np.ones(1, np.float32)  # it still does
        finally:
            torch.set_flush_denormal(False)
    assert_same_bits(out, expected)


@LEVELS
@FORMATS
def test_same_bits_for_any_number_of_threads(level, format):
    q = random_tensor(format.name, 33, 512)
    for count in (1, 2, 5):
        with threads(count):
            check(level, q)
