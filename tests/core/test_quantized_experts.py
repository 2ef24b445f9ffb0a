"""QuantizedExperts: a stack of matrices, and each of them alone."""

from __future__ import annotations

import copy
import pickle

import expert_oracle as oracle
import ml_dtypes
import numpy as np
import pytest
import torch
from common import assert_same_bits

import billfish as bf
from billfish.core.format import FORMATS


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("format", FORMATS)
def test_a_stack_is_its_experts(format, rng):
    w = rng.standard_normal((3, 8, 256)).astype(np.float32)
    q = bf.quantize(w, format, method="rtn")
    assert isinstance(q, bf.QuantizedExperts)
    assert q.shape == (3, 8, 256)
    assert len(q) == 3
    alone = [bf.quantize(matrix, format, method="rtn") for matrix in w]
    for e, matrix in enumerate(alone):
        for name, array in matrix.storage.items():
            assert_same_bits(q[e].storage[name], array)
            assert np.shares_memory(q[e].storage[name], q.storage[name])
    assert_same_bits(bf.dequantize(q), np.stack([bf.dequantize(matrix) for matrix in alone]))
    assert q.nbytes == sum(matrix.nbytes for matrix in alone)
    assert q.bits_per_weight == pytest.approx(alone[0].bits_per_weight)


@pytest.mark.parametrize("format", ["q4_k", "nvfp4", "u4", "mxfp4"])
def test_copies_pickles_and_files_have_the_same_bits(format, rng, tmp_path):
    q = oracle.random_stack(rng, 3, 8, 256, format)
    bf.save(q, tmp_path / "q.safetensors")
    for other in (
        copy.copy(q),
        copy.deepcopy(q),
        pickle.loads(pickle.dumps(q)),
        bf.load(tmp_path / "q.safetensors")["weight"],
    ):
        assert (other.format, other.shape, other.group_size) == (q.format, q.shape, q.group_size)
        for name, array in q.storage.items():
            assert_same_bits(other.storage[name], array)


@pytest.mark.parametrize("format", ["q4_k", "nvfp4", "u4", "mxfp4"])
def test_rows_and_experts_are_taken(format, rng):
    q = oracle.random_stack(rng, 4, 16, 256, format)
    w = bf.dequantize(q)
    rows, ids = np.array([3, 0, 15]), np.array([2, 2, 0])
    assert_same_bits(bf.dequantize(q.take_rows(rows)), w[:, rows])
    assert_same_bits(bf.dequantize(q.take_experts(ids)), w[ids])
    assert_same_bits(bf.dequantize(q.take_experts(slice(1, 3))), w[1:3])


def test_a_repr_says_what_it_is(rng):
    q = oracle.random_stack(rng, 2, 8, 64)
    assert repr(q) == f"QuantizedExperts(q4_0, [2, 8, 64], group_size=32, {q.nbytes} bytes)"


def test_a_stack_is_dequantized_into_an_array(rng):
    q = oracle.random_stack(rng, 2, 8, 64)
    out = torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    assert bf.dequantize(q, out=out) is out
    assert_same_bits(out.view(torch.uint16).numpy().view(ml_dtypes.bfloat16), bf.dequantize(q, "bfloat16"))


def test_stacks_that_do_not_fit_together_are_errors(rng):
    q = oracle.random_stack(rng, 2, 8, 64)
    other = bf.quantize(rng.standard_normal((8, 64)).astype(np.float32), "q8_0")
    with pytest.raises(bf.ShapeError, match=r"tensors\[1\].*q8_0 .*q4_0"):
        bf.QuantizedExperts.from_tensors([q[0], other])
    with pytest.raises(bf.ShapeError, match="tensors"):
        bf.QuantizedExperts.from_tensors([])
    ordered = bf.QuantizedTensor(q.format, (8, 64), 32, q[0].storage, np.arange(64)[::-1])
    with pytest.raises(bf.FormatError, match="act-order"):
        bf.QuantizedExperts.from_tensors([ordered])
    with pytest.raises(bf.ShapeError, match=r"blocks.*\(8, 36\)|2 axes"):
        bf.QuantizedExperts.from_storage("q4_0", {"blocks": q.storage["blocks"][0]})
    u4 = oracle.random_stack(rng, 2, 8, 64, "u4")
    with pytest.raises(bf.ShapeError, match=r"scales.*\(1, .*first array"):
        bf.QuantizedExperts.from_storage("u4", {**u4.storage, "scales": u4.storage["scales"][:1]})
    with pytest.raises(IndexError):
        q[2]
    with pytest.raises(TypeError, match="dequantize"):
        np.asarray(q)
