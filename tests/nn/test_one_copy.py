"""A layer holds its weights once, packed. Storage is made when asked for, and no write to it changes the layer."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
import torch
from common import assert_same_bits, gaussian
from nn_frameworks import MLX, TORCH

import billfish as bf
from billfish.nn.mlx.linear import MarlinLinear as MlxLinear
from billfish.nn.torch.expert_layers import ExpertStack
from billfish.nn.torch.linear import MarlinLinear

FORMATS = pytest.mark.parametrize("format", ["u4", "q4_0", "nvfp4", "q4_k", "fp8", "affine8"])
N, K = 16, 256
X = torch.from_numpy(gaussian((3, K), 9))


def make_layer(format, seed=0, act_order=False):
    order = np.random.default_rng(seed).permutation(K) if act_order else None
    tensor = bf.quantize(gaussian((N, K), seed), format)
    return MarlinLinear.from_quantized(tensor, permutation=order), tensor


WAYS = {
    "state_dict": lambda layer: layer.state_dict(),
    "storage": lambda layer: layer.storage(),
    "attributes": lambda layer: {name: getattr(layer, name) for name in layer.storage_names},
    "deepcopy": lambda layer: copy.deepcopy(layer).state_dict(),
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)).state_dict(),
    "to": lambda layer: layer.to("cpu").half().state_dict(),
    "with_bias": lambda layer: layer.with_bias(None).state_dict(),
    "share_memory": lambda layer: layer.share_memory().state_dict(),
}


@FORMATS
@pytest.mark.parametrize("way", WAYS)
def test_storage_comes_back_bit_for_bit(format, way):
    layer, tensor = make_layer(format)
    y = layer(X)
    given = WAYS[way](layer)
    for name, array in tensor.storage.items():
        assert_same_bits(TORCH.arrays.to_numpy(given[name]).view(array.dtype), array)
        given[name].view(torch.uint8).zero_() if given[name].ndim else given[name].zero_()
    assert torch.equal(layer(X), y)
    for name, array in tensor.storage.items():
        assert_same_bits(layer.quantized().storage[name], array)


@pytest.mark.parametrize("format", ["u4", "nvfp4", "q6_k"])
def test_mlx_arrays_are_copies_too(format):
    tensor = bf.quantize(gaussian((N, K)), format)
    layer, x = MlxLinear.from_quantized(tensor), mx.array(gaussian((3, K), 9))
    y = np.array(layer(x))
    for name, array in layer.parameters().items():
        if array.ndim:
            array[0] = 0
        assert name in layer
    assert_same_bits(np.array(layer(x)), y)
    for name, array in tensor.storage.items():
        assert_same_bits(layer.quantized().storage[name], array)
    other = bf.quantize(gaussian((N, K), 3), format)
    layer.set_storage({name: MLX.arrays.from_numpy(np.array(array)) for name, array in other.storage.items()})
    assert_same_bits(np.array(layer(x)), np.array(MlxLinear.from_quantized(other)(x)))


@pytest.mark.promise("threads", "a layer's weights change only by `set_storage` or `load_state_dict`")
@FORMATS
def test_other_weights_come_in_by_set_storage_and_load_state_dict(format):
    layer, _ = make_layer(format)
    other, _ = make_layer(format, 1)
    third, _ = make_layer(format, 2)
    layer.set_storage(other.storage())
    assert torch.equal(layer(X), other(X))
    layer.load_state_dict(third.state_dict())
    assert torch.equal(layer(X), third(X))
    layer.set_storage(other.quantized().storage)
    assert torch.equal(layer(X), other(X))


def test_set_storage_takes_all_arrays_of_the_layers_shape_or_nothing():
    layer, _ = make_layer("u4")
    y = layer(X)
    larger = MarlinLinear(2 * K, N, format="u4").storage()
    with pytest.raises(bf.FormatError, match=r"storage: .*packed, scales, zeros"):
        layer.set_storage({"packed": larger["packed"]})
    with pytest.raises(bf.ShapeError, match=r"\[16, 512\].*\[16, 256\]"):
        layer.set_storage(larger)
    assert torch.equal(layer(X), y)


def test_a_layer_is_as_large_as_its_packed_weights():
    for format in ("fp4", "u4", "q4_0", "q4_k", "q6_k", "q8_0"):
        tensor = bf.quantize(gaussian((64, 1024)), format, method="rtn")
        layer, packed = MarlinLinear.from_quantized(tensor), bf.prepack(tensor)
        held = sum(buffer.nbytes for buffer in layer.buffers())
        assert held <= 1.05 * packed.nbytes, format
        stack = ExpertStack.from_quantized(bf.quantize(gaussian((3, 64, 1024)), format, method="rtn"))
        assert sum(buffer.nbytes for buffer in stack.buffers()) <= 3 * 1.05 * packed.nbytes, format


MEMORY = """
import gc, numpy as np, torch, billfish as bf, billfish.nn.torch
def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2048, 4096, bias=False, device="meta") for _ in range(12))
model, x = Model(), torch.ones(1, 2048)
warm = bf.MarlinLinear(2048, 256, False, format="q4_0", framework="torch")
warm(x), warm.state_dict()
before, packed = resident(), 0
for i in range(12):
    storage = {"blocks": np.resize(np.arange(251, dtype=np.uint8), (4096, 64 * 18))}
    tensor = bf.QuantizedTensor.from_storage("q4_0", storage)
    model.layers[i] = bf.nn.torch.MarlinLinear.from_quantized(tensor)
    packed += sum(buffer.nbytes for buffer in model.layers[i].buffers())
    del storage, tensor
