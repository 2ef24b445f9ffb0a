"""From one format to another without loss: whatever `recast` agrees to decodes to the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from common import assert_same_bits, gaussian, options_of

import billfish as bf
from billfish.checkpoints.write.recast import Misfit, recast

PAIRS = [(a, b) for a in bf.FORMATS for b in bf.FORMATS]
# What must work on ordinary weights, so that the test below cannot pass by refusing.
EXPECTED = {
    ("q4_0", "u4b8"),
    ("q4_0", "u4"),
    ("q4_0", "affine4"),
    ("q4_1", "affine4"),
    ("q4_k", "affine4"),
    ("q5_k", "affine8"),
    ("q5_0", "u8"),
    ("q5_0", "affine8"),
    ("q8_0", "u8b128"),
    ("q8_0", "u8"),
    ("q8_0", "affine8"),
    ("u4b8", "q4_0"),
    ("u4b8", "u4"),
    ("u4b8", "affine4"),
    ("u8b128", "q8_0"),
    ("u8b128", "affine8"),
    ("u4", "affine4"),
    ("u4", "u8"),
    ("u8", "affine8"),
    ("affine4", "q4_1"),
    ("affine4", "affine8"),
    ("mxfp4", "mxfp4_gguf"),
    ("mxfp4_gguf", "mxfp4"),
    ("nvfp4", "nvfp4_gguf"),
    ("nvfp4_gguf", "nvfp4"),
}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(*pair, marks=() if i % 3 == 0 or pair in EXPECTED else pytest.mark.full)
        for i, pair in enumerate(PAIRS)
    ],
)
def test_what_fits_decodes_to_the_same(source, target):
    fitted = 0
    for group in bf.FORMATS[source].group_sizes:
        for options in options_of(bf.FORMATS[source]):
            q = bf.quantize(gaussian((16, 512)), source, group_size=group, **options)
            try:
                plan = recast(q, bf.FORMATS[target])
            except Misfit:
                continue
            again = plan.apply(q)
            fitted += 1
            assert again.format.name == target
            assert again.group_size == plan.group_size
            # ggml has one zero only.
            assert_same_bits(bf.dequantize(again) + np.float32(0), bf.dequantize(q) + np.float32(0))
    assert fitted or (source, target) not in EXPECTED


def test_whole_rows():
    q = bf.quantize(gaussian((16, 192)), "u4b8", group_size=-1)
    for target, group in (("q4_0", 32), ("affine4", 64)):
        plan = recast(q, bf.FORMATS[target])
        assert plan.group_size == group
        assert_same_bits(bf.dequantize(plan.apply(q)), bf.dequantize(q))


@pytest.mark.parametrize(
    ("target", "change", "reason"),
    [
        ("mxfp4_gguf", {"scale": np.uint8(255)}, "scale bytes"),
        ("mxfp4_gguf", {"scale": np.uint8(3)}, None),
        ("nvfp4_gguf", {"scale": np.uint8(0x80)}, "scale bytes"),
        ("q4_0", {"scale": np.float32(1e-9)}, "exact in float16"),
        ("affine4", {"scale": np.float32(1 / 3)}, "exact in float32"),
        ("u4b8", {"zero": np.uint8(3)}, "has no zero point"),
        ("q4_1", {"minimum": np.float32(1e-9)}, "exact in float16"),
    ],
)
def test_values_that_do_not_fit(target, change, reason):
    sources = {"mxfp4_gguf": "mxfp4", "nvfp4_gguf": "nvfp4", "u4b8": "u4", "q4_1": "affine4"}
    q = bf.quantize(gaussian((4, 64)), sources.get(target, "u4b8"))
    planes = q.planes
    for name, value in change.items():
        planes[name] = planes[name].astype(value.dtype)
        planes[name][1, 0] = value
        if name == "minimum":
            planes["scale"] = planes["scale"].astype(value.dtype)
    q = bf.QuantizedTensor.from_planes(q.format, planes, q.group_size)
    if reason is None:
        assert_same_bits(bf.dequantize(recast(q, bf.FORMATS[target]).apply(q)) + 0, bf.dequantize(q) + 0)
        return
    with pytest.raises(Misfit, match=reason):
        recast(q, bf.FORMATS[target])


@pytest.mark.parametrize("source", ["u4b8", "u8b128", "q4_0", "q5_0", "q8_0", "u4", "u8"])
def test_a_symmetric_format_comes_back_from_an_affine_one(source):
    """A bias that is a whole number of scales is a zero point, and if it is the same everywhere, a fixed offset."""
    q = bf.quantize(gaussian((16, 512)), source)
    wide = recast(q, bf.FORMATS["affine8"]).apply(q)
    back = {"q5_0": "u8", "q4_0": "u8", "u4b8": "u8", "u4": "u8"}.get(source, source)
    again = recast(wide, bf.FORMATS[back]).apply(wide)
    assert_same_bits(bf.dequantize(again), bf.dequantize(q))


def test_zero_points_that_are_all_the_same_are_a_fixed_offset():
    planes = bf.quantize(gaussian((16, 512)), "u4").planes
    planes["zero"][:] = 8
    q = bf.QuantizedTensor.from_planes("u4", planes, 32)
    assert_same_bits(bf.dequantize(recast(q, bf.FORMATS["u4b8"]).apply(q)), bf.dequantize(q))
