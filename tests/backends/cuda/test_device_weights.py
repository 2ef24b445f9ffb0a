"""Weights of the CUDA engine without a GPU: which formats it takes, and what becomes of their memory and their bits."""

from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import replace

import numpy as np
import pytest
from common import options_of, random_storage
from cuda_fake import FakeDriver
from cuda_support import TAKEN
from foreign_formats import FOREIGN

import billfish as bf
from billfish.backends import BACKENDS, Problem
from billfish.backends.cuda.axes import Kind, describe, read_kind, why_not
from billfish.backends.cuda.backend import CudaBackend
from billfish.backends.cuda.device_weights import ROWS_AT_ONCE, BrickInfo, DeviceWeights, brick_kernel, read_brick_info
from billfish.backends.cuda.driver import Buffer, Device, current
from billfish.backends.cuda.plans import Gemm, plan
from billfish.backends.cuda.products import can_be_read, row_stride
from billfish.core.arrays import bfloat16
from billfish.core.elements import U4B8, U8, Integer, Table
from billfish.core.format import FORMATS, Format, GroupValues, Planes
from billfish.core.formats.affine import Affine4, ZeroPointFormat
from billfish.core.formats.word_packing import ScaledWordFormat

# ---- formats that nobody here knows ---------------------------------------------------------------------------------


def random_tensor(format: Format, n: int = 37, k: int = 768, size: int | None = None) -> bf.QuantizedTensor:
    storage = random_storage(format, n, k, np.random.default_rng(0), size)
    return bf.QuantizedTensor.from_storage(format, storage, size)


def test_foreign_formats_have_the_kinds_that_they_are_made_for():
    """test_decode.py decodes them with the kernels."""
    for format in FOREIGN:
        assert why_not(format(), format().default_group_size, 768) == ""
    kinds = {format.name: describe(random_tensor(format())).kind for format in FOREIGN}
    assert kinds["another_q4_k"] == describe(random_tensor(FORMATS["q4_k"])).kind
    assert kinds["scaled_u4"].element == kinds["six_bit_blocks"].element == "Int8"
    assert kinds["two_bit_words"].element == kinds["three_bit_blocks"].element == "Int4"
    assert kinds["biased_with_minimum"].element == "Int4"
    assert kinds["doubled"].scale in ("ScaleF16", "ScaleF32")
    assert kinds["long_groups"].groups == 1


class OwnDecode(ScaledWordFormat):
    name, element, block_size = "own_decode", U4B8, 8

    def decode(self, planes: Planes, group_size: int) -> np.ndarray:
        return super().decode(planes, group_size) + np.float32(1)


class ZeroAndMinimum(Affine4):
    name = "zero_and_minimum"

    def group_values(self, planes: Planes) -> GroupValues:
        group = super().group_values(planes)
        return group._replace(zero=np.ones_like(group.scale))


class OddGroups(ScaledWordFormat):
    name, element, block_size, group_sizes = "odd_groups", U4B8, 8, (48,)


class ScaledU8(ScaledWordFormat):
    name, element, block_size = "scaled_u8", U8, 4


class FarFromZero(ZeroPointFormat):
    name, element, block_size = "far_from_zero", Integer("far", 4, bias=-1000), 8


class QuarterWords(ScaledWordFormat):
    name, element, block_size = "quarter_words", Table("quarters", 4, np.arange(16) / 4), 8


class Louder(Integer):
    def decode(self, codes: np.ndarray) -> np.ndarray:
        return super().decode(codes) * 2


class LouderWords(ScaledWordFormat):
    name, element, block_size = "louder_words", Louder("louder", 4, 8), 8


