"""Torch layers that hold the packed form alone, as with CUDA, whose backend can unpack. Here the CPU pretends to."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from common import assert_same_bits, gaussian

import billfish as bf
from billfish.nn.torch.linear import MarlinLinear

FORMATS = pytest.mark.parametrize("format", ["u4", "q4_0", "nvfp4"])
N, K = 16, 256


@pytest.fixture(autouse=True)
def unpacking(monkeypatch):
    """The CPU's backend with `to_tensors`: its bytes as a tensor, and a number for all the rest."""
    cpu, packed, storage, numbers = bf.BACKENDS["cpu"], {}, {}, itertools.count()
    pack, decode = cpu.pack, cpu.dequantize

    def remember(tensor, place="cpu"):
        number = str(next(numbers))
        packed[number] = pack(tensor, place)
        storage[number] = {name: np.array(array) for name, array in tensor.storage.items()}
        return packed[number]

    def to_tensors(weights):
        (number,) = (number for number, known in packed.items() if known is weights)
        return [torch.from_numpy(weights.data)], number

    def from_tensors(tensors, about):
        return replace(packed[about], data=tensors[0].numpy())

    def unpack(weights, format, shape, group_size):
        (number,) = (number for number, known in packed.items() if np.shares_memory(known.data, weights.data))
        return storage[number]

    def dequantize(tensor, out):
        weights = tensor.made(("cpu", out.place), lambda: remember(tensor))
        (number,) = (number for number, known in packed.items() if np.shares_memory(known.data, weights.data))
        decode(bf.QuantizedTensor(tensor.format, tensor.shape, tensor.group_size, storage[number]), out)

    for name, method in {
        "dequantize": dequantize,
        "pack": remember,
        "to_tensors": to_tensors,
        "from_tensors": from_tensors,
        "unpack": unpack,
    }.items():
        monkeypatch.setattr(cpu, name, method, raising=False)


def make_layer(format, seed=0, act_order=False):
    order = np.random.default_rng(seed).permutation(K) if act_order else None
    tensor = bf.quantize(gaussian((N, K), seed), format)
    return MarlinLinear.from_quantized(tensor, permutation=order), tensor


def is_packed(layer):
    weights = layer._weights
    return weights.packed is not None and all(weights.own(name) is None for name in layer.storage_names)


X = torch.from_numpy(gaussian((3, K), 9))


@FORMATS
def test_a_layer_that_has_computed_holds_the_packed_form_alone(format):
    layer, tensor = make_layer(format)
    expected = torch.from_numpy(bf.quantized_linear(X.numpy(), tensor))
    assert not is_packed(layer)
    assert torch.equal(layer(X), expected)
    assert is_packed(layer)
    assert torch.equal(layer(X), expected)
    assert torch.equal(layer.to_linear().weight.detach(), torch.from_numpy(bf.dequantize(tensor)))
    assert is_packed(layer)


TOUCHES = {
    "state_dict": lambda layer: layer.state_dict(),
    "named_buffers": lambda layer: layer.named_buffers(),
    "attributes": lambda layer: {name: getattr(layer, name) for name in layer.storage_names},
    "deepcopy": lambda layer: copy.deepcopy(layer).state_dict(),
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)).state_dict(),
    "to": lambda layer: layer.to("cpu").half().state_dict(),
    "with_bias": lambda layer: layer.with_bias(None).state_dict(),
}


@FORMATS
@pytest.mark.parametrize("way", TOUCHES)
def test_storage_comes_back_bit_for_bit(format, way):
    layer, tensor = make_layer(format)
    y = layer(X)
    assert is_packed(layer)
    for name, array in tensor.storage.items():
        assert_same_bits(dict(TOUCHES[way](layer))[name].numpy().view(array.dtype), array)
    gc.collect()
    assert torch.equal(layer(X), y)
    assert is_packed(layer) == (way != "with_bias")


