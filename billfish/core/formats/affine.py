"""Integers: `u4` and `u8` with a zero point, `u4b8` and `u8b128` with a fixed offset, and MLX's with a minimum.

`affine4` and `affine8` are stored row-major, as MLX stores them (it calls the minimum `biases`):

    packed  uint8 [N, K * bits / 8]                     along K, least significant bits first
    scales  float16, bfloat16 or float32 [N, ceil(K/g)]
    biases  as scales
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.core.arrays import bfloat16
from billfish.core.elements import U4, U4B8, U8, U8B128
from billfish.core.format import Format, GroupValues, Planes, register
from billfish.core.formats.word_packing import ScaledWordFormat, WordFormat
from billfish.core.search import Search, Separately, ZeroPoint, extremes, float16_scale, nearest_codes
from billfish.core.storage import Array, Storage, StoragePart

Floats = NDArray[np.float32]


class ZeroPointFormat(WordFormat):
    """(q - zero) * scale. GPTQ and AWQ have integer zero points; HQQ and others fractional ones."""

    offset = "zero point, u8 or f16"
    options = {"zero_point": ("integer", "fractional")}
    has_zeros = True

    def group_values(self, planes: Planes) -> GroupValues:
        return GroupValues(planes["scale"].astype(np.float32), zero=planes["zero"].astype(np.float32))

    def round_groups(self, w: Floats, **context: Any) -> Planes:
        return self._planes(w, *self._range(w, context["zero_point"]), context["zero_point"])

    def search_groups(self, w: Floats, search: Search, **context: Any) -> list[Planes]:
        zero_point = context["zero_point"]
        found = search.scale_and_minimum(w, self.element, *self._range(w, zero_point), self._rule(zero_point))
        return [self._planes(w, scale, minimum, zero_point) for scale, minimum in found]

    def _range(self, w: Floats, zero_point: str) -> tuple[Floats, Floats]:
        """(scale, minimum) at which nothing clips. An integer zero point keeps 0 in the range, and so exact."""
        low, high = extremes(w)
        steps = np.float32(self.element.high)
        if zero_point == "integer":
            low, high = np.where(low < 0, low, np.float32(0)), np.where(high > 0, high, np.float32(0))
            return (high - low) / steps, low
        # Weights that are all nearly equal would need a zero point beyond float16: keep it below 2^15.
        largest = np.maximum(np.abs(low), np.abs(high))
        return np.maximum((high - low) / steps, largest / np.float32(2**15)), low

    def _rule(self, zero_point: str) -> ZeroPoint:
        return ZeroPoint(zero_point == "integer", self.element.high)

    def _planes(self, w: Floats, scale: Floats, minimum: Floats, zero_point: str) -> Planes:
        stored = float16_scale(scale)
        zero = self._rule(zero_point).zero(stored, minimum)
        codes = nearest_codes(self.element, w, stored, zero=zero.astype(np.float32))
        return {"codes": codes, "scale": stored.astype(np.float16)[:, None], "zero": zero[:, None]}


@register
class U4Format(ZeroPointFormat):
    name = "u4"
    aliases = ("uint4",)
    element = U4
    block_size = 8
    layout = "u32 [K/8, N], f16 [K/g, N], zeros [K/g, N]"


@register
class U8Format(ZeroPointFormat):
    name = "u8"
    aliases = ("uint8",)
    element = U8
    block_size = 4
    layout = "u32 [K/4, N], f16 [K/g, N], zeros [K/g, N]"


@register
class U4B8Format(ScaledWordFormat):
    """(q - 8) * scale: GPTQ's symmetric 4-bit."""

    name = "u4b8"
    aliases = ("uint4b8", "int4")
    element = U4B8
    block_size = 8
    layout = "u32 [K/8, N], f16 [K/g, N]"


@register
class U8B128Format(ScaledWordFormat):
    """(q - 128) * scale: GPTQ's symmetric 8-bit."""

    name = "u8b128"
    aliases = ("uint8b128", "int8")
    element = U8B128
    block_size = 4
    layout = "u32 [K/4, N], f16 [K/g, N]"


class AffineFormat(Format):
    """code * scale + minimum, both of the type that the checkpoint has; quantizing makes float16."""

    scale = "f16, bf16 or f32"
    offset = "minimum, as scale"
    group_sizes = (32, 64, 128)
    block_size = 32

    def parts(self, options: Mapping[str, str]) -> tuple[StoragePart, ...]:
        packed = StoragePart("packed", (np.dtype(np.uint8),), "nk", 8 // self.element.bits)
        floats = (np.dtype(np.float16), bfloat16, np.dtype(np.float32))
        return packed, StoragePart("scales", floats, "nk"), StoragePart("biases", floats, "nk", like="scales")

    def pack(self, planes: Planes) -> Storage:
        codes = planes["codes"]
        packed = codes if self.element.bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4
        return {"packed": packed, "scales": planes["scale"], "biases": planes["minimum"]}

    def unpack_codes(self, storage: Storage) -> Array:
        packed = storage["packed"]
        if self.element.bits == 8:
            return np.ascontiguousarray(packed)
        return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), 2 * packed.shape[1])

    def unpack_scales(self, storage: Storage) -> Planes:
        return {"scale": storage["scales"], "minimum": storage["biases"]}

    def group_values(self, planes: Planes) -> GroupValues:
        return GroupValues(planes["scale"].astype(np.float32), minimum=planes["minimum"].astype(np.float32))

    def round_groups(self, w: Floats, **context: Any) -> Planes:
        return self._planes(w, *self._range(w))

    def search_groups(self, w: Floats, search: Search, **context: Any) -> list[Planes]:
        halves = Separately(float16_scale, float16_scale)
        found = search.scale_and_minimum(w, self.element, *self._range(w), halves)
        return [self._planes(w, scale, minimum) for scale, minimum in found]

    def _range(self, w: Floats) -> tuple[Floats, Floats]:
        low, high = extremes(w)
        return (high - low) / np.float32(self.element.high), low

    def _planes(self, w: Floats, scale: Floats, minimum: Floats) -> Planes:
        stored, least = float16_scale(scale), float16_scale(minimum)
        codes = nearest_codes(self.element, w, stored, least)
        return {
            "codes": codes,
            "scale": stored.astype(np.float16)[:, None],
            "minimum": least.astype(np.float16)[:, None],
        }


@register
class Affine4(AffineFormat):
    name = "affine4"
    element = U4
    layout = "u8 [N, K/2], scales [N, K/g], biases [N, K/g]"


@register
class Affine8(AffineFormat):
    name = "affine8"
    element = U8
    layout = "u8 [N, K], scales [N, K/g], biases [N, K/g]"
