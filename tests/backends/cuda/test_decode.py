"""decode.cuh, dequantize.cu, pack.cu, unpack.cu, compiled for the CPU, have the bits of the oracle (cuda_on_cpu.py)."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from common import ALL_HALVES, assert_same_bits
from cuda_on_cpu import compiled
from cuda_support import all_kinds, make, storages

import billfish as bf
from billfish.backends.cuda.axes import Description, Kind, describe
from billfish.backends.cuda.device_weights import PLAIN, stored_codes
from billfish.backends.cuda.layout import group_parts, pack, pack_codes, split, unpack_codes
from billfish.core.elements import FP4, FP8

ELEMENTS = ("Int4", "Int8", "E2M1", "E4M3", "Table4")
BYTES = ("Int8", "E4M3")
TYPES = {"F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
STORAGES = storages()


def often() -> list[Any]:
    """The first of `STORAGES` of each format, and of each element with each scale and offset."""
    firsts: dict[object, Any] = {}
    for case in STORAGES:
        kind = describe(make(*case)).kind
        firsts.setdefault(case[0], case)
        firsts.setdefault((kind.element, kind.scale, kind.offset), case)
    return [case for case in STORAGES if case in firsts.values()]


OFTEN = often()
ALL_CODES = Kind("E2M1", "ScaleF16", "NONE", 8)
# The compiler takes as long as there are kinds, so those of `make test` come first, in a library of their own.
FEW_KINDS = [*{describe(make(*case)).kind: None for case in OFTEN} | {ALL_CODES: None}, PLAIN]
KINDS = [*FEW_KINDS, *(kind for kind in all_kinds(wild=True) if kind not in FEW_KINDS)]


def reading(q: bf.QuantizedTensor) -> dict[str, str] | None:
    """The macros by which pack.cu reads a tensor's codes from its storage."""
    about = describe(q)
    stored = stored_codes(q, about.shift)
    return None if stored is None else {**about.kind.macros(), **stored[1]}


# Plain weights; then, of all formats, those that pack.cu reads as they are.
PLAIN_READING = {**PLAIN.macros(), "CODE": "u16"}
FEW_READINGS, READINGS = (
    [PLAIN_READING, *{str(m): m for case in cases if (m := reading(make(*case))) is not None}.values()]
    for cases in (OFTEN, [*OFTEN, *STORAGES])
)
TABLE = next(kind.table for kind in KINDS if kind.table)
element_and_type = pytest.mark.parametrize(
    ("element", "type"), [(element, type) for element in ELEMENTS for type in TYPES]
)


class Constants(NamedTuple):
    """Of an element, as decode.cuh explains them."""

    raw: float
    fused: float
    unit_low: float
    unit_high: float
    center: float


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return compiled(FEW_KINDS, FEW_READINGS)


@pytest.fixture(scope="module")
def library_of_all() -> ctypes.CDLL:
    return compiled(KINDS, READINGS)


