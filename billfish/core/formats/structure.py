"""Which storage the kernels read as it is, told by how a format is made and never by its name.

A format is read where it lies if its codes are in one of the layouts of layout/file_codes.h of the CPU, its scales in
one of layout/file_scales.h, and the methods that give them a meaning are the ones that the kernels were written after.
A subclass qualifies, whoever wrote it, as long as it changes none of these. Other formats go by way of their planes.
CUDA's pack.cu reads the same codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from billfish.core.elements import Element, Integer, Signed
from billfish.core.format import Format
from billfish.core.formats.affine import AffineFormat
from billfish.core.formats.fp4 import MicroscaledFp4, Nvfp4
from billfish.core.formats.ggml import BlockFormat, Nvfp4Gguf
from billfish.core.formats.kquants import Q2_K, Q3_K, Iq4Xs, SixBitPairs
from billfish.core.formats.meaning import E4M3, E8M0, PLAIN, TWO_LEVELS, WITH_MINIMUM, decodes_plainly, meaning
from billfish.core.formats.word_packing import WordFormat

# Block, and (run of bytes, bits) of each field of codes -> group, minimums (None: either way): layout/file_codes.h.
CODE_LAYOUTS: dict[tuple[int, tuple[tuple[int, int], ...]], tuple[int, bool | None]] = {
    (32, ((1, 4),)): (32, None),
    (32, ((1, 8),)): (32, None),
    (32, ((16, 4),)): (32, None),
    (32, ((16, 4), (1, 1))): (32, None),
    (64, ((8, 4),)): (16, False),
    (256, ((16, 4),)): (32, False),
    (256, ((32, 2),)): (16, True),
    (256, ((32, 2), (32, 1))): (16, False),
    (256, ((32, 4),)): (32, True),
    (256, ((32, 4), (32, 1))): (32, True),
    (256, ((64, 4), (32, 2))): (16, False),
}
# The small integers of two levels, by the method that reads them: how layout/file_scales.h calls them, bytes, and bias.
SMALL_INTEGERS = {
    SixBitPairs.read_scales: ("six_bit_pairs", np.dtype(("u1", 12)), 0),
    Q2_K.read_scales: ("nibble_pairs", np.dtype(("u1", 16)), 0),
    Q3_K.read_scales: ("six_bits", np.dtype(("u1", 12)), 32),
    BlockFormat.read_scales: ("signed_bytes", np.dtype(("i1", 16)), 0),
    Iq4Xs.read_scales: ("six_bits_apart", np.dtype(("u1", 6)), 32),
}


@dataclass(frozen=True)
class Structure:
    """Where the codes and scales of a format are, in the words of layout/problem.h; scales as in Storage::Scales."""

    words: bool
    block: int
    block_bytes: int
    code_fields: tuple[tuple[int, int, int], ...]  # offset, run of bytes, bits
    scales: str = "apart"
    scale_offset: int = -1
    minimum_offset: int = -1
    sub_offset: int = -1

    @property
    def scales_inside(self) -> bool:
        """Whether each block has float16 scales that the packer reads."""
        return self.scale_offset >= 0


@cache
def structure_of(format: Format) -> Structure | None:
    """How the kernels read a format's storage, or None: they do not."""
    kind, element = type(format), format.element
    known = meaning(format) in (*PLAIN, *E8M0, *E4M3, *TWO_LEVELS)
    if not known or not decodes_plainly(format) or not _has_values(element):
        return None
    if isinstance(format, BlockFormat):
        return _blocks(format)
    if element.bits not in (4, 8) or not set(format.group_sizes) <= {16, 32, 64, 128}:
        return None
    bits = element.bits
    if kind.unpack_codes is WordFormat.unpack_codes and kind.unpack_scales is WordFormat.unpack_scales:
        return Structure(True, 32, 4 * bits, ((0, 1, bits),))
    rows = (AffineFormat.unpack_codes, MicroscaledFp4.unpack_codes)
    scales = (AffineFormat.unpack_scales, MicroscaledFp4.unpack_scales, Nvfp4.unpack_scales)
    if kind.unpack_codes in rows and kind.unpack_scales in scales:
        return Structure(False, 32, 4 * bits, ((0, 1, bits),))
    return None


def _has_values(element: Element) -> bool:
    """Whether kernels know what a code means: by a table of 16, or as an integer less a bias.

    NEON looks up the upper two bytes of a float (simd/sixteen.h), so the lower two are zeros: each value is a bfloat16.
    """
    if type(element).decode is not Element.decode:
        return False
    if element.bits <= 4:
        return not (element.values.astype(np.float32).view(np.uint32) & 0xFFFF).any()
    return element.bits in (5, 6, 8) and type(element) in (Integer, Signed)


def _blocks(format: BlockFormat) -> Structure | None:
    kind, struct = type(format), format.struct
    methods = (kind.unpack_codes, kind.read_codes, kind.unpack_scales)
    ours = (BlockFormat.unpack_codes, BlockFormat.read_codes)
    if methods[:2] != ours or methods[2] not in (BlockFormat.unpack_scales, Nvfp4Gguf.unpack_scales):
        return None
    fields = {name: (struct[name], struct.fields[name][1]) for name in struct.names or ()} if struct.fields else {}
    layout = CODE_LAYOUTS.get((format.block_size, tuple((width, bits) for _, width, bits in format.code_fields)))
    group, minimum = format.group_sizes[0], "minimum" in format.fields.values()
    whole = all(
        name in fields and fields[name][0].itemsize * 8 == format.block_size * bits
        for name, _, bits in format.code_fields
    )
    if layout is None or not whole or sum(bits for _, _, bits in format.code_fields) != format.element.bits:
        return None
    if layout[0] != group or len(format.group_sizes) != 1 or layout[1] not in (None, minimum):
        return None
    code_fields = tuple((fields[name][1], width, bits) for name, width, bits in format.code_fields)
    scales = _block_scales(format, fields)
    return None if scales is None else Structure(False, format.block_size, struct.itemsize, code_fields, *scales)


def _block_scales(format: BlockFormat, fields: dict[str, tuple[Any, int]]) -> tuple[str, int, int, int] | None:
    """Kind and offsets of scale, minimum and small integers: the fields that hold the planes of these names."""
    kind, offset_of = type(format), {plane: fields[name][1] for name, plane in format.fields.items()}
    types = {plane: fields[name][0] for name, plane in format.fields.items()}
    scale, minimum = offset_of.get("scale", -1), offset_of.get("minimum", -1)
    if meaning(format) in (*E8M0, *E4M3):
        bytes_each = format.block_size // format.group_sizes[0]
        fits = types["scale"].base == np.uint8 and types["scale"].itemsize == bytes_each
        return ("looked_up", -1, -1, scale) if fits and kind.read_scales is BlockFormat.read_scales else None
    halves = all(types[plane] == np.float16 for plane in ("scale", "minimum") if plane in types)
    if not halves or scale < 0 or (meaning(format) in WITH_MINIMUM) != (minimum >= 0):
        return None
    if meaning(format) in TWO_LEVELS:
        name, dtype, bias = SMALL_INTEGERS.get(kind.read_scales, ("", None, 0))
        stored, at = fields.get("scales", (None, -1))
        fits = stored == dtype and getattr(format, "sub_bias", 0) == bias and format.block_size == 256
        return (name, scale, minimum, at) if fits else None
    return ("halves", scale, minimum, -1) if kind.read_scales is BlockFormat.read_scales else None
