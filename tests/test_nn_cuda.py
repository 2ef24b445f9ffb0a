"""torch layers on a GPU. Without an NVIDIA GPU these are skipped; test_nn_layers.py has the same on the CPU."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
from support import gaussian

import billfish as bf
from billfish.backends.cuda.driver import device
from billfish.errors import BackendUnavailable

torch = pytest.importorskip("torch")
try:
    GPU = device()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

from billfish.nn.torch import MarlinLinear  # noqa: E402

FORMATS = pytest.mark.parametrize("format", ["fp4", "u4", "nvfp4", "q4_0", "q4_k"])


def make_layer(format: str, act_order: bool = False) -> MarlinLinear:
    order = np.random.default_rng(0).permutation(256) if act_order else None
    tensor = bf.quantize(gaussian((96, 256)), format)
    return MarlinLinear.from_quantized(tensor, torch.from_numpy(gaussian((96,), 1)).half(), permutation=order)


@FORMATS
def test_there_and_back(format):
    layer = make_layer(format)
    bits = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    x = torch.from_numpy(gaussian((2, 3, 256), 2)).half()
    before = layer(x)
    there = layer.to("cuda")(x.cuda())
    assert there.is_cuda
    assert all(tensor.is_cuda for tensor in layer.state_dict().values())
    torch.testing.assert_close(there.cpu(), before, rtol=2e-3, atol=2e-3)
    layer.to("cpu")
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), bits[name].reshape(-1).view(torch.uint8))
    assert torch.equal(layer(x), before)


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_and_gradients(format, dtype):
    layer = make_layer(format, act_order=True).to("cuda")
    plain = layer.to_linear().double()
    assert plain.weight.is_cuda
    x = torch.from_numpy(gaussian((5, 256), 2)).to("cuda", dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, expected = layer(x), plain(exact)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}[dtype]
    assert (y.double() - expected).abs().max() <= tolerance * expected.abs().max()
    y.sum().backward()
    expected.sum().backward()
    assert (x.grad.double() - exact.grad).abs().max() <= tolerance * exact.grad.abs().max()


@FORMATS
def test_the_gpu_has_the_weights_once(format):
    """Bricks in the place of storage, and the storage's bits when a state dict asks for them."""
    tensor = bf.quantize(gaussian((1024, 1024)), format)
    layer = MarlinLinear.from_quantized(tensor, device="cuda")
    x = torch.from_numpy(gaussian((3, 1024), 2)).half().cuda()
    storage = sum(array.nbytes for array in tensor.storage.values())
    gc.collect()
    before = torch.cuda.memory_allocated()
    y = layer(x)
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 0.7 * storage
    state = layer.state_dict()
    for name, array in tensor.storage.items():
        assert (
            state[name].cpu().reshape(-1).view(torch.uint8).numpy().tobytes() == np.ascontiguousarray(array).tobytes()
        )
    del state
    assert torch.equal(layer(x), y)


def test_memory_is_free_when_the_layer_is_gone():
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    layer = MarlinLinear.from_quantized(bf.quantize(gaussian((1024, 1024)), "u4b8"), device="cuda")
    x = torch.from_numpy(gaussian((3, 1024), 2)).half().cuda()
    twin = copy.deepcopy(layer)
    assert torch.equal(layer(x), twin(x))
    third = copy.deepcopy(layer)
    assert torch.equal(layer(x), third(x))
    del layer, twin, third, x
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_compiled_and_captured():
    torch.compiler.reset()
    layer = make_layer("fp4").to("cuda")
    x = torch.from_numpy(gaussian((4, 256), 2)).to("cuda", torch.float16)
    with torch.no_grad():
        eager = layer(x)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), eager)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer(x)
        graph.replay()
        assert torch.equal(captured, eager)
