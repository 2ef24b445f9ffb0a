"""ggml's k-quants: blocks of 256 with scales on two levels, small integers per 16 or 32 weights and float16 above.

q2_k q4_k q5_k    value = (d * sub_scale) * code - dmin * sub_minimum
q3_k q6_k iq4_xs  value = (d * sub_scale) * code,  code and sub_scale signed
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.core.elements import IQ4NL, U2, U3B4, U4, U5, U6B32
from billfish.core.format import GroupValues, Planes, register
from billfish.core.formats.ggml import BlockFormat, fold, unfold
from billfish.core.search import (
    AnyFloat,
    AtMostZero,
    IntegerTimes,
    Search,
    Separately,
    dot,
    extremes,
    float16_scale,
    nearest_codes,
    reciprocal,
    signed_extreme,
)
from billfish.core.storage import Array

Floats = NDArray[np.float32]


def two_level(upper: Array, lower: Array) -> Floats:
    """Float16 [N, B] times small integers [N, G]: one float32 for each group."""
    n, blocks = upper.shape
    product = upper.astype(np.float32)[..., None] * lower.reshape(n, blocks, -1).astype(np.float32)
    return product.reshape(n, -1)


def share_upper(per_block: Floats, integer: int) -> Floats:
    """d for each group of blocks [R, groups], equal within a block, at which the largest of it takes `integer`."""
    upper = float16_scale(signed_extreme(per_block) / np.float32(integer))
    return np.repeat(upper, per_block.shape[1])


_at_most_zero = AtMostZero()


class TwoLevelMinimum(BlockFormat):
    """Unsigned codes, with a scale and a minimum for each group. The minimum is subtracted, so it is at most 0."""

    scale = "6-bit * f16"
    offset = "minimum, 6-bit * f16"
    block_size = 256
    fields = {"d": "scale", "dmin": "minimum"}
    sub_limit = 63  # the largest integer of the lower level

    def group_values(self, planes: Planes) -> GroupValues:
        scale = two_level(planes["scale"], planes["sub_scale"])
        return GroupValues(scale, minimum=-two_level(planes["minimum"], planes["sub_minimum"]))

    def round_groups(self, w: Floats, **context: Any) -> Planes:
        groups = w.reshape(-1, self.group_sizes[0])
        return self._planes(w, *self._range(groups))

    def search_groups(self, w: Floats, search: Search, **context: Any) -> list[Planes]:
        groups, search = w.reshape(-1, self.group_sizes[0]), search.over(self.group_sizes[0])
        negative = Separately(AnyFloat(), _at_most_zero)
        # First what each group wants, free of the others; then again, among what the block's d and dmin can give.
        wanted = search.scale_and_minimum(groups, self.element, *self._range(groups), negative)
        return [self._search_shared(w, *pair, part) for pair, part in zip(wanted, search.parts, strict=True)]

    def _search_shared(self, w: Floats, scale: Floats, minimum: Floats, search: Search) -> Planes:
        groups = w.reshape(len(scale), -1)
        upper = [self._upper(w, scale), self._upper(w, minimum)]
        shared = Separately(*(IntegerTimes(u, 0, self.sub_limit) for u in upper))
        ((scale, minimum),) = search.scale_and_minimum(groups, self.element, scale, minimum, shared)
        planes = self._planes(w, scale, minimum, upper)
        refitted = self._refit(w, planes, upper, search.importance)
        sub = (planes["sub_scale"].ravel(), planes["sub_minimum"].ravel())
        return self._planes(w, sub[0] * refitted[0], sub[1] * refitted[1], refitted)

    def _refit(self, w: Floats, planes: Planes, upper: list[Floats], importance: Floats | None) -> list[Floats]:
        """d and dmin once more, by least squares over the whole block for the integers that were found."""
        groups = w.reshape(len(w), -1, self.group_sizes[0])
        steps = planes["codes"].reshape(groups.shape) * planes["sub_scale"][..., None].astype(np.float32)
        minimums = np.repeat(planes["sub_minimum"].astype(np.float32)[..., None], groups.shape[2], axis=2)
        # w = d * steps + u * minimums with two unknowns; u is upper_minimum, so negative.
        v = np.ones_like(groups) if importance is None else importance.reshape(groups.shape)
        ss, sm, mm, ws, wm = (
            dot((a * v).reshape(w.shape), b.reshape(w.shape))
            for a, b in ((steps, steps), (steps, minimums), (minimums, minimums), (groups, steps), (groups, minimums))
        )
        determinant = ss * mm - sm * sm
        inverse = reciprocal(determinant)
        fitted = (ws * mm - wm * sm) * inverse, _at_most_zero((wm * ss - ws * sm) * inverse)
        solvable = np.repeat(determinant > 0, groups.shape[1])  # not where a block has no minimums at all
        return [
            np.where(solvable, float16_scale(np.repeat(new, groups.shape[1])), old)
            for new, old in zip(fitted, upper, strict=True)
        ]

    def _range(self, groups: Floats) -> tuple[Floats, Floats]:
        """(scale, minimum) of each group at which nothing clips."""
        low, high = extremes(groups)
        low = _at_most_zero(low)
        return (high - low) / np.float32(self.element.high), low

    def _upper(self, w: Floats, wanted: Floats) -> Floats:
        """d for each group, equal within a block: the largest magnitude wanted there takes the largest integer."""
        return share_upper(wanted.reshape(len(w), -1), self.sub_limit)

    def _lower(self, wanted: Floats, upper: Floats) -> Floats:
        """The integer of each group under its block's `upper`."""
        return IntegerTimes(upper, 0, self.sub_limit).integers(wanted)

    def _planes(self, w: Floats, scale: Floats, minimum: Floats, upper: list[Floats] | None = None) -> Planes:
        upper_scale, upper_minimum = upper or [self._upper(w, scale), self._upper(w, minimum)]
        sub_scale, sub_minimum = self._lower(scale, upper_scale), self._lower(minimum, upper_minimum)
        # The values as they will be decoded; upper_minimum is negative, dmin is not.
        scale, minimum = upper_scale * sub_scale, upper_minimum * sub_minimum
        groups = w.reshape(len(scale), -1)
        codes = nearest_codes(self.element, groups, scale, minimum)
        rows = len(w)
        return {
            "codes": codes.reshape(w.shape),
            "scale": upper_scale.reshape(rows, -1)[:, :1].astype(np.float16),
            "minimum": -upper_minimum.reshape(rows, -1)[:, :1].astype(np.float16),
            "sub_scale": sub_scale.reshape(rows, -1).astype(np.uint8),
            "sub_minimum": sub_minimum.reshape(rows, -1).astype(np.uint8),
        }


