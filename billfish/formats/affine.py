"""Integers with a float16 scale: `u4` with a zero point, `u4b8` and `u8b128` with a fixed offset."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.elements import U4, U4B8, U8B128
from billfish.format import GroupValues, Planes, register
from billfish.formats.search import float16_scale, reciprocal, search_scale_and_minimum
from billfish.formats.words import ScaledWordFormat, WordFormat

Floats = NDArray[np.float32]


@register
class U4Format(WordFormat):
    """(q - zero) * scale. GPTQ and AWQ have integer zero points; HQQ and others fractional ones."""

    name = "u4"
    element = U4
    offset = "zero point, u8 or f16"
    block_size = 8
    layout = "u32 [K/8, N], f16 [K/g, N], zeros [K/g, N]"
    options = {"zero_point": ("integer", "fractional")}
    zero_dtypes = (np.uint8, np.float16)

    def group_values(self, planes: Planes) -> GroupValues:
        return GroupValues(planes["scale"].astype(np.float32), zero=planes["zero"].astype(np.float32))

    def round_groups(self, w: Floats, **context: Any) -> Planes:
        return self._planes(w, *self._range(w, context["zero_point"]), context["zero_point"])

    def search_groups(self, w: Floats, **context: Any) -> Planes:
        zero_point = context["zero_point"]

        def representable(scale: Floats, minimum: Floats) -> tuple[Floats, Floats]:
            scale = float16_scale(scale)
            return scale, -scale * self._zero(scale, minimum, zero_point).astype(np.float32)

        start = self._range(w, zero_point)
        return self._planes(w, *search_scale_and_minimum(w, U4, *start, representable), zero_point)

    @staticmethod
    def _range(w: Floats, zero_point: str) -> tuple[Floats, Floats]:
        """(scale, minimum) at which nothing clips. An integer zero point keeps 0 in the range, and so exact."""
        low, high = w.min(axis=1), w.max(axis=1)
        if zero_point == "integer":
            low, high = np.minimum(low, 0), np.maximum(high, 0)
            return (high - low) / np.float32(15), low
        # Weights that are all nearly equal would need a zero point beyond float16: keep it below 2^15.
        largest = np.maximum(np.abs(low), np.abs(high))
        return np.maximum((high - low) / np.float32(15), largest / np.float32(2**15)), low

    @staticmethod
    def _zero(scale: Floats, minimum: Floats, zero_point: str) -> NDArray[Any]:
        zero = -minimum * reciprocal(scale)
        if zero_point == "integer":
            return np.clip(np.rint(zero), 0, 15).astype(np.uint8)
        return zero.astype(np.float16)

    def _planes(self, w: Floats, scale: Floats, minimum: Floats, zero_point: str) -> Planes:
        stored = scale.astype(np.float16)[:, None]
        zero = self._zero(stored.astype(np.float32), minimum[:, None], zero_point)
        codes = U4.encode(w * reciprocal(stored.astype(np.float32)) + zero.astype(np.float32))
        return {"codes": codes, "scale": stored, "zero": zero}

    def bits_per_weight(self, group_size: int) -> float:
        return super().bits_per_weight(group_size) + 8 / group_size


@register
class U4B8Format(ScaledWordFormat):
    """(q - 8) * scale: GPTQ's symmetric 4-bit."""

    name = "u4b8"
    element = U4B8
    block_size = 8
    layout = "u32 [K/8, N], f16 [K/g, N]"


@register
class U8B128Format(ScaledWordFormat):
    """(q - 128) * scale: GPTQ's symmetric 8-bit."""

    name = "u8b128"
    element = U8B128
    block_size = 4
    layout = "u32 [K/4, N], f16 [K/g, N]"
