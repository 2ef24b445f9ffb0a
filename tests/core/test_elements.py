"""Elements and 8-bit scales against ml_dtypes: every code, and every half as input."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from common import ALL_BYTES, ALL_HALVES, assert_same_bits

from billfish.core.elements import ELEMENTS, FP4, IQ4NL, Element, Integer
from billfish.core.scales import decode_e4m3, decode_e8m0, encode_e4m3, encode_e8m0

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")


def test_e2m1_decodes_as_ml_dtypes():
    codes = np.arange(16, dtype=np.uint8)
    assert_same_bits(FP4.decode(codes), codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32))


def test_e8m0_decodes_as_ml_dtypes():
    assert_same_bits(decode_e8m0(ALL_BYTES), ALL_BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


def test_e4m3_decodes_as_ml_dtypes():
    assert_same_bits(decode_e4m3(ALL_BYTES), ALL_BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize(
    ("encode", "dtype"),
    [
        (FP4.encode, ml_dtypes.float4_e2m1fn),
        (encode_e8m0, ml_dtypes.float8_e8m0fnu),
        (encode_e4m3, ml_dtypes.float8_e4m3fn),
    ],
    ids=["e2m1", "e8m0", "e4m3"],
)
def test_encodes_every_half_as_ml_dtypes(encode, dtype):
    np.testing.assert_array_equal(encode(ALL_HALVES), ALL_HALVES.astype(dtype).view(np.uint8))


@pytest.mark.parametrize(
    ("encode", "dtype"),
    [(FP4.encode, ml_dtypes.float4_e2m1fn), (encode_e4m3, ml_dtypes.float8_e4m3fn)],
    ids=["e2m1", "e4m3"],
)
def test_encodes_random_floats_as_ml_dtypes(encode, dtype):
    x = np.random.default_rng(0).integers(0, 2**32, 1 << 20, dtype=np.uint32).view(np.float32)
    np.testing.assert_array_equal(encode(x), x.astype(dtype).view(np.uint8))


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda e: e.name)
def test_every_code_survives_decode_and_encode(element: Element):
    codes = np.arange(2**element.bits, dtype=np.uint8)
    values = element.decode(codes)
    assert_same_bits(element.decode(element.encode(values)), values)
    assert_same_bits(element.round(values), values)


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda e: e.name)
def test_rounds_to_the_nearest_value(element: Element):
    x = np.linspace(element.low - 3, element.high + 3, 20001, dtype=np.float32)
    nearest = np.nanmin(np.abs(x[:, None] - element.values), axis=1)
    np.testing.assert_array_equal(np.abs(x - element.round(x)), nearest)
    np.testing.assert_array_equal(element.decode(element.encode(x)), element.round(x))


def test_e8m0_encodes_down_to_its_smallest_power():
    powers = np.ldexp(np.float32(1), np.arange(-127, 128)).astype(np.float32)
    np.testing.assert_array_equal(encode_e8m0(powers), np.arange(0, 255))


def test_iq4nl_levels_rise():
    assert (np.diff(IQ4NL.values) > 0).all()


def test_integer_elements_are_shifted_counts():
    for element in ELEMENTS.values():
        if isinstance(element, Integer):
            np.testing.assert_array_equal(element.values, np.arange(2**element.bits) - element.bias)
