"""Native kernels of the search give the bits of billfish/core/search.py, for every format, method and ISA level."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from cases import diagonal
from common import assert_same_bits, gaussian, options_of, student_t

import billfish as bf
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.native_search import NativeSearch, element_of
from billfish.core.elements import ELEMENTS, Element, Integer, SortedFloats, Table
from billfish.core.search import (
    AnyFloat,
    AtMostZero,
    E4m3Times,
    IntegerTimes,
    Search,
    SearchKernels,
    Separately,
    ZeroPoint,
    dot,
    extremes,
    float16_scale,
    nearest_codes,
    provide_kernels,
    signed_extreme,
)

LEVELS = _cpu.levels()


@contextlib.contextmanager
def kernels(used: SearchKernels | None) -> Iterator[None]:
    before = provide_kernels(used)
    try:
        yield
    finally:
        provide_kernels(before)


def native(level: str = LEVELS[0]) -> NativeSearch:
    return NativeSearch(lambda: level)


def weights(k: int) -> np.ndarray:
    """Rows of all kinds: random ones of many sizes, zeros of both signs, subnormal numbers, equal ones, lattices."""
    rng = np.random.default_rng(k)
    rows = [
        *student_t((12, k), 1),
        *(gaussian((6, k), 2) * np.logspace(-8, 4, 6, dtype=np.float32)[:, None]),
        np.zeros(k),
        np.full(k, -0.0),
        rng.choice([0.0, -0.0], k),
        rng.choice([0.0, -0.0, 1.0, -1.0], k),
        np.round(gaussian((k,), 3) * 2) / 2,
        gaussian((k,), 4) * np.float32(1e-40),
        gaussian((k,), 5) * np.float32(1e-36),
        np.full(k, 0.37),
        np.full(k, -3e4),
        np.where(np.arange(k) % 16 == 3, 7.0, 0.0),
        np.abs(gaussian((k,), 6)) + 5,
        -np.abs(gaussian((k,), 7)) - 5,
    ]
    return np.stack(rows).astype(np.float32)


def importance_of(k: int) -> np.ndarray:
    rng = np.random.default_rng(9)
    return np.where(rng.random(k) < 0.1, 0, np.exp(2 * rng.standard_normal(k))).astype(np.float32)


def assert_equal(format, w, group_size, method, importance, options) -> None:
    with kernels(None):
        expected = format.quantize(w, group_size, method, importance, **options)
    with kernels(native()):
        found = format.quantize(w, group_size, method, importance, **options)
    assert found.keys() == expected.keys()
    for name, plane in expected.items():
        assert_same_bits(found[name], plane)


@pytest.mark.parametrize("format", bf.FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_every_format(format, method):
    w = weights(512)
    for options in options_of(format):
        for importance in (None, importance_of(512), np.zeros(512, np.float32)):
            assert_equal(format, w, format.default_group_size, method, importance, options)


@pytest.mark.parametrize("name", ["fp4", "u4", "u4b8", "u8b128", "fp8"])
@pytest.mark.parametrize(("k", "group_size"), [(200, 128), (200, 200), (40, 32), (8, 8), (72, 64)])
def test_partial_groups(name, k, group_size):
    format = bf.get_format(name)
    if group_size != k and group_size not in format.group_sizes:
        pytest.skip(f"{name} has no groups of {group_size}")
    for options in options_of(format):
        for importance in (None, importance_of(k)):
            assert_equal(format, weights(k), group_size, "mse", importance, options)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "u4", "q6_k", "q4_k", "nvfp4", "mxfp4", "fp4", "affine8"])
def test_scales_that_overflow_are_the_same_error(name):
    def message(used: SearchKernels | None) -> str:
        with kernels(used):
            try:
                return str(bf.quantize(gaussian((4, 256)) * np.float32(1e36), name))
            except bf.DataError as error:
                return str(error)

    assert message(native()) == message(None)


# ---- the parts, on every level --------------------------------------------------------------------------------------


@pytest.fixture(params=LEVELS)
def level(request) -> NativeSearch:
    return native(request.param)


def inputs_of(element: Element) -> np.ndarray:
    """Every middle between two values and the floats beside it, both ends and beyond, and random numbers."""
    values = np.unique(element.values[np.isfinite(element.values)])
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    exact = np.concatenate([values, middles, [element.low * 1.01, element.high * 1.01, 3e38, -3e38, np.inf, -np.inf]])
    exact = exact.astype(np.float32)
    beside = [np.nextafter(exact, np.float32(end)) for end in (-np.inf, np.inf)]
    small = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-38, 0.49999997, -0.49999997], np.float32)
    spread = (element.high - element.low) * np.random.default_rng(1).standard_normal(2000)
    return np.concatenate([exact, *beside, small, spread.astype(np.float32)])


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda e: e.name)
def test_codes(element, level):
    x = inputs_of(element)
    x = np.resize(x, (len(x) // 37 + 1, 37))
    ones, few = np.ones(len(x), np.float32), np.linspace(0.1, 3, len(x)).astype(np.float32)
    ties = ["even", "up"] if isinstance(element, Integer) else ["even", "away"] if element.name == "s8" else ["even"]
    ties += ["toward zero"] if element.name == "e2m1" else []
    for rule in ties:
        x = np.clip(x, -127, 127) if rule == "away" else x  # q8_0's scale leaves no larger ones
        others = [] if rule == "away" else [(few,), (few, few - 1), (few, None, few * 3)]
        for arguments in [(ones,), *others]:
            with kernels(None), np.errstate(all="ignore"):
                expected = nearest_codes(element, x, *arguments, ties=rule)
            with kernels(level):
                np.testing.assert_array_equal(nearest_codes(element, x, *arguments, ties=rule), expected)


RULES = {
    "any": lambda rows: AnyFloat(),
    "float16": lambda rows: float16_scale,
    "e4m3": lambda rows: E4m3Times(np.float32(0.003)),
    "integer": lambda rows: IntegerTimes(np.resize(np.float32([0.1, -0.02, 0, 1e-9]), rows), -32, 31),
    "both": lambda rows: Separately(float16_scale, float16_scale),
    "at most zero": lambda rows: Separately(AnyFloat(), AtMostZero()),
    "zero point": lambda rows: ZeroPoint(True, 15),
    "fractional": lambda rows: ZeroPoint(False, 15),
}


@pytest.mark.parametrize(("length", "level", "rule"), diagonal(3, [16, 32, 40, 256], LEVELS, RULES), indirect=["level"])
def test_scales(rule, length, level):
    w = weights(length)
    rows, (least, greatest) = len(w), extremes(w)
    weight = np.resize(importance_of(rows * length), w.shape)
    for search in (Search(), Search(weight), Search(weight, thorough=False)):
        for element in ELEMENTS.values() if length == 32 else [*ELEMENTS.values()][length % 3 :: 4]:
            if rule == "e4m3" and isinstance(element, (Table, SortedFloats)):
                continue  # a scale of the other sign may be NaN, and tables have no place for it
            found = []
            for used in (None, level):
                with kernels(used), np.errstate(all="ignore"):
                    if rule in ("any", "float16", "e4m3", "integer"):
                        start = signed_extreme(w) / np.float32(element.high)
                        found.append([(d,) for d in search.scale(w, element, start, RULES[rule](rows))])
                    else:
                        start = (greatest - least) / np.float32(element.high)
                        found.append(search.scale_and_minimum(w, element, start, least, RULES[rule](rows)))
            for expected, got in zip(*found, strict=True):
                for a, b in zip(expected, got, strict=True):
                    assert_same_bits(b, a)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 100, 576])
def test_rows(length, level):
    w, other = weights(length), np.resize(gaussian((31, 7)), (len(weights(length)), length))
    for function in (lambda: [dot(w, other)], lambda: extremes(w), lambda: [signed_extreme(w)]):
        with kernels(None):
            expected = function()
        with kernels(level):
            for a, b in zip(function(), expected, strict=True):
                assert_same_bits(a, b)


def test_what_kernels_do_not_know_is_left_to_numpy():
    class Coarse(Integer):
        def round(self, x):
            return super().round(x / 2) * 2

    w = gaussian((8, 32))
    assert element_of(Coarse("coarse", 4)) is None
    assert native().scales(Search(), w, ELEMENTS["u4b8"], (w[:, 0].copy(),), lambda scale: scale) is None
    assert native().dot(w.astype(np.float64), w.astype(np.float64)) is None
