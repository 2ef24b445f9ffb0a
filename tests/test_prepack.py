"""Packing straight from a file's blocks gives the same bytes as packing unpacked planes."""

from __future__ import annotations

import numpy as np
import pytest
from support import gaussian, random_storage

import billfish as bf
from billfish.backends.cpu import CpuBackend, _as_bytes, _blocks_with_scales, _cpu, layout_of

BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "iq4_nl")


@pytest.mark.parametrize("level", _cpu.levels())
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (16, 256), (37, 288), (50, 640)])
def test_blocks_and_planes_pack_to_the_same_bytes(level, name, n, k):
    q = bf.quantize(gaussian((n, k), n), name)
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
def test_scales_that_are_not_finite_go_through_planes(name):
    format = bf.FORMATS[name]
    storage = random_storage(format, 64, 256, np.random.default_rng(0))
    assert _blocks_with_scales(bf.QuantizedTensor.from_storage(format, storage)) is None
