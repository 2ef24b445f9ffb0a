"""FP8: `fp8`, E4M3 with a float scale, and `mxfp8` (OCP), E4M3 with a power of two. A byte each, row-major:

    packed  uint8 [N, K]
    scales  float32, float16 or bfloat16 [N, ceil(K/g)]       mxfp8: uint8 [N, K/32], E8M0

Checkpoints have a scale for each row, for the whole matrix, or for 128 x 128 weights. All of them are `fp8`: one group
for all of K, or groups of 128, with the scale of several rows repeated for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.core.arrays import bfloat16
from billfish.core.elements import FP8, Element
from billfish.core.format import Format, GroupValues, Planes, register
from billfish.core.formats.fp4 import Mxfp4
from billfish.core.search import AnyFloat, Search, largest_magnitude, nearest_codes
from billfish.core.storage import Array, Storage, StoragePart

Floats = NDArray[np.float32]


class ByteRows(Format):
    """The base of formats that store a byte for each weight, row by row."""

    scale_types: tuple[np.dtype[Any], ...] = (np.dtype(np.float32), np.dtype(np.float16), bfloat16)

    def parts(self, options: Mapping[str, str]) -> tuple[StoragePart, ...]:
        return StoragePart("packed", (np.dtype(np.uint8),), "nk", 1), StoragePart("scales", self.scale_types, "nk")

    def pack(self, planes: Planes) -> Storage:
        return {"packed": planes["codes"], "scales": planes["scale"]}

    def unpack_codes(self, storage: Storage) -> Array:
        return np.ascontiguousarray(storage["packed"])

    def unpack_scales(self, storage: Storage) -> Planes:
        return {"scale": storage["scales"]}


class FloatScaled(Format):
    """element[code] * scale, where quantizing makes float32 scales."""

    scale = "f32, f16 or bf16"

    def group_values(self, planes: Planes) -> GroupValues:
        return GroupValues(planes["scale"].astype(np.float32))

    def round_groups(self, w: Floats, **context: Any) -> Planes:
        return self._planes(w, self._smallest_scale(w))

    def search_groups(self, w: Floats, search: Search, **context: Any) -> list[Planes]:
        scales = search.scale(w, self.element, self._smallest_scale(w), AnyFloat())
        return [self._planes(w, scale) for scale in scales]

    def _smallest_scale(self, w: Floats) -> Floats:
        """The smallest scale at which nothing clips."""
        return largest_magnitude(w) / np.float32(self.element.high)

    def _planes(self, w: Floats, scale: Floats) -> Planes:
        return {"codes": nearest_codes(self.element, w, scale), "scale": scale[:, None]}


@register
class Fp8(ByteRows, FloatScaled):
    """E4M3 times a scale."""

    name = "fp8"
    aliases = ("fp8_e4m3", "float8_e4m3fn")
    element = FP8
    group_sizes = (128,)
    whole_row_groups = True
    block_size = 4
    layout = "u8 [N, K], f32 [N, K/g]"


@register
class Mxfp8(ByteRows, Mxfp4):
    """OCP MX: E4M3 times a power of two. It is quantized as mxfp4 is."""

    name = "mxfp8"
    element: Element = FP8
    scale_types = (np.dtype(np.uint8),)
    layout = "u8 [N, K], u8 [N, K/32]"
    largest_power = 8
    ties = "even"