for layer in model.layers:
    layer(x), layer.state_dict()
print(packed, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_torch_model_is_its_packed_weights_and_five_percent():
    environment = {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, env={**os.environ, **environment}, check=True
    )
    packed, grown = map(int, done.stdout.split())
    assert packed >= 12 * 4096 * 64 * 18
    assert grown <= 1.05 * packed


def test_tied_layers_share_their_weights_wherever_they_go():
    layer, _ = make_layer("u4")
    twin = layer.with_bias(None)
    both = torch.nn.ModuleList([layer, twin])
    for way in (lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: m.to("meta")):
        first, second = way(both)
        assert first.weights_identity == second.weights_identity


@pytest.mark.parametrize("act_order", [False, True])
def test_compiled_graphs_and_gradients(act_order):
    torch.compiler.reset()
    layer, _ = make_layer("u4", act_order=act_order)
    eager = layer(X)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), eager)
    plain = layer.to_linear()
    for module in (layer, compiled):
        gradients = []
        for call in (module, plain):
            x = X.clone().requires_grad_()
            call(x).square().sum().backward()
            gradients.append(x.grad)
        largest = float(gradients[1].abs().max())  # small ones are differences of large numbers
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5 * largest)
    exported = torch.export.export(layer, (X,)).module()
    assert torch.equal(exported(X), eager)
    other, _ = make_layer("u4", 5, act_order=act_order)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(compiled(X), other(X))


def test_threads_that_start_together():
    layer, tensor = make_layer("u4")
    expected = torch.from_numpy(bf.quantized_linear(X.numpy(), tensor))
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(y, expected) for y in pool.map(layer, [X] * 8))


def test_weight_has_a_type_a_device_and_a_shape_and_decodes_on_demand():
    layer = MarlinLinear.from_linear(torch.nn.Linear(K, N, dtype=torch.bfloat16), "q4_0")
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    assert (weight.dtype, weight.device.type, tuple(weight.shape)) == (torch.bfloat16, "cpu", (N, K))
    decoded = torch.from_numpy(bf.dequantize(layer.quantized())).bfloat16()
    assert torch.equal(weight.float(), decoded.float())
    assert layer.half().weight.dtype == torch.float16
    with pytest.raises(bf.DTypeError, match="set_storage"):
        layer.weight.zero_()
    assert "weight" not in layer.state_dict()
    assert dict(layer.named_parameters()).keys() == {"bias"}


def test_an_encoder_layer_in_eval_mode_reads_weights_of_its_linears():
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        plain = model(x)
        bf.quantize_model(model, "q8_0", progress=False)
        assert isinstance(model.linear1, MarlinLinear)
        torch.testing.assert_close(model(x), plain, rtol=0.1, atol=0.05)


def test_a_bias_that_a_wrapper_takes_out_of_the_parameters():
    """As FSDP and replicate do while they run."""
    layer, x = MarlinLinear.from_linear(torch.nn.Linear(K, N), "q4_0"), X
    y = layer(x)
    bias = layer.bias
    del layer._parameters["bias"]
    layer.__dict__["bias"] = bias.detach()
    assert torch.equal(layer(x), y)


def test_a_replica_of_data_parallel_multiplies():
    layer = MarlinLinear.from_linear(torch.nn.Linear(K, N), "q4_0")
    replica = layer._replicate_for_data_parallel()
    for name, parameter in layer._parameters.items():  # as torch.nn.parallel.replicate does
        setattr(replica, name, parameter.detach().clone())
    assert torch.equal(replica(X), layer(X))


def test_a_write_within_a_compiled_function_changes_a_copy():
    layer = MarlinLinear.from_linear(torch.nn.Linear(K, N), "u4b8")
    y = layer(X)

    @torch.compile(backend="eager")
    def write_and_multiply(x):
        layer.scales.data.mul_(3)
        return layer(x)

    assert torch.equal(write_and_multiply(X), y)


def test_other_dicts_and_swapped_tensors_are_no_stale_weights():
    layer, other = (MarlinLinear.from_linear(torch.nn.Linear(K, N), "u4b8") for _ in range(2))
    y, scales = layer(X), layer.scales
    layer._buffers = dict(layer._buffers)
    assert torch.equal(layer(X), y)
    torch.utils.swap_tensors(layer.bias, other.bias)
    layer.set_storage(other.storage())
    torch.testing.assert_close(layer(X), bf_linear(other, X, layer.bias))
    assert not torch.equal(layer.scales, scales)


def bf_linear(layer, x, bias):
    return x @ layer.weight.T + bias