@pytest.mark.parametrize(
    ("format", "reason"),
    [
        (OwnDecode, "a decoder of its own"),
        (ZeroAndMinimum, "a zero point and a minimum"),
        (OddGroups, "group_size is 48; supported are 16, 32, 64, 128, multiples of 128, or all of K"),
        (ScaledU8, "no kernels for the u8 codes of scaled_u8"),
        (FarFromZero, "no kernels for the far codes"),
        (QuarterWords, "no kernels for the quarters codes"),
        (LouderWords, "no kernels for the louder codes"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_other_formats_are_refused_with_a_reason(format, reason):
    q = random_tensor(format())
    problem = Problem("matmul", q.format, q.group_size, 1, *q.shape, np.dtype(np.float16), "torch", "cuda")
    able, said = BACKENDS["cuda"].can_run(problem)
    assert not able
    assert reason in said
    with pytest.raises(bf.FormatError, match=r"^cuda: "):
        describe(q)


def test_groups_of_all_k_are_taken_whatever_their_size():
    q = random_tensor(OddGroups(), k=48)
    assert why_not(q.format, 48, 48) == ""
    assert describe(q).scales.shape == (37, 1)


# ---- memory, by a driver that counts --------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch):
    driver = FakeDriver(monkeypatch)
    gc.disable()  # memory has to be free at once, not when the collector comes
    yield driver
    gc.enable()
    driver.forget()
    assert not driver.live
    assert not driver.stack


def used(q: bf.QuantizedTensor) -> None:
    bf.quantized_linear(np.ones((3, q.shape[1]), np.float16), q, backend="cuda")


def test_memory_is_free_when_the_tensor_is_gone(fake):
    q = bf.quantize(np.ones((40, 256), np.float32), "u4b8")
    used(q)
    assert fake.launches == ["pack.cu", "gemm_small.cu"]
    assert fake.live
    used(q)
    assert fake.launches == ["pack.cu", "gemm_small.cu", "gemm_small.cu"]
    del q
    assert not fake.live


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, replace, lambda q: pickle.loads(pickle.dumps(q))])
def test_copies_of_a_tensor_free_nothing_twice(fake, copied):
    q = bf.quantize(np.ones((40, 256), np.float32), "nvfp4")
    used(q)
    before = len(fake.live)
    other = copied(q)
    assert len(fake.live) == before
    used(other)
    assert len(fake.live) == 2 * before
    del q
    assert len(fake.live) == before
    used(other)
    del other


def test_a_copy_of_memory_is_other_memory(fake):
    first = Buffer(100, 0)
    fake.live[first.pointer][:] = np.arange(100)
    for other in (copy.copy(first), copy.deepcopy(first)):
        assert other.pointer != first.pointer
        assert (fake.live[other.pointer] == np.arange(100)).all()
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(first)
    weights = DeviceWeights.pack(random_tensor(FORMATS["u4b8"]), "cpu")
    assert copy.deepcopy(weights).bricks.pointer != weights.bricks.pointer
    del first, other, weights


def test_dequantize_reads_what_is_packed_and_nothing_else(fake):
    q = bf.quantize(np.ones((40, 256), np.float32), "u4b8")
    packed = BACKENDS["cuda"].pack(q)
    empty = bf.QuantizedTensor(q.format, q.shape, q.group_size, q.storage)
    empty.made(("cuda", "cpu"), lambda: packed)
    object.__setattr__(empty, "storage", {})
    bf.dequantize(empty, "float16", backend="cuda")
    assert fake.launches == ["pack.cu", "dequantize.cu"]


# ---- the way back ---------------------------------------------------------------------------------------------------


def storages() -> list:
    """Every format and group size, foreign ones too, and types of storage that only checkpoints have."""
    return [
        pytest.param(format, size, option, id=f"{format.name}-{size}-{''.join(option.values())}")
        for format in TAKEN.values()
        for size in [*format.group_sizes, *([-1] if format.whole_row_groups else [])]
        for option in options_of(format)
    ]


@pytest.mark.parametrize(("format", "size", "option"), storages())
def test_storage_comes_back_bit_for_bit(fake, format, size, option):
    n, k = 150, 512
    storage = random_storage(format, n, k, np.random.default_rng(0), k if size == -1 else size)
    if option.get("zero_point") == "fractional":
        storage["zeros"] = np.random.default_rng(1).standard_normal(storage["zeros"].shape).astype(np.float16)
    assert_comes_back(bf.QuantizedTensor.from_storage(format, storage, size))


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_scales_of_other_types_come_back(fake, dtype):
    q = bf.quantize(np.random.default_rng(0).standard_normal((40, 256)).astype(np.float32), "affine4")
    storage = {**q.storage, **{name: q.storage[name].astype(dtype) for name in ("scales", "biases")}}
    assert_comes_back(bf.QuantizedTensor.from_storage("affine4", storage, q.group_size))


def assert_comes_back(q: bf.QuantizedTensor) -> None:
    backend = BACKENDS["cuda"]
    packed = backend.pack(q)
    packed = DeviceWeights(read_brick_info(packed.about.spelled()), packed.bricks, packed.row_scale, packed.planes)
    found = backend.unpack(packed, q.format, q.shape, q.group_size)
    assert found.keys() == q.storage.keys()
    for name, array in q.storage.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


def test_the_second_zero_of_ggml_is_kept():
    """test_decode.py sees that it is decoded as the first."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (16, 4))
    for name, scale in (
        ("mxfp4_gguf", np.full((16, 2), 127, np.uint8)),
        ("nvfp4_gguf", np.full((16, 4), 56, np.uint8)),
    ):
        beside = {"global_scale": np.asarray(1, np.float32)} if name == "nvfp4_gguf" else {}
        q = bf.QuantizedTensor.from_planes(name, {"codes": codes, "scale": scale, **beside})
        about = describe(q)
        assert (about.kind.element, about.kind.one_zero) == ("E2M1", True)
        assert (about.codes == codes).all()


def test_bricks_of_a_file_have_no_storage(fake):
    packed = bf.backends.cuda.packed.PackedBricks.of(random_tensor(FORMATS["u4b8"]))
    weights = DeviceWeights.load(packed, "cpu")  # torch would have memory of a real GPU for it
    backend = BACKENDS["cuda"]
    assert isinstance(backend, CudaBackend)
    assert backend.to_tensors(weights) is None
    with pytest.raises(bf.DataError, match="unpack"):
        backend.unpack(weights, FORMATS["u4b8"], weights.shape, 32)


@pytest.mark.parametrize("format", TAKEN.values(), ids=lambda f: f.name)
def test_kinds_are_spelled_and_read(format):
    kind = describe(random_tensor(format)).kind
    assert read_kind(kind.spelled()) == kind


# ---- extents --------------------------------------------------------------------------------------------------------

KIND = Kind("Int4", "ScaleF16", "NONE", 1)
DEVICES = [Device(0, "NVIDIA H200", (9, 0), 132, 232448 - 1024), Device(0, "NVIDIA L4", (8, 9), 58, 101376 - 1024)]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_grids_are_large_enough_for_any_matrix(device):
    n, k = 2**24 + 16, 2**20
    for name in ("pack", "unpack", "dequantize"):
        grid = brick_kernel(name, BrickInfo(KIND, (n, k)), 32).grid
        assert grid == ((2**20 + 1) * 2**13, 1)
    n = 1_048_576 + 16
    assert brick_kernel("pack", BrickInfo(KIND, (n, 8)), 32).grid[0] == 65537
    for m in (1, 8, 16, 64, 1000, ROWS_AT_ONCE):
        for invariant in (False, True):
            found = plan(Gemm(KIND, m, n, 128, batch_invariant=invariant), device)
            assert found is not None or (m > 64 and device.capability != (9, 0))
            assert found is None or (found.launch.grid[0] < 2**31 and found.launch.grid[1] <= 65535)


def test_more_rows_than_a_grid_has_go_in_parts(fake):
    weights = DeviceWeights.pack(bf.quantize(np.ones((16, 64), np.float32), "u4b8"), "cpu")
    fake.launches.clear()
    gemm = Gemm(weights.kind, 2 * ROWS_AT_ONCE + 5, 16, 64, batch_invariant=True)
    with current(0):
        assert weights.multiply(0, gemm, 0, 64, 0, 0)
    assert fake.launches == ["gemm_small.cu"] * 3


@pytest.mark.parametrize(("more", "row_bytes"), [({}, 32), ({"gate": "silu"}, 16), ({"float_y": True}, 64)])
def test_parts_of_y_follow_each_other(fake, more, row_bytes):
    weights = DeviceWeights.pack(bf.quantize(np.ones((16, 64), np.float32), "u4b8"), "cpu")
    gemm = Gemm(weights.kind, ROWS_AT_ONCE + 5, 16, 64, batch_invariant=True, **more)
    with current(0):
        assert weights.multiply(0, gemm, 0, 64, 0, 0)
    assert [y for *_, y in fake.products] == [0, ROWS_AT_ONCE * row_bytes]


@pytest.mark.parametrize(
    ("rows", "stride", "pointer", "fits"),
    [
        (5, 132, 0, False),  # rows that begin between multiples of 16 bytes
        (5, 136, 0, True),
        (5, 136, 8, False),
        (5, 0, 0, False),  # expanded
        (5, 128, 0, False),  # overlapping
        (5, 2**31, 0, False),
        (1, 0, 0, True),  # one row has no stride
        (1, 2**31, 0, True),
    ],
)
def test_rows_that_a_tensor_map_cannot_hold_are_copied(rows, stride, pointer, fits):
    assert can_be_read(rows, stride, 132, pointer) is fits
    assert row_stride(132) == 136