@FORMATS
def test_writes_are_seen(format):
    layer, _ = make_layer(format)
    other, tensor = make_layer(format, 1)
    layer(X)
    for name, value in zip(layer.storage_names, other.storage, strict=True):
        getattr(layer, name).data.copy_(value)
    expected = torch.from_numpy(bf.quantized_linear(X.numpy(), tensor))
    assert torch.equal(layer(X), expected)
    assert is_packed(layer)
    first, _ = make_layer(format, 2)
    layer.load_state_dict(first.state_dict())
    assert torch.equal(layer(X), first(X))
    layer.register_buffer(layer.storage_names[0], other.storage[0].clone())
    assert torch.equal(layer(X), layer(X))
    assert not torch.equal(layer(X), first(X))


@FORMATS
def test_storage_that_somebody_holds_stays(format):
    layer, _ = make_layer(format)
    first = layer.storage[0]
    before = layer(X)
    assert not is_packed(layer)
    first.data.zero_()
    assert not torch.equal(layer(X), before)
    del first
    layer(X)
    assert is_packed(layer)


def test_twins_stay_in_storage_form_so_that_one_sees_what_the_other_writes():
    layer, _ = make_layer("u4")
    layer(X)
    twin = layer.with_bias(None)
    y = twin(X)
    assert torch.equal(layer(X), y)
    assert not is_packed(layer)
    assert not is_packed(twin)
    twin.packed.data.zero_()
    assert not torch.equal(layer(X), y)
    assert torch.equal(layer(X), twin(X))


@pytest.mark.parametrize("act_order", [False, True])
def test_compiled_graphs_and_gradients_take_the_packed_form(act_order):
    torch.compiler.reset()
    layer, _ = make_layer("u4", act_order=act_order)
    eager = layer(X)
    assert is_packed(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), eager)
    assert is_packed(layer)
    plain = layer.to_linear()
    for module in (layer, compiled):
        gradients = []
        for call in (module, plain):
            x = X.clone().requires_grad_()
            call(x).square().sum().backward()
            gradients.append(x.grad)
        largest = float(gradients[1].abs().max())  # small ones are differences of large numbers
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5 * largest)
    assert is_packed(layer)
    tensors, form = layer._weights.for_operator()
    assert form.startswith("cpu:")
    if not act_order:
        assert torch.equal(torch.ops.billfish.linear(X, tensors, None, "u4", 32, N, "exact", form), eager)
    exported = torch.export.export(layer, (X,)).module()
    assert torch.equal(exported(X), eager)


def set_order(layer, order):
    layer.permutation = order


WRITES_OF_ORDER = {
    "assigned": set_order,
    "copy_": lambda layer, order: layer.permutation.copy_(order),
    "data.copy_": lambda layer, order: layer.permutation.data.copy_(order),
}


@pytest.mark.parametrize("way", WRITES_OF_ORDER)
def test_another_order_is_checked_and_taken(way):
    layer, tensor = make_layer("u4", act_order=True)
    layer(X)
    assert is_packed(layer)
    WRITES_OF_ORDER[way](layer, torch.zeros(K, dtype=torch.int32))
    for _ in range(2):
        with pytest.raises(bf.ShapeError, match="permutation"):
            layer(X)
    WRITES_OF_ORDER[way](layer, torch.arange(K, dtype=torch.int32))
    expected = torch.from_numpy(bf.quantized_linear(X.numpy(), tensor))
    for _ in range(2):
        assert torch.equal(layer(X), expected)
        assert is_packed(layer)


def test_an_order_that_somebody_holds_may_be_written_to_at_any_time():
    layer, _ = make_layer("u4", act_order=True)
    layer(X)
    order = layer.permutation
    layer(X)
    assert not is_packed(layer)
    order.data.zero_()
    with pytest.raises(bf.ShapeError, match="permutation"):
        layer(X)


def test_x_elsewhere_finds_the_storage():
    layer, tensor = make_layer("q4_0")
    layer(X)
    matrix = layer._weights.matrix_beside(X.to("meta"))
    assert not is_packed(layer)
    assert_same_bits(matrix.storage["blocks"], tensor.storage["blocks"])


def test_threads_that_start_together():
    """One of them finds the storage gone that it was about to look at."""
    layer, tensor = make_layer("u4")
    expected = torch.from_numpy(bf.quantized_linear(X.numpy(), tensor))
    for _ in range(20):
        with ThreadPoolExecutor(4) as pool:
            assert all(torch.equal(y, expected) for y in pool.map(layer, [X] * 8))
        assert layer.state_dict().keys() == {*tensor.storage, "about"}
