"""torch layers on a GPU. Without an NVIDIA GPU these are skipped; test_layers.py has the same on the CPU."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from common import gaussian

import billfish as bf
from billfish.backends.cuda.driver import device
from billfish.core.errors import BackendUnavailable

torch = pytest.importorskip("torch")
try:
    GPU = device()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

from billfish.nn.torch.expert_layers import MarlinExperts  # noqa: E402
from billfish.nn.torch.linear import MarlinLinear  # noqa: E402

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


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Linear(1024, 1024, bias=False) for _ in range(2))

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def allocated() -> int:
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated()


def arrive(way: str, format: str, folder) -> list[MarlinLinear]:
    """Layers on the GPU, from a start with nothing there."""
    if way == "to":
        return [MarlinLinear.from_quantized(bf.quantize(gaussian((1024, 1024)), format)).to("cuda")]
    model = Model().half().to("cuda")
    if way == "quantize_model":
        bf.quantize_model(model, format, method="rtn", progress=False)
    else:
        weights = {f"{name}.weight": bf.quantize(gaussian((1024, 1024)), format) for name in ("up", "down")}
        bf.save(weights, folder / "model.safetensors", progress=False)
        bf.load_into(model, folder / "model.safetensors", progress=False)
    return [model.up, model.down]


@FORMATS
@pytest.mark.parametrize("way", ["to", "quantize_model", "load_into"])
def test_the_gpu_has_the_weights_once_and_the_host_has_none(format, way, tmp_path):
    """Bricks and the scales beside them, before any call and after, and the storage's bits when somebody asks."""
    before = allocated()
    layers = arrive(way, format, tmp_path)
    x = torch.from_numpy(gaussian((3, 1024), 2)).half().cuda()
    with torch.no_grad():
        for _ in range(2):
            packed = sum(tensor.nbytes for layer in layers for tensor in layer._weights.tensors)
            assert packed < 1.5 * sum(layer.storage_bytes for layer in layers)
            assert packed <= allocated() - before - x.nbytes <= 1.02 * packed
            for layer in layers:
                assert not layer._weights.matrix.storage
                layer(x)
        y, tensor = layers[0](x), layers[0].quantized()
        state = {name: value.cpu() for name, value in layers[0].state_dict().items()}
        for name, array in tensor.storage.items():
            assert state[name].reshape(-1).view(torch.uint8).numpy().tobytes() == np.ascontiguousarray(array).tobytes()
        assert torch.equal(layers[0](x), y)


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


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256,), (1, 256), (2, 3, 256), (100, 256)])
def test_few_steps_give_the_bits_of_the_operator(format, dtype, shape):
    layer = make_layer(format).to("cuda").to(dtype)
    x = torch.from_numpy(gaussian(shape, 2)).to("cuda", dtype)
    with torch.no_grad():
        y = layer(x)
        tensors, form = layer._weights.tensors, layer._weights.form
        about = layer.format, layer.group_size, layer.out_features, layer.activations, form
        assert torch.equal(y, torch.ops.billfish.linear(x, tensors, layer.bias, *about))
        wide = torch.cat([x, x], -1)[..., :256]  # rows that are not beside each other
        assert torch.equal(layer(wide), y)
        layer.bias.data += 1
        assert not torch.equal(layer(x), y)


def test_layers_on_other_streams_and_in_threads():
    layer = make_layer("fp4").to("cuda")
    xs = [torch.from_numpy(gaussian((rows, 256), rows)).half().cuda() for rows in (1, 1, 2, 4, 4, 8)]
    with torch.no_grad():
        expected = [layer(x) for x in xs]
    torch.cuda.synchronize()

    def work(x):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            ys = [layer(x) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
            return ys

    with ThreadPoolExecutor(3) as pool:
        for ys, y in zip(pool.map(work, xs), expected, strict=True):
            assert all(torch.equal(found, y) for found in ys)


def test_other_weights_come_in_by_set_storage():
    layer, other = make_layer("fp4").to("cuda"), make_layer("fp4").to("cuda")
    x = torch.from_numpy(gaussian((4, 256), 2)).half().cuda()
    with torch.no_grad():
        other.load_state_dict(
            {name: value.flip(0) if name == "scales" else value for name, value in other.state_dict().items()}
        )
        before, wanted = layer(x), other(x)
        assert not torch.equal(before, wanted)
        for name in layer.storage_names:
            getattr(layer, name).copy_(getattr(other, name))  # of copies
        assert torch.equal(layer(x), before)
        layer.set_storage(other.storage())
        assert torch.equal(layer(x), wanted)


def test_a_model_with_experts_is_decoded_where_it_is(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = transformers.GptOssConfig(**sizes, num_attention_heads=4, num_local_experts=4, head_dim=16)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    from billfish.nn.transformers import BillfishConfig

    settings = {"quantization_config": BillfishConfig("q8_0"), "device_map": "cuda"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **settings).dequantize()
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}


@pytest.mark.parametrize("format", ["u4b8", "mxfp4"])
def test_experts_there_and_back(format):
    """Values, gradients for x and the routing weights, and the bits of storage."""
    shapes = ((6, 128, 256), (6, 128, 256), (6, 256, 128))
    stacks = [bf.quantize(gaussian(shape, i) / np.float32(8), format) for i, shape in enumerate(shapes)]
    layer = MarlinExperts.from_quantized(*stacks)
    bits = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    x, weights = torch.from_numpy(gaussian((20, 256), 3)).half(), torch.rand(20, 2)
    ids = torch.stack([torch.randperm(6)[:2] for _ in range(20)])
    results = []
    for place in ("cpu", "cuda"):
        layer.to(place)
        leaves = [tensor.to(place).detach().requires_grad_() for tensor in (x, weights)]
        y = layer(leaves[0], ids.to(place), leaves[1])
        y.float().square().sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(layer(leaves[0], ids.to(place), leaves[1]), y)
        results.append([y.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there, here, rtol=2e-2, atol=2e-2 * float(here.abs().max()))
    layer.to("cpu")
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, bits[name])
