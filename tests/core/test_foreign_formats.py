"""Formats that somebody else registers, as docs/add-a-format.md says: every backend decodes them right or says no."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from common import assert_same_bits, gaussian, random_storage
from foreign_formats import FOREIGN

import billfish as bf
from billfish.core.elements import E2M1, U2, U4, Element, Table
from billfish.core.format import FORMATS, GroupValues, Planes
from billfish.core.formats.fp4 import Mxfp4
from billfish.core.formats.ggml import MinimumBlock, ScaledBlock
from billfish.core.formats.kquants import Q3_K, Q4_K
from billfish.core.formats.structure import CODE_LAYOUTS, structure_of
from billfish.core.formats.word_packing import ScaledWordFormat


class ReorderedQ4K(Q4_K):
    """The same fields at other places of the block."""

    name = "reordered_q4_k"
    struct = np.dtype([("qs", "u1", 128), ("scales", "u1", 12), ("dmin", "<f2"), ("d", "<f2")])


class LargerQ4K(Q4_K):
    """Scales that mean twice as much."""

    name = "larger_q4_k"

    def group_values(self, planes: Planes) -> GroupValues:
        scale, _, minimum = super().group_values(planes)
        assert minimum is not None
        return GroupValues(scale * np.float32(2), minimum=minimum * np.float32(2))


class SwappedQ3K(Q3_K):
    """Small integers read in another way."""

    name = "swapped_q3_k"

    def read_scales(self, blocks: Any) -> Planes:
        planes = super().read_scales(blocks)
        return {**planes, "sub_scale": planes["sub_scale"][..., ::-1]}


class B2Minimum(MinimumBlock):
    name = "b2_minimum"
    element = U2
    struct = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 8)])
    code_fields = (("qs", 8, 2),)


class LevelsTimesPowers(Mxfp4):
    """Such levels times E8M0."""

    name = "levels_times_powers"
    element = Table("more_levels", 4, [-127, -100, -80, -60, -40, -20, -10, -5, 5, 10, 20, 40, 60, 80, 100, 127])


class Odd(Element):
    """Values that are no small integers: only the reference has them."""

    round, encode = E2M1().round, E2M1().encode  # not needed to decode


class Thirds(ScaledWordFormat):
    name = "thirds"
    element = Odd("thirds", 4, np.arange(-8, 8) / 3)  # type: ignore[abstract]
    block_size = 8
    layout = "u32 [K/8, N], f16 [K/g, N]"


class Squared(ScaledWordFormat):
    """A way of its own to decode."""

    name = "squared"
    element = U4
    block_size = 8
    layout = "u32 [K/8, N], f16 [K/g, N]"

    def decode(self, planes: Planes, group_size: int) -> Any:
        return super().decode(planes, group_size) ** 2


OWN = [ReorderedQ4K, LargerQ4K, SwappedQ3K, B2Minimum, LevelsTimesPowers, Thirds, Squared]
NOT_MULTIPLIED = {"squared"}  # by the CPU's kernels: the reference does
READ_AS_STORED = {"another_q4_k", "another_q6_k", "reordered_q4_k", "scaled_u4", "halved_e2m1", "fp4_with_zeros"}
READ_AS_STORED |= {"table_with_minimum", "biased_with_minimum", "signed_with_minimum", "levels_times_powers"}


@pytest.fixture(params=[*FOREIGN, *OWN], ids=lambda cls: cls.name)
def foreign(request, monkeypatch):
    format = request.param()
    monkeypatch.setitem(FORMATS, format.name, format)
    return format


def tensor_of(format: bf.Format, n: int, k: int, seed: int = 0) -> bf.QuantizedTensor:
    """Random storage with scales that are ordinary numbers."""
    storage = dict(random_storage(format, n, k, np.random.default_rng(seed)))
    fields = {"scales": storage.get("scales"), "biases": storage.get("biases")}
    if hasattr(format, "struct"):
        blocks = storage["blocks"].view(format.struct)
        fields = {name: blocks[name] for name in ("d", "dmin", "m", "e") if name in format.struct.names}
    for field in fields.values():
        if field is not None and field.dtype == np.uint8:
            field[...] = np.random.default_rng(seed).integers(110, 140, field.shape, np.uint8)
        elif field is not None:
            field[...] = gaussian(field.shape, seed)
    return bf.QuantizedTensor.from_storage(format, storage)


@pytest.mark.parametrize("n", [1, 37])
def test_products_and_values_are_the_references(foreign, n):
    tensor = tensor_of(foreign, n, 5 * max(32, foreign.block_size) + (foreign.block_size % 32))
    k = tensor.shape[1]
    reference = bf.dequantize(tensor, backend="reference")
    assert_same_bits(bf.dequantize(tensor), reference)
    assert (structure_of(foreign) is not None) == (foreign.name in READ_AS_STORED)
    for m in (1, 3, 20):
        x = gaussian((m, k), m)
        exact = x.astype(np.float64) @ reference.T.astype(np.float64)
        size = np.abs(x).astype(np.float64) @ np.abs(reference).T.astype(np.float64)
        for activations, tolerance in (("exact", 1e-6), ("q16", 1e-4), ("q8", 2e-2)):
            y = bf.quantized_linear(x, tensor, activations=activations)
            assert (np.abs(y - exact) <= tolerance * size + 1e-30).all()
    if foreign.name not in NOT_MULTIPLIED:
        bf.quantized_linear(x, tensor, backend="cpu")
    else:
        with pytest.raises(bf.BackendUnavailable, match=r"no kernels for|way of its own"):
            bf.quantized_linear(x, tensor, backend="cpu")


@pytest.mark.full
def test_the_emulated_metal_kernels_say_no_or_are_right(foreign):
    tensor = tensor_of(foreign, 8, 2 * max(128, foreign.block_size))
    x = gaussian((2, tensor.shape[1]))
    try:
        y = bf.quantized_linear(x, tensor, backend="metal-emulator")
    except bf.BackendUnavailable:
        return
    expected = bf.quantized_linear(x, tensor, backend="reference")
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    assert_same_bits(bf.dequantize(tensor, backend="metal-emulator"), bf.dequantize(tensor, backend="reference"))


@pytest.mark.parametrize("base", [ScaledBlock, MinimumBlock])
def test_rounding_follows_the_element(base):
    """Every weight gets the nearest of the element's values under its group's scale, whatever these values are."""

    class Own(base):
        name = "own"
        element = Table("own", 4, [-90, -60, -40, -25, -12, -5, -1, 0, 2, 7, 15, 30, 50, 80, 100, 120])
        struct = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])

    format, w = Own(), gaussian((64, 32))
    planes = format.round_groups(w)
    group = format.group_values(planes)
    minimum = 0 if group.minimum is None else group.minimum
    levels = np.asarray(format.element.values)[None, None] * group.scale[..., None] + np.asarray(minimum)[..., None]
    nearest = np.abs(w[..., None] - levels).min(axis=-1)
    got = np.abs(w - format.decode(planes, 32))
    np.testing.assert_allclose(got, nearest, rtol=0, atol=2e-3 * np.abs(w).max())


def test_storage_spec_tells_all_about_storage(foreign):
    n, k = 6, 2 * max(foreign.default_group_size, foreign.block_size)
    tensor = tensor_of(foreign, n, k)
    specs = foreign.storage_spec(n, k, tensor.group_size)
    assert list(specs) == list(tensor.storage)
    assert {name: spec.shape for name, spec in specs.items()} == {a: b.shape for a, b in tensor.storage.items()}
    assert foreign.bits_per_weight(tensor.group_size) == pytest.approx(8 * tensor.nbytes / (n * k))
    rows = tensor.take_rows([5, 0, 3])
    assert_same_bits(bf.dequantize(rows), bf.dequantize(tensor)[[5, 0, 3]])


def test_layouts_of_codes_are_those_of_the_kernels():
    """The table in Python and the switch in C++ name the same layouts."""
    import re
    from pathlib import Path

    source = Path(bf.__file__).parent / "backends" / "cpu" / "layout" / "file_codes.h"
    if not source.is_file():
        pytest.skip("an installed wheel has no sources")
    text = source.read_text()
    found = {}
    for fields, cases in re.findall(r"case layout_of\(([\d, ]+)\):((?:(?!case).)+)", text, re.DOTALL):
        numbers = [int(number) for number in fields.split(",")]
        key = tuple(zip(numbers[::2], numbers[1::2], strict=True))
        for codes in re.findall(r"return f\(([^)]+)\(\)\)", cases):
            template = re.match(r"FileCodes<(\d+), (\d+), Minimums::(\w+)", codes)
            count, group, minimums = template.groups() if template else ("32", "32", "perhaps")  # RowNibbles, RowBytes
            found[int(count), key] = (int(group), {"never": False, "always": True, "perhaps": None}[minimums])
    assert found == CODE_LAYOUTS
