"""Packing straight from storage gives the same bytes as packing unpacked planes."""

from __future__ import annotations

import numpy as np
import pytest
from common import gaussian

import billfish as bf
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.axes import layout_of
from billfish.backends.cpu.backend import CpuBackend
from billfish.backends.cpu.source import as_bytes, codes_of
from billfish.core.formats.structure import structure_of

SHORT_BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "iq4_nl")
LONG_BLOCKS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")
BLOCKS = SHORT_BLOCKS + LONG_BLOCKS
UNREAD = ("fp8", "mxfp8", "nf4")  # the packer takes their codes from the plane
SHAPES = [(name, n, k) for name in SHORT_BLOCKS for n, k in [(1, 32), (16, 256), (37, 288), (50, 640)]]
SHAPES += [(name, n, k) for name in LONG_BLOCKS for n, k in [(1, 256), (50, 768)]]


def test_every_format_is_read_in_one_of_these_ways():
    structures = {name: structure_of(format) for name, format in bf.FORMATS.items()}
    assert {name for name, structure in structures.items() if structure is None} == set(UNREAD)
    assert {name for name, structure in structures.items() if structure and structure.scales_inside} == set(BLOCKS)


@pytest.mark.parametrize("level", _cpu.levels())
@pytest.mark.parametrize(("name", "n", "k"), SHAPES)
def test_blocks_and_planes_pack_to_the_same_bytes(level, name, n, k):
    q = bf.quantize(gaussian((n, k), n), name)
    if name in LONG_BLOCKS:  # every pattern of small integers and of codes, below scales that are numbers
        blocks = np.random.default_rng(k).integers(0, 256, q.storage["blocks"].shape, np.uint8)
        for field in ("d", "dmin"):
            if field in (q.format.struct.names or ()):
                blocks.view(q.format.struct)[field] = 0.5
        q = bf.QuantizedTensor.from_storage(name, {"blocks": blocks})
    check_against_planes(q, level)


@pytest.mark.parametrize("level", _cpu.levels())
@pytest.mark.parametrize("n", [1, 50])
def test_other_codes_and_planes_pack_to_the_same_bytes(level, n):
    """Words, rows of bytes and of nibbles, blocks with bytes for scales; the last chunk and the last block not full."""
    for name in sorted(bf.FORMATS.keys() - {*BLOCKS, *UNREAD}):
        block = bf.FORMATS[name].block_size
        check_against_planes(bf.quantize(gaussian((n, (256 // block + 5) * block), n), name), level)


def check_against_planes(q, level):
    backend = CpuBackend()
    backend.level = level
    packed, layout, k = backend.pack(q), layout_of(q), q.shape[1]
    whole_bytes = {"row_bytes": k, "block": 32, "block_bytes": 32, "code_fields": [(0, 1, 8)]}
    expected = np.empty_like(packed.data)
    fields = [as_bytes(part) for part in (layout.chunk_fields, layout.group_fields)]
    codes = np.ascontiguousarray(q.planes["codes"])
    _cpu.prepack(level, packed.description, codes, False, codes_of(q).about | whole_bytes, *fields, expected)
    assert (packed.data == expected).all()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_a_single_scale_that_is_not_finite_makes_all_of_its_matrix_float32(name, scale):
    plain = bf.quantize(gaussian((50, 256)), name)
    blocks = plain.storage["blocks"].copy()
    blocks.view(plain.format.struct)["d"][-1, -1] = scale
    odd = bf.QuantizedTensor.from_storage(name, {"blocks": blocks})
    backend = CpuBackend()
    first, second, third = backend.pack_all([plain, odd, plain])
    assert second.axes.scales in ("f32", "f32_minimum")
    assert first.axes == third.axes == backend.pack(plain).axes
    assert (first.data == third.data).all()
