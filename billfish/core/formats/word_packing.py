"""The layout of `fp4`, `u4`, `u4b8` and `u8b128`: codes packed along K into 32-bit words, K-major.

    packed  uint32 [K * bits / 32, N]    word r of column n holds k = r*per .. r*per + per-1, least significant first
    scales  float16 [ceil(K / g), N]     one for each group of g consecutive k; the last group may be partial. float32
                                         holds what checkpoints have and float16 cannot; quantizing makes float16
    zeros   uint8 or float16, as scales  zero points, where the format has them

This is the weight layout of Marlin's original documents and of GPTQ's `qweight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.core.format import Format, GroupValues, Planes
from billfish.core.search import Search, extremes, float16_scale, nearest_codes
from billfish.core.storage import Array, Storage, StoragePart

Floats = NDArray[np.float32]


def pack_words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Codes [K, N], each below 2**bits, to words [K * bits / 32, N]."""
    per_word = 32 // bits
    k, n = codes.shape
    grouped = codes.reshape(k // per_word, per_word, n)
    words = np.zeros((k // per_word, n), np.uint32)
    for j in range(per_word):
        words |= grouped[:, j].astype(np.uint32) << np.uint32(bits * j)
    return words


def unpack_words(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """The inverse of :func:`pack_words`."""
    per_word = 32 // bits
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    codes = words[:, None, :] >> shifts[:, None] & np.uint32(2**bits - 1)
    return codes.astype(np.uint8).reshape(per_word * words.shape[0], words.shape[1])


class WordFormat(Format):
    """The base of the formats with this layout."""

    scale = "f16"
    group_sizes: tuple[int, ...] = (32, 64, 128)
    whole_row_groups = True
    has_zeros = False

    def parts(self, options: Mapping[str, str]) -> tuple[StoragePart, ...]:
        packed = StoragePart("packed", (np.dtype(np.uint32),), "kn", 32 // self.element.bits)
        scales = StoragePart("scales", (np.dtype(np.float16), np.dtype(np.float32)), "kn")
        if not self.has_zeros:
            return packed, scales
        zeros = (np.dtype(np.uint8), np.dtype(np.float16))
        fractional = options.get("zero_point") == "fractional"
        return packed, scales, StoragePart("zeros", zeros[::-1] if fractional else zeros, "kn")

    def pack(self, planes: Planes) -> Storage:
        storage = {
            "packed": pack_words(planes["codes"].T, self.element.bits),
            "scales": np.ascontiguousarray(planes["scale"].T),
        }
        if self.has_zeros:
            storage["zeros"] = np.ascontiguousarray(planes["zero"].T)
        return storage

    def unpack_codes(self, storage: Storage) -> Array:
        return np.ascontiguousarray(unpack_words(storage["packed"], self.element.bits).T)

    def unpack_scales(self, storage: Storage) -> Planes:
        planes = {"scale": np.ascontiguousarray(storage["scales"].T)}
        if self.has_zeros:
            planes["zero"] = np.ascontiguousarray(storage["zeros"].T)
        return planes


class ScaledWordFormat(WordFormat):
    """element[code] * scale, with nothing else: a format of this kind only names its element."""

    def group_values(self, planes: Planes) -> GroupValues:
        return GroupValues(planes["scale"].astype(np.float32))

    def round_groups(self, w: Floats, **context: Any) -> Planes:
        return self._planes(w, self._smallest_scale(w))

    def search_groups(self, w: Floats, search: Search, **context: Any) -> list[Planes]:
        scales = search.scale(w, self.element, self._smallest_scale(w), float16_scale)
        return [self._planes(w, scale) for scale in scales]

    def _smallest_scale(self, w: Floats) -> Floats:
        """The smallest scale at which nothing clips: amax/6 for E2M1; integers reach one step further below zero."""
        low, high = np.float32(self.element.low), np.float32(self.element.high)
        least, greatest = extremes(w)
        return np.abs(np.maximum(greatest / high, least / low))  # a group of zeros has +0, never -0

    def _planes(self, w: Floats, scale: Floats) -> Planes:
        stored = float16_scale(scale)
        return {"codes": nearest_codes(self.element, w, stored), "scale": stored.astype(np.float16)[:, None]}
