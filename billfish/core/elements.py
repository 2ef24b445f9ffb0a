"""The first axis of a format: how the bits of one code become a number.

An element is at most 8 bits wide, so its whole meaning fits one table, ``values[code]``, and that table is the
definition that every kernel is tested against. ``round`` and ``encode`` go the other way, to the nearest value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.core.device_array import look_up
from billfish.core.scales import decode_e4m3, encode_e4m3

Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]
# The first cell of a table, how many there are for each unit of x, and for each of them a code and a float.
Cells = tuple[float, float, list[int], list[float]]


class Element(ABC):
    """A table of values, one for each code, and the way back to the nearest of them."""

    def __init__(self, name: str, bits: int, values: Any) -> None:
        self.name = name
        self.bits = bits
        self.values: Floats = np.asarray(values, np.float32)
        self.values.setflags(write=False)
        self.low = float(np.nanmin(self.values))
        self.high = float(np.nanmax(self.values))

    def decode(self, codes: Codes) -> Floats:
        """The value of each code, float32."""
        numbers: Floats = look_up(self.values, codes)
        return numbers

    @abstractmethod
    def round(self, x: Floats) -> Floats:
        """The nearest value of the table; beyond its ends, the end."""

    @abstractmethod
    def encode(self, x: Floats) -> Codes:
        """The code of the nearest value."""

    def __repr__(self) -> str:
        return f"Element({self.name})"


class Table(Element):
    """Any 16 integers. The middles between them are multiples of 1/2, so one look at floor(2x) finds the nearest."""

    def __init__(self, name: str, bits: int, values: Any) -> None:
        super().__init__(name, bits, values)
        cells = np.arange(2 * self.low, 2 * self.high + 1)
        distance = np.abs((cells[:, None] + 0.5) / 2 - self.values)
        self._code_of_cell = distance.argmin(axis=1).astype(np.uint8)
        self._value_of_cell = self.values[self._code_of_cell]

    @property
    def cells(self) -> Cells:
        """For kernels: each x of a cell has the same nearest number."""
        return 2 * self.low, 2.0, self._code_of_cell.tolist(), self._value_of_cell.tolist()

    def encode(self, x: Floats) -> Codes:
        codes: Codes = look_up(self._code_of_cell, self._cell(x))
        return codes

    def round(self, x: Floats) -> Floats:
        numbers: Floats = look_up(self._value_of_cell, self._cell(x))
        return numbers

    def _cell(self, x: Floats) -> NDArray[np.int32]:
        cell = np.clip(np.floor(x * np.float32(2)), 2 * self.low, 2 * self.high) - np.float32(2 * self.low)
        return cell.astype(np.int32)


class Integer(Element):
    """``bits``-wide unsigned codes q that mean q - bias."""

    def __init__(self, name: str, bits: int, bias: int = 0) -> None:
        super().__init__(name, bits, np.arange(2**bits) - bias)
        self.bias = bias

    def round(self, x: Floats) -> Floats:
        return np.clip(np.rint(x), np.float32(self.low), np.float32(self.high))

    def encode(self, x: Floats) -> Codes:
        return (self.round(x) + np.float32(self.bias)).astype(np.uint8)


class Signed(Element):
    """Two's complement bytes."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 8, np.arange(256, dtype=np.uint8).view(np.int8))

    def round(self, x: Floats) -> Floats:
        return np.clip(np.rint(x), np.float32(-128), np.float32(127))

    def encode(self, x: Floats) -> Codes:
        return self.round(x).astype(np.int8).view(np.uint8)


