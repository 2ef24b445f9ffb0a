"""Packing straight from a file's blocks gives the same bytes as packing unpacked planes."""

from __future__ import annotations

import numpy as np
import pytest
from support import gaussian

import billfish as bf
from billfish.backends.cpu import CpuBackend, _as_bytes, _blocks_with_scales, _cpu, layout_of

SHORT_BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "iq4_nl")
LONG_BLOCKS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
BLOCKS = SHORT_BLOCKS + LONG_BLOCKS
SHAPES = [(name, n, k) for name in SHORT_BLOCKS for n, k in [(1, 32), (16, 256), (37, 288), (50, 640)]]
SHAPES += [(name, n, k) for name in LONG_BLOCKS for n, k in [(1, 256), (50, 768)]]


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
    backend = CpuBackend()
    backend.level = level
    assert _blocks_with_scales(q) is not None
    packed, layout = backend.prepack(q), layout_of(q)
    expected = np.empty_like(packed.data)
    fields = [_as_bytes(part) for part in (layout.chunk_fields, layout.group_fields)]
    _cpu.prepack(level, packed.description, np.ascontiguousarray(layout.codes_plane), *fields, expected)
    assert (packed.data == expected).all()


def test_other_formats_go_through_planes():
    for format in bf.FORMATS.values():
        q = bf.quantize(gaussian((3, 2 * format.block_size)), format)
        assert (_blocks_with_scales(q) is not None) == (format.name in BLOCKS)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_a_single_scale_that_is_not_finite_makes_all_of_its_matrix_float32(name, scale):
    plain = bf.quantize(gaussian((50, 256)), name)
    blocks = plain.storage["blocks"].copy()
    blocks.view(plain.format.struct)["d"][-1, -1] = scale
    odd = bf.QuantizedTensor.from_storage(name, {"blocks": blocks})
    backend = CpuBackend()
    first, second, third = backend.prepack_all([plain, odd, plain])
    assert second.axes.scales in ("f32", "f32_minimum")
    assert first.axes == third.axes == backend.prepack(plain).axes
    assert (first.data == third.data).all()
