"""Formats on torch tensors: NumPy's bits by plain rounding, and NumPy's error by search.

The tensors are in CPU memory here, where torch runs the same operations;
backends/cuda/test_quantize.py has them on a GPU.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from cases import diagonal
from common import assert_same_bits, gaussian, options_of
from cuda_fake import FakeDriver
from cuda_support import TAKEN
from device_array_support import PECULIAR, assert_as_good, error_of, fetched, on_device, storable_weights_of, weights_of
from foreign_formats import FOREIGN

import billfish as bf
from billfish.backends import BACKENDS
from billfish.backends.cuda import device_weights
from billfish.backends.cuda.axes import describe_planes
from billfish.backends.cuda.layout import group_parts
from billfish.backends.cuda.memory import address
from billfish.core.arrays import bfloat16
from billfish.core.device_array import DISGUISED, SIGNLESS, UFUNCS, DeviceArray, look_up
from billfish.core.format import Format
from billfish.core.formats.word_packing import ScaledWordFormat
from billfish.ops.quantization import quantize_matrix

ALL = [*bf.FORMATS.values(), *(format() for format in FOREIGN)]
EVERY_FORMAT = pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)
EVERY_PACKED_FORMAT = pytest.mark.parametrize("format", TAKEN.values(), ids=lambda format: format.name)


def sizes_of(format: Format) -> list[int]:
    return [*format.group_sizes, *([-1] if format.whole_row_groups else [])]


@EVERY_FORMAT
def test_plain_rounding_gives_the_bits_of_numpy(format):
    w = weights_of(format)
    for size in sizes_of(format):
        group_size = format.check_group_size("test", size, w.shape[1])
        for options in options_of(format):
            expected = format.quantize(w, group_size, "rtn", **options)
            planes = format.quantize(on_device(w), group_size, "rtn", **options)
            assert planes.keys() == expected.keys()
            for name, plane in fetched(planes).items():
                assert isinstance(planes[name], DeviceArray) == (plane.ndim > 0)
                assert_same_bits(plane, expected[name])


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_weights_of_16_bits(format, dtype):
    w = weights_of(format).astype(dtype)
    expected = format.quantize(w, format.default_group_size, "rtn", **format.check_options("test", {}))
    planes = format.quantize(on_device(w), format.default_group_size, "rtn", **format.check_options("test", {}))
    for name, plane in fetched(planes).items():
        assert_same_bits(plane, expected[name])


@EVERY_FORMAT
def test_search_has_the_error_of_numpy(format):
    w = weights_of(format)
    for size in sizes_of(format):
        group_size = format.check_group_size("test", size, w.shape[1])
        for options in options_of(format):
            expected = error_of(format, format.quantize(w, group_size, "mse", **options), group_size, w)
            planes = fetched(format.quantize(on_device(w), group_size, "mse", **options))
            found = error_of(format, planes, group_size, w)
            held = np.isfinite(expected)
            assert (np.isfinite(found) == held).all()
            assert_as_good(found[held], expected[held], len(w) - PECULIAR)


def test_rows_go_in_slices(monkeypatch):
    w = gaussian((41, 256))
    monkeypatch.setattr("billfish.core.machine.DEVICE_SLICE_ELEMENTS", 7 * 256)
    for name in ("q4_k", "nvfp4", "u4"):
        format = bf.FORMATS[name]
        options = format.check_options("test", {})
        expected = format.quantize(w, format.default_group_size, "rtn", **options)
        for plane, found in fetched(format.quantize(on_device(w), format.default_group_size, "rtn", **options)).items():
            assert_same_bits(found, expected[plane])


# ---- packing --------------------------------------------------------------------------------------------------------


@EVERY_PACKED_FORMAT
def test_bricks_are_described_on_the_device(format):
    w = weights_of(format)
    for size in sizes_of(format):
        group_size = format.check_group_size("test", size, w.shape[1])
        for options in options_of(format):
            planes = format.quantize(on_device(w), group_size, "rtn", **options)
            there = describe_planes(format, planes, group_size)
            here = describe_planes(format, fetched(planes), group_size)
            assert (there.kind, there.shift) == (here.kind, here.shift)
            pairs: list[Any] = [(there.codes, here.codes), (there.row_scale, here.row_scale)]
            pairs += [(there.scales, here.scales)]
            if here.offsets is not None:
                pairs.append((there.offsets, here.offsets))
            if np.isfinite(here.scales).all():  # as bytes, a NaN is not any NaN
                pairs.append((group_parts(there), group_parts(here)))
            for found, expected in pairs:
                assert isinstance(found, DeviceArray)
                assert_same_bits(found.numpy(), expected)


@pytest.fixture
def fake(monkeypatch):
    """A GPU that is not there, and torch tensors that seem to be on it."""
    driver = FakeDriver(monkeypatch)

    def noted(memory: Any) -> int:
        if isinstance(memory, torch.Tensor):
            driver.foreign[memory.data_ptr()] = memory.numpy()
        return address(memory)

    monkeypatch.setattr(device_weights, "address", noted)
    monkeypatch.setattr("billfish.backends.cuda.memory.address", noted)
    yield driver
    driver.forget()


def quantized_there(w: np.ndarray, format: Any, method: str = "rtn", **options: str) -> bf.QuantizedTensor:
    return quantize_matrix("quantize", "w", on_device(w), format, None, method, options)


@EVERY_PACKED_FORMAT
def test_storage_is_that_of_numpy(fake, format):
    w = storable_weights_of(format)
    for options in options_of(format):
        expected = bf.quantize(w, format, method="rtn", **options)
        q = quantized_there(w, format, **options)
        assert fake.launches == ["pack.cu"]
        assert repr(q) == repr(expected)
        assert fake.launches == ["pack.cu"], "sizes are known without the storage"
        for name, array in expected.storage.items():
            assert_same_bits(q.storage[name], array)
            assert not q.storage[name].flags.writeable
        assert fake.launches == ["pack.cu", "unpack.cu"], "and it is made once"
        assert_same_bits(bf.dequantize(pickle.loads(pickle.dumps(q))), bf.dequantize(expected))
        assert fake.launches == ["pack.cu", "unpack.cu"]
        fake.launches.clear()


def test_products_find_what_is_packed(fake):
    q = quantized_there(gaussian((40, 256)), "u4b8")
    assert list(q._made) == [("cuda", "cpu:0")]
    assert q.storage.keys() == {"packed", "scales"}
    assert fake.launches == ["pack.cu"]


def test_saved_and_cut(fake, tmp_path):
    w = gaussian((40, 256))
    q, expected = quantized_there(w, "q4_0"), bf.quantize(w, "q4_0", method="rtn")
    bf.save(q, tmp_path / "w.safetensors")
    assert_same_bits(bf.load(tmp_path / "w.safetensors")["weight"].storage["blocks"], expected.storage["blocks"])
    assert_same_bits(q.take_rows([3, 5]).storage["blocks"], expected.storage["blocks"][[3, 5]])


def test_a_format_that_no_kernel_reads_comes_to_the_cpu(fake, monkeypatch):
    monkeypatch.setattr(BACKENDS["cuda"], "can_run", lambda problem: (False, "for a test"))
    w = gaussian((40, 256))
    q = quantized_there(w, "q5_0")
    assert not fake.launches
    assert_same_bits(q.storage["blocks"], bf.quantize(w, "q5_0", method="rtn").storage["blocks"])


def test_a_scale_that_overflows_is_refused_as_ever(fake):
    w = gaussian((5, 64)) * np.float32(1e7)
    with pytest.raises(bf.DataError, match=r"scale.*overflows float16") as expected:
        bf.quantize(w, "q4_0", method="rtn")
    with pytest.raises(bf.DataError) as found:
        quantized_there(w, "q4_0")
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
def test_numbers_that_are_none_are_refused_as_ever(value, dtype):
    w = gaussian((5, 64)).astype(dtype)
    w[3, 17] = value
    with pytest.raises(bf.DataError) as expected:
        bf.quantize(w, "q4_0")
    assert f"{value} at row 3, k 17" in str(expected.value)
    with pytest.raises(bf.DataError) as found:
        quantized_there(w, "q4_0")
    assert str(found.value) == str(expected.value)


# ---- arrays ---------------------------------------------------------------------------------------------------------

NUMBERS = np.array([0.0, -0.0, 0.5, -1.5, 2.5, 3.0, 1e-40, -7.25, 1e30, 0.1], np.float32)
SAMPLES = {
    "float32": NUMBERS,
    "float64": NUMBERS.astype(np.float64),
    "float16": NUMBERS[:8].astype(np.float16),
    **{name: np.arange(10, dtype=name) * np.dtype(name).type(11) for name in ("uint8", "int8", "int16", "int32")},
    "uint16": np.arange(10, dtype=np.uint16) * np.uint16(6551),
    "uint32": np.arange(10, dtype=np.uint32) * np.uint32(429496729),
}
SHIFTS = (np.left_shift, np.right_shift)


@pytest.mark.parametrize(
    ("ufunc", "name", "beside"),
    diagonal(4, [*UFUNCS, np.ldexp], SAMPLES, ["array", "number", "NumPy's number", "another type"]),
)
def test_each_function_is_that_of_numpy(ufunc, name, beside):
    a = SAMPLES[name]
    small = ufunc in SHIFTS or ufunc is np.ldexp
    b: Any = np.roll(a, 3) if not small else np.arange(len(a), dtype=np.int32 if ufunc is np.ldexp else a.dtype) % 5
    if beside == "number":
        b = 3
    elif beside == "NumPy's number":
        b = a.dtype.type(3) if ufunc is not np.ldexp else np.int32(3)
    elif beside == "another type":
        b = b.astype(np.int32 if small else np.float32)
    inputs = (a, b)[: ufunc.nin]
    try:
        with np.errstate(all="ignore"):
            expected = ufunc(*inputs)
    except TypeError:
        return  # NumPy has none for this type
    given = [on_device(x) if isinstance(x, np.ndarray) and x.ndim else x for x in inputs]
    computed_with = ufunc.resolve_dtypes((*(getattr(x, "dtype", int) for x in inputs), *[None] * ufunc.nout))[0]
    if computed_with in DISGUISED and ufunc not in SIGNLESS and ufunc is not np.right_shift:
        with pytest.raises(bf.FormatError, match=f"numpy.{ufunc.__name__} of {name}"):
            ufunc(*given)
        return
    found = ufunc(*given)
    many = isinstance(expected, tuple)
    for one, other in zip(found if many else (found,), expected if many else (expected,), strict=True):
        if ufunc is np.log2:  # libraries differ by an ulp; formats take it in float64, and round
            np.testing.assert_allclose(one.numpy(), other, rtol=1e-2 if name == "float16" else 1e-6)
        elif ufunc in (np.maximum, np.minimum):  # of which zero, nobody says
            np.testing.assert_array_equal(one.numpy(), other)
        else:
            assert_same_bits(one.numpy(), other)


def test_functions_of_several_arrays():
    a, b = gaussian((3, 4, 5)), gaussian((3, 4), 1)
    there, beside = on_device(a), on_device(b)
    np.testing.assert_allclose(np.einsum("rgk,rg->r", there, beside).numpy(), np.einsum("rgk,rg->r", a, b), rtol=1e-5)
    assert_same_bits(np.where(there > 0, there, 0).numpy(), np.where(a > 0, a, 0))
    assert_same_bits(np.where(there > 0, np.uint8(3), 0).numpy(), np.where(a > 0, np.uint8(3), 0))
    assert_same_bits(np.stack([there, there], axis=1).numpy(), np.stack([a, a], axis=1))
    assert_same_bits(np.concatenate([there, there], axis=2).numpy(), np.concatenate([a, a], axis=2))
    assert_same_bits(np.repeat(beside, 3, axis=1).numpy(), np.repeat(b, 3, axis=1))
    assert_same_bits(np.repeat(beside, 2).numpy(), np.repeat(b, 2))
    assert_same_bits(np.full_like(there, 7, np.uint8, shape=(2, 3)).numpy(), np.full((2, 3), 7, np.uint8))
    assert_same_bits(there.transpose(2, 0, 1).copy().numpy(), a.transpose(2, 0, 1).copy())
    assert_same_bits(np.clip(there, -0.5, 1).numpy(), np.clip(a, np.float32(-0.5), np.float32(1)))
    assert np.array_equal(there, on_device(a))
    assert not np.array_equal(there, on_device(-a))
    codes = np.arange(200, 256, dtype=np.uint8).reshape(7, 8)
    for dtype in (np.uint8, np.int32, np.float32):
        assert_same_bits(on_device(codes).sum(axis=1, dtype=dtype).numpy(), codes.sum(axis=1, dtype=dtype))
    assert there.max() == a.max()
    assert isinstance(there.max(), np.float32)
    index = np.array([[2, 0]])
    assert_same_bits(there[:, np.array([1, 0]), 2:].numpy(), a[:, np.array([1, 0]), 2:])
    assert_same_bits(look_up(np.arange(9, dtype=np.uint8), on_device(index)).numpy(), np.array([[2, 0]], np.uint8))


class Sorting(ScaledWordFormat):
    name, element, block_size = "sorting", bf.get_format("u4b8").element, 8

    def _smallest_scale(self, w: Any) -> Any:
        return np.median(w, axis=1)


class Reading(Sorting):
    name = "reading"

    def _smallest_scale(self, w: Any) -> Any:
        return np.asarray(w).max(axis=1)


def test_what_is_not_there_is_said():
    w = gaussian((4, 64))
    with pytest.raises(bf.FormatError, match=r"numpy\.median.*w\.cpu\(\)"):
        quantized_there(w, Sorting())
    with pytest.raises(bf.DTypeError, match=r"on cpu.*w\.cpu\(\)"):
        quantized_there(w, Reading())
    with pytest.raises(bf.FormatError, match=r"numpy\.add\.accumulate"):
        np.add.accumulate(on_device(w))
    with pytest.raises(bf.FormatError, match=r"numpy\.greater of uint32"):
        _ = on_device(np.arange(3, dtype=np.uint32)) > np.uint32(1)
    assert "float32 [4, 64] on cpu" in repr(on_device(w))
