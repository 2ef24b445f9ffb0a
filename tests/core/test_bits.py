"""Every bit trick equals the table decode: all codes in every lane, all 65,536 scales, signs of zero told apart."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from common import ALL_BYTES, ALL_HALVES, assert_same_bits

from billfish.core import bits
from billfish.core.elements import FP4, S8, U4, U4B8, U8B128

CODES = np.arange(16, dtype=np.uint8)
# All 256 pairs of codes, and noise for the bits that a trick must ignore.
LANE0, LANE1 = (x.ravel() for x in np.meshgrid(CODES, CODES))
NOISE = np.random.default_rng(0).integers(0, 2**32, (64, 256), dtype=np.uint32)


def words_with(lane0: np.ndarray, lane1: np.ndarray, shift: int, width: int = 4) -> np.ndarray:
    """Words [64, ...] with the codes at bit `shift` of each lane, and noise everywhere else."""
    field = np.uint32((2**width - 1) * 0x00010001) << np.uint32(shift)
    placed = (lane0.astype(np.uint32) | lane1.astype(np.uint32) << np.uint32(16)) << np.uint32(shift)
    noise = np.resize(NOISE, (64, placed.size))
    return (noise & ~field) | placed


def expect_lanes(actual: np.ndarray, table: np.ndarray, dtype: type, lane0=LANE0, lane1=LANE1) -> None:
    expected = np.stack([table[lane0], table[lane1]], axis=-1).astype(dtype)
    assert_same_bits(actual, np.broadcast_to(expected, (64, *expected.shape)))


@pytest.mark.parametrize("lut", range(256))
def test_lop3_computes_every_truth_table(lut):
    a, b, c = (np.array([x], np.uint32) for x in (0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA))
    assert bits.lop3(a, b, c, lut)[0] == lut * 0x01010101


def test_lop3_ea_is_and_or():
    a, b, c = np.random.default_rng(1).integers(0, 2**32, (3, 4096), dtype=np.uint32)
    assert (0xF0 & 0xCC) | 0xAA == 0xEA
    np.testing.assert_array_equal(bits.lop3(a, b, c, 0xEA), (a & b) | c)
    # As the magic number uses it.
    mask, magic = np.full_like(a, 0x000F000F), np.full_like(a, 0x64006400)
    np.testing.assert_array_equal(bits.lanes(bits.lop3(a, mask, magic, 0xEA)), bits.dequant_u4_lo(a, skip_flop=True))


@pytest.mark.parametrize(
    ("trick", "element", "shift", "dtype"),
    [
        (bits.dequant_fp4_pair, FP4, 12, np.float16),
        (bits.dequant_u4b8_lo, U4B8, 0, np.float16),
        (bits.dequant_u4b8_hi, U4B8, 4, np.float16),
        (bits.dequant_u4_lo, U4, 0, np.float16),
        (bits.dequant_u4_hi, U4, 4, np.float16),
        (bits.dequant_fp4_pair_bf16, FP4, 12, ml_dtypes.bfloat16),
        (bits.dequant_u4b8_lo_bf16, U4B8, 0, ml_dtypes.bfloat16),
        (bits.dequant_u4b8_hi_bf16, U4B8, 4, ml_dtypes.bfloat16),
        (bits.dequant_u4_lo_bf16, U4, 0, ml_dtypes.bfloat16),
        (bits.dequant_u4_hi_bf16, U4, 4, ml_dtypes.bfloat16),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_pairs_equal_the_table(trick, element, shift, dtype):
    expect_lanes(trick(words_with(LANE0, LANE1, shift)), element.values, dtype)


@pytest.mark.parametrize(
    ("trick", "shift", "raw"),
    [
        (bits.dequant_fp4_pair, 12, FP4.values.astype(np.float64) * 2.0**-14),
        (bits.dequant_u4b8_lo, 0, 1024 + U4.values),
        (bits.dequant_u4b8_hi, 4, 1024 + U4.values),
        (bits.dequant_u4_lo, 0, 1024 + U4.values),
        (bits.dequant_u4_hi, 4, 1024 + U4.values),
        (bits.dequant_fp4_pair_bf16, 12, FP4.values.astype(np.float64) * 2.0**-126),
        (bits.dequant_u4b8_lo_bf16, 0, 128 + U4.values),
        (bits.dequant_u4b8_hi_bf16, 4, 128 + U4.values),
        (bits.dequant_u4_lo_bf16, 0, 128 + U4.values),
        (bits.dequant_u4_hi_bf16, 4, 128 + U4.values),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_skip_flop_leaves_the_raw_value(trick, shift, raw):
    dtype = ml_dtypes.bfloat16 if trick.__name__.endswith("bf16") else np.float16
    expect_lanes(trick(words_with(LANE0, LANE1, shift), skip_flop=True), np.asarray(raw), dtype)


def test_constants_are_what_they_claim():
    for pattern, value in (
        (0x6400, 1024),
        (0x6408, 1032),
        (0x6480, 1152),
        (0x2C00, 1 / 16),
        (0xD480, -72),
        (0xD400, -64),
    ):
        assert float(bits.half(pattern)) == value
    for pattern, value in ((0x4300, 128), (0x4308, 136), (0x7E80, 2.0**126)):
        assert float(bits.bfloat(pattern)) == value


def test_five_is_0x4500():
    """One of the source documents gives 0x4240, which is 3.125."""
    five = bits.dequant_u4b8_lo(np.array([13], np.uint32))[0, 0]
    assert five == 5
    assert five.view(np.uint16) == 0x4500
    assert float(bits.half(0x4240)) == 3.125


def test_fp4_scalar_with_every_scale():
    expected = bits.decode_table(CODES[:, None], FP4.values, ALL_HALVES)
    assert_same_bits(bits.dequant_fp4_scalar(CODES[:, None], ALL_HALVES), expected)


def test_fp4_x8_with_every_scale_and_every_code_in_every_position():
    for turn in range(16):
        codes = (
            np.arange(8) * 2 + np.array([[0], [1]]) + turn
        ) % 16  # two words cover all codes; turned, all positions
        words = (codes.astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))).sum(axis=1, dtype=np.uint32)
        for word, row in zip(words, codes, strict=True):
            actual = bits.dequant_fp4_x8(np.full(65536, word, np.uint32), ALL_HALVES)
            assert_same_bits(actual, bits.decode_table(row.astype(np.uint8), FP4.values, ALL_HALVES[:, None]))


ZEROS = np.array([0, 8, 15, 5.5, 0.125, 7.33, -3, 6e-8, 65504], np.float16)


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("trick", [bits.dequant_u4x8, bits.dequant_s4x8])
def test_u4x8_and_s4x8_with_every_scale(trick, zero):
    offset = np.float32(zero) + np.float32(8 if trick is bits.dequant_s4x8 else 0)
    zeros = np.full(65536, zero, np.float16)
    for word, codes in (
        (0x76543210, CODES[:8]),
        (0xFEDCBA98, CODES[8:]),
        (0x012389EF, CODES[[15, 14, 9, 8, 3, 2, 1, 0]]),
    ):
        table = U4.values - offset
        actual = trick(np.full(65536, word, np.uint32), ALL_HALVES, zeros)
        assert_same_bits(actual, bits.decode_table(codes, table, ALL_HALVES[:, None]))


@pytest.mark.parametrize("trick", [bits.dequant_u4x8, bits.dequant_s4x8])
def test_u4x8_and_s4x8_with_every_code_in_every_position_and_every_zero(trick):
    scale = np.float16(0.37)
    for turn in range(16):
        codes = ((np.arange(8) + turn) % 16).astype(np.uint8)
        word = (codes.astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))).sum(dtype=np.uint32)
        with np.errstate(over="ignore", invalid="ignore"):  # some of all zeros are signalling NaN
            offset = ALL_HALVES.astype(np.float32) + np.float32(8 if trick is bits.dequant_s4x8 else 0)
            expected = ((U4.values[codes] - offset[:, None]) * np.float32(scale)).astype(np.float16)
        actual = trick(np.full(65536, word, np.uint32), np.full(65536, scale), ALL_HALVES)
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("position", range(4))
def test_bytes_in_every_position(position):
    words = np.random.default_rng(2).integers(0, 2**32, (64, 256), dtype=np.uint32)
    shift = np.uint32(8 * position)
    words = (words & ~(np.uint32(0xFF) << shift)) | ALL_BYTES.astype(np.uint32) << shift
    for trick, table, dtype in (
        (bits.dequant_u8b128_x4, U8B128.values, np.float16),
        (bits.dequant_s8_x4, S8.values, np.float16),
        (bits.dequant_u8b128_x4_bf16, U8B128.values, ml_dtypes.bfloat16),
    ):
        actual = trick(words)[..., position]
        assert_same_bits(actual, np.broadcast_to(table.astype(dtype), actual.shape))


@pytest.mark.parametrize("width", range(1, 11))
def test_magic_number_holds_integers_of_up_to_ten_bits(width):
    codes = np.arange(2**width, dtype=np.uint16)
    words = words_with(codes, codes[::-1], 0, width)
    expect_lanes(bits.dequant_integer_pair(words, width, 1), np.arange(2**width) - 1.0, np.float16, codes, codes[::-1])


@pytest.mark.parametrize(
    ("trick", "element", "shift"),
    [
        (bits.dequant_fp4_pair, FP4, 12),
        (bits.dequant_u4b8_lo, U4B8, 0),
        (bits.dequant_u4b8_hi, U4B8, 4),
        (bits.dequant_u4_hi, U4, 4),
        (bits.dequant_u4b8_hi_bf16, U4B8, 4),
        (bits.dequant_fp4_pair_bf16, FP4, 12),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_uint16_words_are_one_lane(trick, element, shift):
    one = trick(CODES.astype(np.uint16) << np.uint16(shift))
    assert one.shape == (16, 1)
    assert_same_bits(one[:, 0], element.values.astype(one.dtype))


def test_a_single_word_gives_its_lanes():
    assert bits.dequant_u4_lo(0x00030005).tolist() == [5, 3]
    assert bits.dequant_u4_lo(np.uint32(0x00030005)).shape == (2,)
    assert bits.lop3(0x1234ABCD, 0x000F000F, 0x64006400, 0xEA) == 0x6404640D