def call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Arrays are passed as pointers."""
    pointers = [a.ctypes.data_as(ctypes.c_void_p) if isinstance(a, np.ndarray) else a for a in arguments]
    getattr(library, name)(*pointers)


def constants(library: ctypes.CDLL, element: str, type: str) -> Constants:
    found = np.empty(5, np.float32)
    call(library, f"constants_{element}_{type}", found)
    return Constants(*found.tolist())


def decoded(library: ctypes.CDLL, name: str, type: str, words: np.ndarray, *arguments: Any) -> np.ndarray:
    """The eight numbers of each fragment that `name` makes of words [fragments, words]: float64 [fragments, 8]."""
    pairs = np.empty((len(words), 4), np.uint32)
    call(library, name, np.ascontiguousarray(words), *arguments, pairs, len(words))
    with np.errstate(invalid="ignore"):  # NaN of ml_dtypes may signal
        return pairs.view(TYPES[type]).astype(np.float64)


def words_of(element: str, codes: np.ndarray) -> np.ndarray:
    """Codes [count, 8], in the order of registers, as the layout packs them: words [count, words of the element].

    Each eight are what a lane has in one fragment, where PTX's description of m16n8k16 finds them as A operand.
    """
    kind = Kind(element, "ScaleF16", "NONE", 1)
    bricks = -(-len(codes) // 256)
    matrix = np.zeros((bricks, 16, 128), np.uint8)
    lane, fragment, i = np.ogrid[:32, :8, :8]
    row = lane // 4 + i // 2 % 2 * 8  # rows g + 8 in every second pair
    column = fragment * 16 + lane % 4 * 2 + i % 2 + i // 4 * 8  # and 8 columns further in the last two
    matrix[:, row, column] = np.resize(codes, (bricks, 32, 8, 8))
    packed = pack_codes(kind, matrix.reshape(-1, 128)).view("<u4").reshape(bricks, -1, 32, 4)
    return np.ascontiguousarray(packed.transpose(0, 2, 1, 3)).reshape(-1, kind.words)[: len(codes)]


def values_of(element: str, codes: np.ndarray) -> np.ndarray:
    """What the codes of a kernel mean, in float64."""
    table = {
        "Int4": np.arange(16) - 8,
        "Int8": np.arange(256) - 128,
        "E2M1": FP4.values,
        "E4M3": FP8.values,
        "Table4": np.asarray(TABLE) - 128,
    }[element]
    return table.astype(np.float64)[codes]


def random_codes(element: str) -> np.ndarray:
    """Every code at every place, beside all kinds of neighbours."""
    return np.random.default_rng(0).integers(0, 256 if element in BYTES else 16, (1 << 14, 8)).astype(np.uint8)


def all_codes(element: str) -> np.ndarray:
    """Every code once in the rows g and once in the rows g + 8: [codes / 4, 8]."""
    fours = np.arange(256 if element in BYTES else 16, dtype=np.uint8).reshape(-1, 4)
    return by_row(fours.T, fours.T)


def by_row(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """What the rows g and g + 8 have, one for each fragment or four, in the order of registers: [..., 8]."""
    low, high = (np.broadcast_to(some, (4, *some.shape[-1:])) for some in (low, high))
    return np.stack([low[0], low[1], high[0], high[1], low[2], low[3], high[2], high[3]], axis=-1)


def pairs_of(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Numbers of 16 bits as pairs in a word."""
    return low.view(np.uint16) | high.view(np.uint16).astype(np.uint32) << np.uint32(16)


def scales_below_2(element: str, type: str) -> np.ndarray:
    """From 2^-6 on: those of a row are relative to its largest one, which is from 1 to below 2. All of them, or for the
    256 codes of a byte every 17th."""
    first, end = (int(np.array(limit, TYPES[type]).view(np.uint16)) for limit in (2.0**-6, 2.0))
    return np.arange(first, end, 17 if element == "Int8" else 1, dtype=np.uint16).view(TYPES[type])


@element_and_type
def test_decode(library, element, type):
    """The values, times a power of two."""
    codes = random_codes(element)
    numbers = decoded(library, f"decode_{element}_{type}", type, words_of(element, codes))
    assert_same_bits(numbers, values_of(element, codes) * constants(library, element, type).raw)


@element_and_type
def test_decode_plain(library, element, type):
    """Values plus the center, in units: for sums that are scaled later."""
    codes, about = random_codes(element), constants(library, element, type)
    numbers = decoded(library, f"decode_plain_{element}_{type}", type, words_of(element, codes))
    units = by_row(np.array([about.unit_low]), np.array([about.unit_high]))
    np.testing.assert_array_equal(numbers, (values_of(element, codes) + about.center) * units)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("element", ["Int4", "Int8"])
def test_decode_scaled_rounds_once(library, element, type):
    """(code - center) * scale."""
    codes, scales = all_codes(element), scales_below_2(element, type)
    low, high = (np.repeat(some, len(codes)) for some in (scales, scales[::-1]))
    words, values = (np.tile(of(element, codes), (len(scales), 1)) for of in (words_of, values_of))
    numbers = decoded(library, f"decode_scaled_{element}_{type}", type, words, pairs_of(low, high), None)
    exact = values * by_row(low, high).astype(np.float64) * constants(library, element, type).fused
    np.testing.assert_array_equal(numbers, exact.astype(TYPES[type]))


