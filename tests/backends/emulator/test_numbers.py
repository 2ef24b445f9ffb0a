"""Numbers in the Metal emulator: rounded as on a GPU, and as a careless compiler would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from common import ALL_HALVES, assert_same_bits
from emulator_support import FLOAT, HALF, each

from billfish.backends import emulator
from billfish.core.arrays import bfloat16

ALL_BFLOATS = np.arange(65536, dtype=np.uint16).view(bfloat16)


class TestNumbers:
    """Half and bfloat are rounded after each operation, to the bit."""

    @pytest.mark.parametrize("dtype", [HALF, bfloat16])
    @pytest.mark.parametrize("operation", ["+", "-", "*", "/"])
    def test_arithmetic(self, dtype: Any, operation: str) -> None:
        values = (ALL_HALVES if dtype == HALF else ALL_BFLOATS).astype(dtype)
        a, b = values, np.random.default_rng(1).permutation(values)
        with np.errstate(all="ignore"):
            # Exact to the last bit in spite of two roundings: float has more than twice the bits of either.
            wide = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}[operation]
            expected = wide(a.astype(np.float32), b.astype(np.float32)).astype(dtype)
        assert_same_bits(each(f"y[i] = a[i] {operation} b[i];", [a, b], dtype), expected)

    @pytest.mark.parametrize("dtype", [HALF, bfloat16])
    def test_products_are_rounded_before_they_are_added(self, dtype: Any) -> None:
        rng = np.random.default_rng(2)
        a, b, c = rng.standard_normal((3, 10000)).astype(dtype)
        product = (a.astype(np.float32) * b.astype(np.float32)).astype(dtype)
        expected = (product.astype(np.float32) + c.astype(np.float32)).astype(dtype)
        assert_same_bits(each("y[i] = a[i] * b[i] + c[i];", [a, b, c], dtype), expected)

    def test_float_is_not_contracted(self) -> None:
        a, b, c = np.random.default_rng(3).standard_normal((3, 10000)).astype(np.float32)
        assert_same_bits(each("y[i] = a[i] * b[i] + c[i];", [a, b, c], FLOAT), a * b + c)

    @pytest.mark.parametrize("dtype", [HALF, bfloat16])
    def test_conversions(self, dtype: Any) -> None:
        values = (ALL_HALVES if dtype == HALF else ALL_BFLOATS).astype(dtype)
        with np.errstate(all="ignore"):
            assert_same_bits(each("y[i] = float(a[i]);", [values], FLOAT), values.astype(np.float32))
        floats = np.random.default_rng(4).integers(0, 2**32, 50000, dtype=np.uint32).view(np.float32)
        name = "half" if dtype == HALF else "bfloat"
        with np.errstate(all="ignore"):
            assert_same_bits(each(f"y[i] = {name}(a[i]);", [floats], dtype), floats.astype(dtype))

    def test_fma_rounds_once(self) -> None:
        rng = np.random.default_rng(5)
        a, b, c = rng.standard_normal((3, 20000)).astype(np.float16)
        exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
        assert_same_bits(each("y[i] = fma(a[i], b[i], c[i]);", [a, b, c], HALF), exact.astype(np.float16))

    def test_literals_have_no_double(self) -> None:
        header = "template <class T> T third(T) { return 1.0 / 3.0; }\n"
        y = each(
            "y[i] = (sizeof(0.5) == 4) + (sizeof(1e-3) == 4) + (third(1.0f) == 1.0f / 3.0f) + (sizeof(1.5h) == 2);",
            [np.zeros(8, np.float32)],
            np.int32,
            header=header,
        )
        assert (y == 4).all()

    def test_functions(self) -> None:
        x = np.linspace(0.1, 3, 256, dtype=np.float32)
        for name in ("exp", "exp2", "log", "sqrt", "sin", "cos", "tanh", "floor", "ceil", "trunc", "rint"):
            np.testing.assert_allclose(each(f"y[i] = metal::{name}(a[i]);", [x], FLOAT), getattr(np, name)(x), 1e-6)
        np.testing.assert_allclose(each("y[i] = metal::precise::rsqrt(a[i]);", [x], FLOAT), 1 / np.sqrt(x), 1e-6)
        assert_same_bits(
            each("y[i] = clamp(a[i], 0.5f, 1.0f);", [x], FLOAT), np.clip(x, np.float32(0.5), np.float32(1))
        )

    def test_integers(self) -> None:
        x = np.random.default_rng(6).integers(0, 2**32, 1000, dtype=np.uint32)
        assert_same_bits(each("y[i] = popcount(a[i]);", [x], np.uint32), np.bitwise_count(x).astype(np.uint32))
        assert_same_bits(each("y[i] = extract_bits(a[i], 5, 7);", [x], np.uint32), x >> 5 & 127)
        assert_same_bits(
            each("y[i] = mulhi(a[i], 0x9E3779B9u);", [x], np.uint32),
            (x.astype(np.uint64) * 0x9E3779B9 >> 32).astype(np.uint32),
        )

    def test_vectors(self) -> None:
        x = np.arange(64, dtype=np.float16)
        source = """
            if (i >= 16) return;
            half4 v = ((const device half4*)a)[i];
            half4 turned = half4(v.wz, v.y, half(float(v.x)));
            half4 w(turned.xy, turned.zw);
            ((device half4*)y)[i] = w * half(2) + half4(1);
        """
        y = each(source, [x], HALF)
        assert_same_bits(y[:64], (x.reshape(-1, 4)[:, ::-1].reshape(-1) * np.float16(2) + np.float16(1)))


class TestHostile:
    """What a careless compiler could do."""

    def halves(self, source: str, x: np.ndarray, hostile: bool) -> np.ndarray:
        with emulator.options(hostile=hostile):
            return each(source, [x], HALF)

    def test_half_subnormals_are_flushed(self) -> None:
        x = ALL_HALVES[np.isfinite(ALL_HALVES)]
        small = np.abs(x) < 2.0**-14
        for source in (
            "y[i] = a[i] * 1024.0h;",
            "y[i] = half(float(a[i]) * 1024.0);",
            "y[i] = half4(a[i])[2] * 1024.0h;",
        ):
            with np.errstate(over="ignore"):
                plain = x * np.float16(1024)
            assert_same_bits(self.halves(source, x, False), plain)
            flushed = self.halves(source, x, True)
            assert (flushed[small] == 0).all()
            assert_same_bits(flushed[~small], plain[~small])

    def test_results_are_flushed_too(self) -> None:
        x = np.full(8, 2.0**-13, np.float16)
        assert (self.halves("y[i] = a[i] * 0.25h;", x, False) == 2.0**-15).all()
        assert (self.halves("y[i] = a[i] * 0.25h;", x, True) == 0).all()
        assert (self.halves("y[i] = half(float(a[i]) * 0.25);", x, True) == 0).all()

    def test_vectors_and_constants(self) -> None:
        x = ALL_HALVES[: 16 * 1024]  # positive, and not too large
        source = "if (i % 4 == 0) ((device half4*)y)[i / 4] = ((const device half4*)a)[i / 4] * half4(1, 2, 0.5, 1.5);"
        expected = x * np.tile(np.array([1, 2, 0.5, 1.5], np.float16), x.size // 4)
        assert_same_bits(self.halves(source, x, False), expected)
        small = (x < 2.0**-14) | (expected < 2.0**-14)
        assert_same_bits(self.halves(source, x, True), np.where(small, np.float16(0), expected))

    def test_comparisons_see_zero(self) -> None:
        x = np.full(8, 2.0**-15, np.float16)
        assert (self.halves("y[i] = a[i] > half(0);", x, False) == 1).all()
        assert (self.halves("y[i] = a[i] > half(0);", x, True) == 0).all()

    def test_moving_bits_does_not_flush(self) -> None:
        x = np.full(8, 2.0**-15, np.float16)
        assert (self.halves("y[i] = as_type<half>(ushort(as_type<ushort>(a[i]) + 1));", x, True) > 0).all()

    def test_sums_are_taken_in_another_order(self) -> None:
        # (a + b) - a is b for fast mathematics, and 0 for the tiny b of this test otherwise.
        a, b = np.full(8, 1e8, np.float32), np.full(8, 1, np.float32)
        source = "y[i] = (a[i] + b[i]) - a[i];"
        assert (each(source, [a, b], FLOAT) == 0).all()
        with emulator.options(hostile=True):
            assert (each(source, [a, b], FLOAT) == 1).all()
