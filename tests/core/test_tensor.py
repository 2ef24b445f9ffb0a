"""QuantizedTensor: immutable in fact, and all that was made of it is its own."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from common import assert_same_bits, gaussian

import billfish as bf

FORMATS = pytest.mark.parametrize("name", ["u4b8", "u4", "q4_0", "q4_k", "nvfp4", "affine4"])


def quantized(name: str, seed: int = 0) -> bf.QuantizedTensor:
    return bf.quantize(gaussian((24, 256), seed), name)


def product(q: bf.QuantizedTensor) -> np.ndarray:
    return bf.quantized_linear(gaussian((3, 256), 9), q)


@FORMATS
def test_replace_gives_a_tensor_with_weights_of_its_own(name):
    q, other = quantized(name), quantized(name, 1)
    product(q)
    changed = dataclasses.replace(q, storage=other.storage)
    assert_same_bits(bf.dequantize(changed), bf.dequantize(other))
    assert_same_bits(product(changed), product(other))


@FORMATS
def test_nobody_can_write_to_the_storage(name):
    q = quantized(name)
    for part, array in q.storage.items():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
        with pytest.raises(TypeError):
            q.storage[part] = array
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.storage = {}


@FORMATS
def test_arrays_that_their_owner_writes_to_later_are_not_the_tensors(name):
    q = quantized(name)
    arrays = {part: np.array(array) for part, array in q.storage.items()}
    held = bf.QuantizedTensor.from_storage(q.format, arrays, q.group_size)
    before = product(held)
    for array in arrays.values():
        array[...] = 0
    assert_same_bits(product(held), before)
    assert_same_bits(bf.dequantize(held), bf.dequantize(q))


def test_a_read_only_view_of_a_writable_array_is_copied_and_a_frozen_array_is_not():
    q = quantized("q4_0")
    mine = np.array(q.storage["blocks"])
    view = mine.view()
    view.setflags(write=False)
    assert not np.shares_memory(bf.QuantizedTensor.from_storage("q4_0", {"blocks": view}).storage["blocks"], mine)
    mine.setflags(write=False)
    assert np.shares_memory(bf.QuantizedTensor.from_storage("q4_0", {"blocks": view}).storage["blocks"], mine)


@FORMATS
@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))])
def test_copies_and_pickles_have_the_weights_and_nothing_that_was_made_of_them(name, make):
    q = quantized(name)
    y = product(q)
    assert q._made
    again = make(q)
    assert not again._made
    assert again.format is q.format
    assert again.group_size == q.group_size
    assert_same_bits(product(again), y)
    assert not any(array.flags.writeable for array in again.storage.values())


def test_formats_pickle_and_copy_by_name():
    for format in bf.FORMATS.values():
        assert pickle.loads(pickle.dumps(format)) is format
        assert copy.deepcopy(format) is format


def test_packed_weights_go_with_their_tensor_at_once():
    q = quantized("q4_0")
    product(q)
    (packed,) = (weakref.ref(made) for made in q._made.values())
    gc.disable()
    try:
        del q
        assert packed() is None
    finally:
        gc.enable()


def test_false_shapes_are_refused():
    q = quantized("q4_0")
    with pytest.raises(bf.ShapeError, match=r"shape.*\(24, 512\).*\(24, 256\)"):
        dataclasses.replace(q, shape=(24, 512))
    with pytest.raises(bf.FormatError, match="group_size"):
        dataclasses.replace(q, group_size=64)
    with pytest.raises(bf.ShapeError, match="permutation"):
        dataclasses.replace(q, permutation=np.zeros(256, np.int32))
    with pytest.raises(bf.ShapeError, match="N > 0"):
        bf.QuantizedTensor.from_storage("q4_0", {"blocks": np.zeros((0, 18), np.uint8)})


# ---- another order of columns ---------------------------------------------------------------------------------------


@pytest.fixture
def reordered() -> tuple[bf.QuantizedTensor, np.ndarray]:
    """A tensor whose columns are stored in another order, and its weights in their own."""
    plain = quantized("u4b8")
    order = np.random.default_rng(3).permutation(256)
    w = np.empty((24, 256), np.float32)
    w[:, order] = bf.dequantize(plain)
    return dataclasses.replace(plain, permutation=order), w


def test_a_permutation_belongs_to_the_tensor(reordered):
    q, w = reordered
    assert_same_bits(bf.dequantize(q), w)
    x = gaussian((5, 256))
    np.testing.assert_allclose(bf.quantized_linear(x, q), x @ w.T, rtol=0, atol=1e-4)
    assert_same_bits(bf.quantized_linear(x, q, backend="reference"), (x.astype(float) @ w.T.astype(float)).astype("f4"))
    for y in bf.quantized_linears(x, [q, quantized("q4_0"), q])[::2]:
        assert_same_bits(y, bf.quantized_linear(x, q))
    assert_same_bits(bf.quantized_linear(x, bf.prepack(q)), bf.quantized_linear(x, q))
    again = pickle.loads(pickle.dumps(q))
    assert_same_bits(bf.dequantize(again), w)
    assert_same_bits(bf.dequantize(q.take_rows([3, 1])), w[[3, 1]])
    assert "act-order" in repr(q)


def test_packed_weights_keep_the_order_in_files_and_pickles(reordered, tmp_path):
    q, _ = reordered
    packed, x = bf.prepack(q), gaussian((2, 256))
    packed.save(tmp_path / "packed")
    for again in (bf.PackedWeights.load(tmp_path / "packed"), pickle.loads(pickle.dumps(packed))):
        assert_same_bits(bf.quantized_linear(x, again), bf.quantized_linear(x, q))


def test_a_permutation_for_torch_and_mlx(reordered):
    import mlx.core as mx

    q, w = reordered
    x = gaussian((2, 256))
    y = bf.quantized_linear(x, q)
    assert_same_bits(bf.quantized_linear(torch.from_numpy(x), q).numpy(), y)
    assert_same_bits(np.array(bf.quantized_linear(mx.array(x), q)), y)
    out = torch.empty(24, 256, dtype=torch.bfloat16)
    assert_same_bits(bf.dequantize(q, out=out).float().numpy(), torch.from_numpy(w).bfloat16().float().numpy())
    with pytest.raises(bf.FormatError, match="act-order"):
        bf.gemm_w4a8(bf.quantize_q8_0(x), q)


# ---- loose arrays ---------------------------------------------------------------------------------------------------


def packs(monkeypatch) -> list[str]:
    """A list that grows whenever the CPU packs weights."""
    done: list[str] = []
    backend = bf.BACKENDS["cpu"]
    pack = backend.pack
    monkeypatch.setattr(backend, "pack", lambda tensor, place="cpu": done.append(place) or pack(tensor, place))
    return done


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_loose_arrays_are_packed_at_each_call_and_a_tensor_once(monkeypatch, kind):
    done = packs(monkeypatch)
    packed, scales = (kind(array) for array in bf.pack_fp4_weights(gaussian((256, 24))))
    x = gaussian((1, 256))
    first = bf.quantized_linear(x, packed, scales, group_size=32)
    for _ in range(3):
        assert_same_bits(bf.quantized_linear(x, packed, scales, group_size=32), first)
    assert len(done) == 4
    storage = {"packed": np.asarray(packed), "scales": np.asarray(scales)}
    tensor = bf.QuantizedTensor.from_storage("fp4", storage, 32)
    for _ in range(3):
        assert_same_bits(bf.quantized_linear(x, tensor), first)
    assert len(done) == 5


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("which", ["packed", "scales"])
def test_loose_arrays_that_were_written_to_are_packed_again(kind, which):
    packed, scales = bf.pack_fp4_weights(gaussian((256, 24)))
    other = bf.pack_fp4_weights(gaussian((256, 24), 1))
    arrays = {"packed": kind(packed), "scales": kind(scales)}
    x = gaussian((1, 256))
    bf.quantized_linear(x, *arrays.values(), group_size=32)
    {"packed": packed, "scales": scales}[which].flat[3] = other[which == "scales"].flat[3]
    expected = bf.quantized_linear(x, packed.copy(), scales.copy(), group_size=32)
    assert_same_bits(bf.quantized_linear(x, *arrays.values(), group_size=32), expected)


# ---- out= -----------------------------------------------------------------------------------------------------------


def test_out_may_be_a_negative_view():
    q, x = quantized("q4_0"), torch.from_numpy(gaussian((3, 256)))
    memory = torch.zeros(3, 24, dtype=torch.complex64)
    out = torch._neg_view(memory.real.contiguous())
    assert out.is_neg()
    assert bf.quantized_linear(x, q, out=out) is out
    assert_same_bits(out.resolve_neg().numpy(), bf.quantized_linear(x, q).numpy())
    weights = torch._neg_view(torch.zeros(24, 256))
    bf.dequantize(q, out=weights)
    assert_same_bits(weights.resolve_neg().numpy(), bf.dequantize(q))


def test_autograd_knows_that_out_was_written_to():
    q = quantized("q4_0")
    out = torch.zeros(3, 24)
    leaf = torch.ones(3, 24, requires_grad=True)
    y = (leaf * out).sum()
    bf.quantized_linear(torch.from_numpy(gaussian((3, 256))), q, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