class TwoLevelScaled(BlockFormat):
    """Signed codes, with a signed scale for each group."""

    group_sizes = (16,)
    block_size = 256
    sub_range: tuple[int, int]  # the integers of the lower level
    sub_bias = 0  # what the stored integer has more than the meant one

    def group_values(self, planes: Planes) -> GroupValues:
        return GroupValues(two_level(planes["scale"], planes["sub_scale"].astype(np.int16) - self.sub_bias))

    def round_groups(self, w: Floats, **context: Any) -> Planes:
        scale = self._signed_scale(w.reshape(-1, self.group_sizes[0]))
        return self._planes(w, scale, self._upper(w, scale))

    def search_groups(self, w: Floats, search: Search, **context: Any) -> list[Planes]:
        size = self.group_sizes[0]
        groups, search = w.reshape(-1, size), search.over(size)
        # First what each group wants, free of the others; then again, among what the block's d can give.
        wanted = search.scale(groups, self.element, self._signed_scale(groups), AnyFloat())
        return [self._search_shared(w, scale, part) for scale, part in zip(wanted, search.parts, strict=True)]

    def _search_shared(self, w: Floats, scale: Floats, search: Search) -> Planes:
        upper = self._upper(w, scale)
        groups = w.reshape(-1, self.group_sizes[0])
        (found,) = search.scale(groups, self.element, scale, self._rule(upper))
        return self._planes(w, found, upper)

    def _signed_scale(self, groups: Floats) -> Floats:
        """As in q4_0: the weight of largest magnitude, sign and all, becomes the least value of the element."""
        return signed_extreme(groups) / np.float32(self.element.low)

    def _upper(self, w: Floats, scale: Floats) -> Floats:
        """d for each group, equal within a block: the same rule one level up."""
        return share_upper(scale.reshape(len(w), -1), self.sub_range[0])

    def _rule(self, upper: Floats) -> IntegerTimes:
        return IntegerTimes(upper, *self.sub_range)

    def _planes(self, w: Floats, scale: Floats, upper: Floats) -> Planes:
        sub_scale = self._rule(upper).integers(scale)
        groups = w.reshape(len(scale), -1)
        codes = nearest_codes(self.element, groups, upper * sub_scale)
        rows = len(w)
        stored = (sub_scale + self.sub_bias).astype(np.uint8 if self.sub_bias else np.int8)
        return {
            "codes": codes.reshape(w.shape),
            "scale": upper.reshape(rows, -1)[:, :1].astype(np.float16),
            "sub_scale": stored.reshape(rows, -1),
        }