@pytest.mark.parametrize("element", ["Int4", "Int8"])
def test_a_zero_point_in_place_of_the_center_is_taken_off_exactly(library, element):
    """As gemm_large has it in float16: fma(code, 1, -zero), times 2^-9."""
    codes = all_codes(element)
    fused, zeros = constants(library, element, "F16").fused, np.arange(codes.max() + 1.0)
    low, high = (np.repeat(some, len(codes)) for some in (zeros, zeros[::-1]))
    ones, added = np.ones(len(low), np.float16), ((-zeros * fused).astype(np.float16) for zeros in (low, high))
    words, codes = (np.tile(some, (len(zeros), 1)) for some in (words_of(element, codes), codes))
    numbers = decoded(library, f"decode_scaled_{element}_F16", "F16", words, pairs_of(ones, ones), pairs_of(*added))
    np.testing.assert_array_equal(numbers, (codes - by_row(low, high)) * fused)


@pytest.mark.parametrize("element", ["Int4", "Int8"])
def test_a_minimum_in_place_of_the_center_is_rounded_once(library, element):
    """As gemm_large has it in float16: fma(code, scale, minimum), times 2^-9."""
    codes, scales, fused = all_codes(element), scales_below_2(element, "F16"), constants(library, element, "F16").fused
    smallest, end = (int(np.float16(limit).view(np.uint16)) for limit in (2.0**-5, 2048))
    minimums = np.random.default_rng(0).integers(smallest, end, len(scales)).astype(np.uint16).view(np.float16)
    low, high, least, most = (np.repeat(s, len(codes)) for s in (scales, scales[::-1], minimums, -minimums[::-1]))
    words, codes = (np.tile(some, (len(scales), 1)) for some in (words_of(element, codes), codes))
    added = pairs_of(*((some.astype(np.float64) * fused).astype(np.float16) for some in (least, most)))
    numbers = decoded(library, f"decode_scaled_{element}_F16", "F16", words, pairs_of(low, high), added)
    exact = codes * by_row(low, high).astype(np.float64) + by_row(least, most).astype(np.float64)
    np.testing.assert_array_equal(numbers, (exact * fused).astype(np.float16))


