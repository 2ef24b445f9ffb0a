"""MarlinLinear in torch and in MLX: the same tests for both. What only one of them has: test_compilers.py."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from common import assert_same_bits, gaussian, random_storage
from nn_frameworks import MLX, TORCH

import billfish as bf
import billfish.nn.mlx.linear
import billfish.nn.torch.linear

FORMATS = pytest.mark.parametrize("format", bf.FORMATS.values(), ids=lambda f: f.name)
DTYPES = ["float32", "float16", "bfloat16"]
BOTH = pytest.mark.parametrize("framework", [TORCH, MLX], ids=lambda f: f.name)


@BOTH
@FORMATS
def test_from_linear_holds_what_quantize_makes_and_multiplies_with_it(framework, format):
    k = 2 * max(format.block_size, 32)
    linear = framework.make_linear(24, k)
    layer = bf.MarlinLinear.from_linear(linear, format=format.name)
    assert type(layer) is framework.ours.MarlinLinear
    assert isinstance(layer, bf.MarlinLinear)
    expected = bf.quantize(framework.numpy(linear.weight), format)
    assert layer.quantized().storage.keys() == expected.storage.keys()
    for name, array in expected.storage.items():
        assert_same_bits(layer.quantized().storage[name], array)
    x = gaussian((2, 3, k), 2)
    y = layer(framework.array(x))
    bias = framework.numpy(linear.bias)
    assert_same_bits(framework.numpy(y), bf.quantized_linear(x, expected, bias=bias))


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_types_and_leading_dimensions(framework, dtype, bias):
    linear = framework.make_linear(16, 64, bias, dtype)
    layer = bf.MarlinLinear.from_linear(linear, "u4b8", group_size=32, method="mse")
    for leading in [(), (3,), (2, 0), (2, 3, 4)]:
        x = framework.array(gaussian((*leading, 64)), dtype)
        y = layer(x)
        assert y.dtype == x.dtype
        assert tuple(y.shape) == (*leading, 16)
        expected = bf.quantized_linear(x, layer.quantized(), bias=linear.bias if bias else None)
        assert_same_bits(framework.numpy(y), framework.numpy(expected))


@BOTH
def test_to_linear_has_the_decoded_weights(framework):
    linear = framework.make_linear(16, 64)
    layer = bf.MarlinLinear.from_linear(linear, "q4_0")
    back = layer.to_linear()
    assert type(back) is framework.linear
    assert_same_bits(framework.numpy(back.weight), bf.dequantize(layer.quantized()))
    assert_same_bits(framework.numpy(back.bias), framework.numpy(linear.bias))
    half = layer.to_linear(framework.core.float16)
    assert half.weight.dtype == half.bias.dtype == framework.core.float16
    assert_same_bits(framework.numpy(half.weight), bf.dequantize(layer.quantized(), "float16").astype(np.float32))
    assert getattr(bf.MarlinLinear.from_linear(framework.make_linear(8, 64, False)).to_linear(), "bias", None) is None


@BOTH
@FORMATS
def test_parameters_go_through_safetensors(framework, format, tmp_path):
    k = 2 * max(format.block_size, 32)
    tensor = bf.QuantizedTensor.from_storage(format, random_storage(format, 8, k, np.random.default_rng(0)))
    layer = framework.ours.MarlinLinear.from_quantized(tensor, framework.array(gaussian((8,))))
    parameters = framework.parameters(layer)
    assert set(parameters) == {*format.storage_names, "about", "bias"}
    path = str(tmp_path / "layer.safetensors")
    if framework is TORCH:
        safetensors.torch.save_file(parameters, path)
    else:
        layer.save_weights(path)
    # The other framework's layer reads the same file.
    for other in (TORCH, MLX):
        fresh = other.ours.MarlinLinear(k, 8, format=format.name)
        if other is TORCH:
            fresh.load_state_dict(safetensors.torch.load_file(path))
        else:
            fresh.load_weights(path)
        for name, array in tensor.storage.items():
            assert_same_bits(fresh.quantized().storage[name], array)
        assert_same_bits(other.numpy(fresh.bias), gaussian((8,)))


@BOTH
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("format", ["u4", "nvfp4", "q4_k"])
def test_copies_are_equal_and_independent(framework, clone, format):
    layer = bf.MarlinLinear.from_linear(framework.make_linear(8, 256), format, activations="q8")
    x = framework.array(gaussian((2, 256)))
    y = layer(x)
    twin = clone(layer)
    assert repr(twin) == repr(layer)
    assert_same_bits(framework.numpy(twin(x)), framework.numpy(y))
    assert twin.weights_identity != layer.weights_identity


@BOTH
def test_repr(framework):
    layer = bf.MarlinLinear.from_linear(framework.make_linear(16, 64), "fp4", group_size=16, activations="q16")
    sizes = "in_features=64, out_features=16, bias=True"
    assert repr(layer) == f"MarlinLinear({sizes}, format=fp4, group_size=16, bits=5, activations=q16)"
    layer = framework.ours.MarlinLinear(64, 16, False, format="q4_0", act_order=True)
    sizes = "in_features=64, out_features=16, bias=False"
    assert repr(layer) == f"MarlinLinear({sizes}, format=q4_0, group_size=32, bits=4.5, act_order=True)"


@BOTH
@pytest.mark.parametrize("activations", ["q8", "q16"])
def test_integer_activations(framework, activations):
    layer = bf.MarlinLinear.from_linear(framework.make_linear(16, 96), "q4_0", activations=activations)
    x = gaussian((3, 96), 3)
    expected = bf.quantized_linear(x, layer.quantized(), bias=framework.numpy(layer.bias), activations=activations)
    assert_same_bits(framework.numpy(layer(framework.array(x))), expected)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(framework, dtype):
    layer = bf.MarlinLinear.from_linear(framework.make_linear(16, 64, dtype=dtype), "mxfp4")
    plain = layer.to_linear(getattr(framework.core, dtype))
    x, upstream = (framework.array(gaussian((2, 3, size), size), dtype) for size in (64, 16))

    def loss(module: Any, x: Any) -> Any:
        return (module(x) * upstream).sum()

    gradients = []
    for module in (layer, plain):
        if framework is TORCH:
            x = x.detach().requires_grad_()
            loss(module, x).backward()
            gradients.append([x.grad, module.bias.grad])
        else:
            module.unfreeze(keys="bias")
            _, by_x = mx.value_and_grad(lambda x: loss(module, x))(x)  # noqa: B023
            _, by_module = mlx.nn.value_and_grad(module, loss)(module, x)
            gradients.append([by_x, by_module["bias"]])
    tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.dtype == theirs.dtype == x.dtype
        np.testing.assert_allclose(framework.numpy(ours), framework.numpy(theirs), rtol=tolerance, atol=tolerance)
    exact = framework.numpy(upstream).astype(np.float64) @ bf.dequantize(layer.quantized()).astype(np.float64)
    unit = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    assert np.abs(framework.numpy(gradients[0][0]) - exact).max() <= 2 * unit * np.abs(exact).max()


@BOTH
def test_act_order(framework):
    order = np.random.default_rng(0).permutation(64)
    w = gaussian((16, 64))
    layer = framework.ours.MarlinLinear.from_quantized(bf.quantize(w[:, order], "q8_0"), permutation=order)
    x = gaussian((3, 64), 1)
    assert np.array_equal(layer.quantized().permutation, order)
    plain = framework.numpy(layer.to_linear().weight)
    assert_same_bits(plain, bf.dequantize(layer.quantized()))
    assert np.abs(plain - w).max() < 0.05
    np.testing.assert_allclose(framework.numpy(layer(framework.array(x))), x @ plain.T, atol=1e-4)
    assert "permutation" in framework.parameters(layer)
    fresh = framework.ours.MarlinLinear(64, 16, False, format="q8_0", act_order=True)
    if framework is TORCH:
        fresh.load_state_dict(layer.state_dict())
    else:
        fresh.load_weights(list(framework.parameters(layer).items()))
    assert_same_bits(framework.numpy(fresh(framework.array(x))), framework.numpy(layer(framework.array(x))))


@BOTH
def test_a_tensor_brings_its_own_order(framework):
    order = np.random.default_rng(0).permutation(64)
    stored = bf.quantize(gaussian((16, 64)), "q8_0")
    tensor = bf.QuantizedTensor.from_storage("q8_0", stored.storage, permutation=order)
    layer = framework.ours.MarlinLinear.from_quantized(tensor)
    x = gaussian((3, 64), 1)
    assert_same_bits(framework.numpy(layer(framework.array(x))), bf.quantized_linear(x, tensor))
    assert_same_bits(framework.numpy(layer.to_linear().weight), bf.dequantize(tensor))
    assert_same_bits(bf.dequantize(layer.quantized()), bf.dequantize(tensor))
    with pytest.raises(bf.FormatError, match=r"tensor has its own permutation"):
        framework.ours.MarlinLinear.from_quantized(tensor, permutation=order)


@BOTH
@pytest.mark.parametrize("wrong", [64, -1, 5], ids=["too large", "negative", "twice"])
def test_an_order_that_is_none_is_refused(framework, wrong):
    """When it is loaded. What a layer gives away is a copy."""
    order = np.arange(64, dtype=np.int32)
    layer = framework.ours.MarlinLinear(64, 16, False, format="q4_0", act_order=True)
    x = framework.array(gaussian((3, 64)))
    layer(x)
    order[9] = wrong
    refusal = r"permutation.*int32 .*repeated.*each of 0 to 63"
    if framework is MLX:
        with pytest.raises(bf.ShapeError, match=refusal):
            layer.load_weights([("permutation", mx.array(order))], strict=False)
        layer(x)
        return
    with pytest.raises(RuntimeError, match=refusal):
        layer.load_state_dict({**layer.state_dict(), "permutation": torch.from_numpy(order)})
    y = layer(x)
    layer.permutation.copy_(torch.from_numpy(order))
    assert torch.equal(layer(x), y)


WRONG_STATES = {
    "one array of another shape": lambda state: state.update(scales=state["scales"][:, :-1]),
    "all of another shape": lambda state: state.update(MAKERS["larger"].state_dict()),
    "another type": lambda state: state.update(scales=state["scales"].to(torch.int64)),
    "a type that NumPy does not have": lambda state: state.update(scales=state["scales"].to(torch.float8_e4m3fn)),
    "no array": lambda state: state.update(scales=None),
    "a bias of another shape": lambda state: state.update(bias=state["bias"][:-1]),
}
MAKERS = {"larger": billfish.nn.torch.linear.MarlinLinear(128, 16, format="u4")}


@pytest.mark.parametrize("way", WRONG_STATES)
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_that_is_refused_changes_nothing(way, assign):
    """u4 has scales and zeros, which are of one type."""
    layer, other = (bf.MarlinLinear.from_linear(torch.nn.Linear(64, 16), "u4") for _ in range(2))
    model = torch.nn.Sequential(layer)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    x = torch.from_numpy(gaussian((3, 64)))
    y = layer(x)
    state = dict(other.state_dict())
    WRONG_STATES[way](state)
    with pytest.raises(RuntimeError, match="loading state_dict"):
        model.load_state_dict({f"0.{name}": tensor for name, tensor in state.items()}, assign=assign)
    assert layer.state_dict().keys() == before.keys()
    for name, tensor in layer.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(layer(x), y)


def test_a_part_of_a_state_dict_is_loaded_if_that_is_wanted():
    layer, other = (bf.MarlinLinear.from_linear(torch.nn.Linear(64, 16), "u4") for _ in range(2))
    state = {"scales": other.state_dict()["scales"]}
    layer.load_state_dict(state, strict=False)
    assert torch.equal(layer.scales, other.scales)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_move_that_fails_leaves_the_weights_as_they_were(failing):
    layer = TORCH.ours.MarlinLinear.from_quantized(bf.quantize(gaussian((16, 64)), "u4"), permutation=np.arange(64))
    before, calls = layer.state_dict(), []

    def move(tensor):
        calls.append(tensor)
        if len(calls) == failing:
            raise MemoryError
        return torch.zeros_like(tensor)

    with pytest.raises(MemoryError):
        layer._apply(move)
    after = layer.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert layer.to("meta").device.type == "meta"


@BOTH
def test_scales_of_a_wider_type_survive_the_state_dict(framework):
    storage = dict(bf.quantize(gaussian((8, 64)), "u4").storage)
    storage["scales"] = storage["scales"].astype(np.float32) * np.float32(1.0001)
    layer = framework.ours.MarlinLinear.from_quantized(bf.QuantizedTensor.from_storage("u4", storage))
    x = framework.array(gaussian((2, 64)))
    if framework is TORCH:
        fresh = framework.ours.MarlinLinear(64, 8, False, format="u4")
        fresh.load_state_dict(layer.state_dict())
        assert_same_bits(framework.numpy(fresh(x)), framework.numpy(layer(x)))
    assert_same_bits(layer.quantized().storage["scales"], storage["scales"])


@BOTH
def test_wrong_arguments(framework):
    ours, linear = framework.ours.MarlinLinear, framework.make_linear(16, 64)
    tensor = bf.quantize(gaussian((16, 64)), "q4_0")
    with pytest.raises(bf.FormatError, match=r"activations.*'int8'.*'exact' or 'q8' or 'q16'"):
        ours.from_linear(linear, activations="int8")
    with pytest.raises(bf.FormatError, match=r"group_size.*7"):
        ours.from_linear(linear, group_size=7)
    with pytest.raises(bf.DTypeError, match=r"linear.*\w+.*an? (torch|mlx).nn.Linear"):
        ours.from_linear(tensor)
    with pytest.raises(bf.DTypeError, match=r"tensor.*ndarray.*QuantizedTensor"):
        ours.from_quantized(np.zeros((4, 4)))
    with pytest.raises(bf.ShapeError, match=r"bias.*\(15,\).*\(16,\)"):
        ours.from_quantized(tensor, framework.array(gaussian((15,))))
    with pytest.raises(bf.ShapeError, match=r"permutation.*int64 of shape .*repeated"):
        ours.from_quantized(tensor, permutation=np.zeros(64, np.int64))
    with pytest.raises(bf.ShapeError, match=r"x.*\(3, 63\)"):
        ours.from_quantized(tensor)(framework.array(gaussian((3, 63))))
    with pytest.raises(bf.ShapeError, match=r"K.*60"):
        ours(60, 16, format="q4_0")


def test_other_modules_are_refused():
    with pytest.raises(bf.DTypeError, match=r"module.*list.*torch\.nn\.Module or an mlx\.nn\.Module"):
        bf.MarlinLinear.from_linear([])