class SixBitPairs(TwoLevelMinimum):
    """q4_k and q5_k: eight 6-bit scales and eight 6-bit minimums in twelve bytes.

        byte      0..3        4..7        8..11
        bits 7-6  scale 4..7  minim 4..7
        bits 5-0  scale 0..3  minim 0..3
        bits 7-4                          minim 4..7, low four bits
        bits 3-0                          scale 4..7, low four bits

    The two bits on top of bytes 0..7 are the high bits of the integers whose low bits are in bytes 8..11.
    """

    def read_scales(self, blocks: Array) -> Planes:
        first, second, mixed = np.split(blocks["scales"], 3, axis=-1)
        sub_scale = np.concatenate([first & 63, mixed & 15 | first >> 6 << 4], axis=-1)
        sub_minimum = np.concatenate([second & 63, mixed >> 4 | second >> 6 << 4], axis=-1)
        return {**super().read_scales(blocks), "sub_scale": sub_scale, "sub_minimum": sub_minimum}

    def write_scales(self, planes: Planes, blocks: Array) -> None:
        super().write_scales(planes, blocks)
        (scale, scale4), (minimum, minimum4) = (
            np.split(planes[name], 2, axis=-1) for name in ("sub_scale", "sub_minimum")
        )
        first, second = scale | scale4 >> 4 << 6, minimum | minimum4 >> 4 << 6
        blocks["scales"] = np.concatenate([first, second, scale4 & 15 | minimum4 << 4], axis=-1)


@register
class Q4_K(SixBitPairs):
    name = "q4_k"
    gguf = "Q4_K"
    element = U4
    struct = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
    code_fields = (("qs", 32, 4),)


@register
class Q5_K(SixBitPairs):
    name = "q5_k"
    gguf = "Q5_K"
    element = U5
    struct = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
    code_fields = (("qs", 32, 4), ("qh", 32, 1))


@register
class Q6_K(TwoLevelScaled):
    name = "q6_k"
    gguf = "Q6_K"
    element = U6B32
    scale = "8-bit * f16"
    sub_range = (-128, 127)
    struct = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])
    fields = {"d": "scale", "scales": "sub_scale"}
    code_fields = (("ql", 64, 4), ("qh", 32, 2))


@register
class Q2_K(TwoLevelMinimum):
    name = "q2_k"
    gguf = "Q2_K"
    element = U2
    scale = "4-bit * f16"
    offset = "minimum, 4-bit * f16"
    group_sizes = (16,)
    sub_limit = 15
    struct = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
    code_fields = (("qs", 32, 2),)

    def read_scales(self, blocks: Array) -> Planes:
        both = blocks["scales"]
        return {**super().read_scales(blocks), "sub_scale": both & 15, "sub_minimum": both >> 4}

    def write_scales(self, planes: Planes, blocks: Array) -> None:
        super().write_scales(planes, blocks)
        blocks["scales"] = planes["sub_scale"] | planes["sub_minimum"] << 4


@register
class Q3_K(TwoLevelScaled):
    name = "q3_k"
    gguf = "Q3_K"
    element = U3B4
    scale = "6-bit * f16"
    sub_range = (-32, 31)
    sub_bias = 32
    struct = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
    code_fields = (("qs", 32, 2), ("hmask", 32, 1))

    def read_scales(self, blocks: Array) -> Planes:
        low, high = np.split(blocks["scales"], [8], axis=-1)
        return {**super().read_scales(blocks), "sub_scale": unfold(low, 8, 4) | unfold(high, 4, 2) << 4}

    def write_scales(self, planes: Planes, blocks: Array) -> None:
        super().write_scales(planes, blocks)
        sub_scale = planes["sub_scale"]
        blocks["scales"] = np.concatenate([fold(sub_scale, 8, 4), fold(sub_scale >> 4, 4, 2)], axis=-1)


@register
class Iq4Xs(TwoLevelScaled):
    """iq4_nl's levels, with a 6-bit scale for each 32: high bits in two bytes, and low ones in four."""

    name = "iq4_xs"
    gguf = "IQ4_XS"
    element = IQ4NL
    scale = "6-bit * f16"
    group_sizes = (32,)
    sub_range = (-32, 31)
    sub_bias = 32
    struct = np.dtype([("d", "<f2"), ("scales", "u1", 6), ("qs", "u1", 128)])

    def read_scales(self, blocks: Array) -> Planes:
        high, low = np.split(blocks["scales"], [2], axis=-1)
        return {**super().read_scales(blocks), "sub_scale": unfold(low, 1, 4) | unfold(high, 1, 2) << 4}

    def write_scales(self, planes: Planes, blocks: Array) -> None:
        super().write_scales(planes, blocks)
        sub_scale = planes["sub_scale"]
        blocks["scales"] = np.concatenate([fold(sub_scale >> 4, 1, 2), fold(sub_scale, 1, 4)], axis=-1)