def every_scale_of_a_byte(name: str) -> bf.QuantizedTensor:
    """A tensor in which all codes meet all scales that keep their byte: E4M3's, or powers of two 2^31 apart."""
    scales = np.arange(0x7F) if name == "nvfp4" else np.arange(130, 98, -1)
    size = 16 if name == "nvfp4" else 32
    codes = np.stack([np.roll(np.tile(np.arange(16, dtype=np.uint8), len(scales) * size // 16), i) for i in range(16)])
    planes = {"codes": codes, "scale": np.tile(scales.astype(np.uint8), (16, 1))}
    if name == "nvfp4":
        planes["global_scale"] = np.asarray(1, np.float32)
    return bf.QuantizedTensor.from_planes(name, planes, size)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_scales_of_one_byte_are_exact_in_products(library, name, type):
    """gemm_small multiplies them by codes before these are summed. float16 has no room for the smallest of mxfp4."""
    q = every_scale_of_a_byte(name)
    about = describe(q)
    kind, k, bricks = about.kind, q.shape[1], -(-q.shape[1] // 128)
    data = pack(about).reshape(bricks, kind.brick_bytes)
    codes = data[:, :1024].copy().view("<u4").reshape(bricks, 2, 32, 4).transpose(0, 2, 1, 3).reshape(bricks, 32, 8)
    scales = data[:, 1024:].copy().view("<u4").reshape(bricks, 8, kind.groups // 2)  # a word for two groups
    dense = np.zeros((16, bricks * 128))
    dense[:, :k] = bf.dequantize(q, backend="reference")
    dense /= about.row_scale[:, None]
    raised = constants(library, "E2M1", type).raw * 2.0**7 * (1 if type == "F16" else 2.0**110)
    lane, i = np.ogrid[:32, :8]
    for fragment in range(8):
        group = fragment // (8 // kind.groups)
        words = np.ascontiguousarray(codes[:, :, fragment]).reshape(-1, 1)
        stored = np.repeat(scales[:, :, group // 2], 4, axis=1).ravel()  # lanes 4g to 4g + 3
        numbers = decoded(library, f"decode_prescaled_{kind.scale}_{type}", type, words, stored, group)
        columns = fragment * 16 + lane % 4 * 2 + i % 2 + i // 4 * 8
        exact = dense.reshape(16, bricks, 128)[lane // 4 + i // 2 % 2 * 8, :, columns] * raised  # [32, 8, bricks]
        exact = exact.transpose(2, 0, 1).reshape(-1, 8)
        rounded = exact.astype(TYPES[type]).astype(np.float64)
        assert_same_bits(numbers, rounded)
        assert (name, type) == ("mxfp4", "F16") or (rounded == exact).all()


def test_scales_that_a_byte_does_not_hold_are_float32():
    """Powers of two more than 2^31 apart; but not because of groups of zeros."""
    codes = np.full((2, 128), 5, np.uint8)
    codes[:, 32:64] = 8
    exponents = np.array([[130, 0, 130, 99], [130, 254, 127, 130]], np.uint8)
    for first, last, expected in (
        (130, 99, "ScaleE5M2"),
        (130, 98, "ScaleF32"),
        (254, 0, "ScaleF32"),
        (1, 255, "ScaleF32"),
    ):
        exponents[0] = first, 0, first, last
        q = bf.QuantizedTensor.from_planes("mxfp4", {"codes": codes, "scale": exponents}, 32)
        assert describe(q).kind.scale == expected


# ---- the kernels that pack and unpack all of a tensor ---------------------------------------------------------------


def dequantized(library: ctypes.CDLL, about: Description) -> np.ndarray:
    """By dequantize.cu, from what layout.py packed."""
    n, k = about.codes.shape
    out = np.full((n, k), np.nan, np.float32)
    call(library, f"dequantize_{KINDS.index(about.kind)}", pack(about), about.row_scale, out, n, k)
    return out


@pytest.mark.parametrize(
    ("name", "size", "option", "wild"),
    [pytest.param(*case, marks=() if case in OFTEN else pytest.mark.full) for case in STORAGES],
)
def test_no_format_loses_a_bit_on_the_way_to_bricks_and_back(request, name, size, option, wild):
    library = request.getfixturevalue("library" if (name, size, option, wild) in OFTEN else "library_of_all")
    q = make(name, size, option, wild)
    about = describe(q)
    with np.errstate(all="ignore"):
        assert_same_bits(dequantized(library, about), bf.dequantize(q, backend="reference"))
    bricks = pack(about)
    packed_there = np.full_like(bricks, 0xAA)
    call(library, f"pack_{KINDS.index(about.kind)}", about.codes, group_parts(about), packed_there, *q.shape)
    assert (packed_there == bricks).all()
    if macros := reading(q):
        packed_there[:] = 0xAA
        held = np.ascontiguousarray(stored_codes(q, about.shift)[0])
        call(library, f"read_{READINGS.index(macros)}", held, group_parts(about), packed_there, *q.shape)
        assert (packed_there == bricks).all()
    codes = np.full(q.shape, 0xAA, np.uint8)
    call(library, f"unpack_{KINDS.index(about.kind)}", bricks, codes, *q.shape, about.shift)
    assert (codes == q.planes["codes"]).all()
    parts = split(about.kind, bricks, *q.shape)[..., : about.kind.code_bytes]
    assert (unpack_codes(about.kind, parts, *q.shape) == about.codes).all()


def test_plain_weights_keep_their_bits(library):
    """All 65,536 patterns of float16."""
    w = ALL_HALVES.reshape(64, 1024)
    bricks = np.full(4 * 8 * PLAIN.brick_bytes, 0xAA, np.uint8)
    ones = np.ones((4 * 8, 16), np.float16).view(np.uint8)
    call(library, f"read_{READINGS.index(PLAIN_READING)}", w, ones, bricks, *w.shape)
    out = np.full(w.shape, np.nan, np.float32)
    call(library, f"dequantize_{KINDS.index(PLAIN)}", bricks, np.ones(64, np.float32), out, *w.shape)
    with np.errstate(invalid="ignore"):  # NaN that signal
        assert_same_bits(out, w.astype(np.float32))


def test_all_codes_with_all_float16_scales(library):
    """The 65,536 patterns, infinities and NaN included. How a scale is decoded does not depend on the element."""
    scales = ALL_HALVES.reshape(16, 4096)
    codes = np.tile(np.arange(16, dtype=np.uint8), (16, 4096))
    about = Description(ALL_CODES, codes.shape, lambda: codes, scales, None, np.ones(len(codes), np.float32))
    with np.errstate(all="ignore"):
        exact = FP4.values[codes] * np.repeat(scales, 16, axis=1).astype(np.float32)
    assert_same_bits(dequantized(library, about), exact)
