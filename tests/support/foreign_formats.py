"""Formats that nobody knows by name, made as docs/add-a-format.md says: what a backend takes, it must take rightly."""

from __future__ import annotations

import numpy as np

from billfish.core.elements import FP4, IQ4NL, S8, U2, U3B4, U4, U4B8, U6B32, Table
from billfish.core.format import GroupValues, Planes
from billfish.core.formats.affine import AffineFormat, ZeroPointFormat
from billfish.core.formats.fp4 import Mxfp4
from billfish.core.formats.ggml import MinimumBlock, Mxfp4Gguf, ScaledBlock
from billfish.core.formats.kquants import Q4_K, Q6_K
from billfish.core.formats.word_packing import ScaledWordFormat


class AnotherQ4K(Q4_K):
    name = "another_q4_k"


class AnotherQ6K(Q6_K):
    name = "another_q6_k"


class TwoBitWords(ScaledWordFormat):
    name, element, block_size = "two_bit_words", U2, 16


class ThreeBitBlocks(ScaledBlock):
    name, element = "three_bit_blocks", U3B4
    struct = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 8)])
    code_fields = (("qs", 8, 2), ("qh", 1, 1))


class SixBitBlocks(ScaledBlock):
    name, element = "six_bit_blocks", U6B32
    struct = np.dtype([("d", "<f2"), ("qh", "u1", 8), ("qs", "u1", 16)])
    code_fields = (("qs", 16, 4), ("qh", 8, 2))


class ScaledU4(ScaledWordFormat):
    """0 to 15 times a scale: four bits that Int4, -8 to 7, does not hold."""

    name, element, block_size = "scaled_u4", U4, 8


class LongGroups(ScaledWordFormat):
    name, element, block_size, group_sizes = "long_groups", U4B8, 8, (256,)


class Doubled(Mxfp4):
    """Called as mxfp4's scales are, and not what they are."""

    name, scale = "doubled", "e8m0"

    def group_values(self, planes: Planes) -> GroupValues:
        return GroupValues(super().group_values(planes).scale * np.float32(2))


class HalvedE2M1(Mxfp4Gguf):
    """ggml's scales beside elements that are not doubled."""

    name, element = "halved_e2m1", FP4


class Fp4WithZeros(ZeroPointFormat):
    name, element, block_size = "fp4_with_zeros", FP4, 8


class TableWithMinimum(MinimumBlock):
    name, element = "table_with_minimum", IQ4NL
    struct = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])


class BiasedWithMinimum(MinimumBlock):
    name, element = "biased_with_minimum", U4B8
    struct = TableWithMinimum.struct


class SignedWithMinimum(AffineFormat):
    name, element = "signed_with_minimum", S8


class ShortTable(ScaledWordFormat):
    name, element, block_size = "short_table", Table("three", 2, (-100, -1, 2, 90)), 16


FOREIGN = [
    AnotherQ4K,
    AnotherQ6K,
    TwoBitWords,
    ThreeBitBlocks,
    SixBitBlocks,
    ScaledU4,
    LongGroups,
    Doubled,
    HalvedE2M1,
    Fp4WithZeros,
    TableWithMinimum,
    BiasedWithMinimum,
    SignedWithMinimum,
    ShortTable,
]