class E2M1(Element):
    """Four-bit floats, sign : 2 exponent : 1 mantissa, bias 1: ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}; no infinity, no NaN."""

    MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def __init__(self) -> None:
        super().__init__("e2m1", 4, self.MAGNITUDES + tuple(-v for v in self.MAGNITUDES))
        # Index 2|v| of each magnitude, which is an integer from 0 to 12.
        self._code_of_twice = np.zeros(13, np.uint8)
        self._code_of_twice[[int(2 * v) for v in self.MAGNITUDES]] = np.arange(8)

    def round(self, x: Floats) -> Floats:
        """Ties to even, saturating at 6, the sign kept (so -0.1 becomes -0.0), as OCP and ml_dtypes have it."""
        magnitude = np.minimum(np.abs(x), np.float32(6))
        # One mantissa bit means steps of 2^(e-1), where 2^e <= max(|x|, 1). A float32 of size 2^(e+22) has exactly
        # that step, so adding it and taking it away again rounds |x| to the step, ties to even.
        power = np.maximum(magnitude, np.float32(1)).view(np.uint32) & np.uint32(0x7F800000)
        anchor = power.view(np.float32) * np.float32(2**22)
        with np.errstate(invalid="ignore"):  # NaN stays NaN
            return np.copysign((magnitude + anchor) - anchor, x)

    def encode(self, x: Floats) -> Codes:
        rounded = self.round(x)
        # NaN has no code; like ml_dtypes, it becomes a zero of the opposite sign.
        invalid = np.isnan(rounded)
        sign = np.where(np.signbit(rounded) ^ invalid, np.uint8(8), np.uint8(0))
        twice = np.where(invalid, np.float32(0), np.abs(rounded) * np.float32(2))
        codes: Codes = look_up(self._code_of_twice, twice.astype(np.intp)) | sign
        return codes


class E4M3(Element):
    """Eight-bit floats, sign : 4 exponent : 3 mantissa, bias 7, up to 448; no infinity, and two codes are NaN."""

    def __init__(self) -> None:
        super().__init__("e4m3", 8, decode_e4m3(np.arange(256, dtype=np.uint8)))

    def round(self, x: Floats) -> Floats:
        return self.decode(self.encode(x))

    def encode(self, x: Floats) -> Codes:
        """Ties to even, saturating at 448; NaN stays NaN."""
        return encode_e4m3(np.clip(x, np.float32(self.low), np.float32(self.high)))


class SortedFloats(Element):
    """Any 16 floats from -1 to 1, the least first. Ties go down.

    The numbers are at least 1/16 apart, so no more than one middle between two of them lies in a cell of that size.
    """

    CELLS = 16  # for each unit of x

    def __init__(self, name: str, values: Any) -> None:
        super().__init__(name, 4, values)
        middles = ((self.values[:-1].astype(np.float64) + self.values[1:]) / 2).astype(np.float32)
        edges = np.arange(-self.CELLS, self.CELLS + 1) / self.CELLS
        below = np.searchsorted(middles, edges[:-1], side="left")  # how many middles lie below each cell
        inside = np.append(middles, np.float32(np.inf))[below]
        self._code_of_cell = below.astype(np.uint8)
        self._middle_of_cell = inside

    @property
    def cells(self) -> Cells:
        """For kernels: the code is one more above the middle of the cell."""
        return float(-self.CELLS), float(self.CELLS), self._code_of_cell.tolist(), self._middle_of_cell.tolist()

    def encode(self, x: Floats) -> Codes:
        cell = np.clip(np.floor(x * np.float32(self.CELLS)), -self.CELLS, self.CELLS - 1) + np.float32(self.CELLS)
        at = cell.astype(np.int32)
        codes: Codes = look_up(self._code_of_cell, at)
        return codes + (x > look_up(self._middle_of_cell, at)).astype(np.uint8)

    def round(self, x: Floats) -> Floats:
        return self.decode(self.encode(x))


U2 = Integer("u2", 2)
U3B4 = Integer("u3b4", 3, bias=4)
U4 = Integer("u4", 4)
U4B8 = Integer("u4b8", 4, bias=8)
U5 = Integer("u5", 5)
U5B16 = Integer("u5b16", 5, bias=16)
U6B32 = Integer("u6b32", 6, bias=32)
U8 = Integer("u8", 8)
U8B128 = Integer("u8b128", 8, bias=128)
S8 = Signed("s8")
FP4 = E2M1()
# ggml holds E2M1 doubled, as small integers with one zero, and halves the scale instead.
E2M1X2 = Table("e2m1x2", 4, [int(2 * v) for v in FP4.values])
# ggml's non-linear levels: closer together where Gaussian weights are dense.
IQ4NL = Table("iq4nl", 4, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
FP8 = E4M3()
# bitsandbytes' levels: quantiles of a Gaussian, with both ends and zero among them.
NF4 = SortedFloats(
    "nf4",
    (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
)

ELEMENTS: dict[str, Element] = {
    e.name: e for e in (U2, U3B4, U4, U4B8, U5, U5B16, U6B32, U8, U8B128, S8, FP4, E2M1X2, IQ4NL, FP8, NF4)
}
