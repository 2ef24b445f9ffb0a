"""torch on a Mac: layers on the device "mps", which the emulator stands in for."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from common import assert_same_bits, gaussian
from metal_support import assert_within_contract, quantized

import billfish as bf
from billfish.backends import BACKENDS, Problem, emulator
from billfish.backends.emulator.lint import check_text
from billfish.backends.metal import Kernels, lay_out
from billfish.backends.metal.mps import PRELUDE, shader_kernel
from billfish.core.arrays import TorchArrays
from billfish.nn.torch import emulated_mps
from billfish.nn.torch.expert_layers import MarlinExperts
from billfish.nn.torch.linear import MarlinLinear


@pytest.fixture(autouse=True)
def device():
    with emulated_mps.mps():
        yield


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return TorchArrays().to_numpy(tensor.cpu())


def make_layer(format: str = "q4_0", bias: bool = True) -> MarlinLinear:
    added = torch.from_numpy(gaussian((96,), 1)).half() if bias else None
    return MarlinLinear.from_quantized(quantized(format, 96, 256), added)


# ---- products -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "dtype", "rows"),
    [
        ("q4_0", torch.float16, 6),
        ("q4_0", torch.float16, 20),  # in two launches, as there are few tiles
        ("u4", torch.bfloat16, 5),
        ("mxfp4", torch.float32, 1),
        ("fp4", torch.float32, 12),
        ("q4_k", torch.float16, 6),
    ],
)
def test_products_keep_the_contract(format, dtype, rows):
    q, bias = quantized(format, 96, 512), torch.from_numpy(gaussian((96,), 2)).to(dtype)
    x = torch.from_numpy(gaussian((rows, 512), 1)).to(dtype)
    y = bf.quantized_linear(x.to("mps"), q, bias=bias.to("mps"))
    assert (y.device.type, y.dtype, tuple(y.shape)) == ("mps", dtype, (rows, 96))
    assert_within_contract(to_numpy(y), to_numpy(x), q, to_numpy(bias))


def test_the_bits_are_those_of_the_path_for_mlx():
    """One text, one choice of kernels: the two bridges differ in whose arrays they hand over."""
    q, x = quantized("q4_0", 96, 512), gaussian((3, 512), 1).astype(np.float16)
    y = bf.quantized_linear(torch.from_numpy(x).to("mps"), q)
    assert_same_bits(to_numpy(y), Kernels(emulator.metal_kernel).multiply(x, lay_out(q)))


@pytest.mark.parametrize("shape", [(512,), (3, 1, 512), (0, 512), (2, 0, 512)])
def test_shapes(shape):
    x = torch.from_numpy(gaussian(shape, 1)).half().to("mps")
    y = bf.quantized_linear(x, quantized("q4_0", 96, 512))
    assert (y.device.type, tuple(y.shape)) == ("mps", (*shape[:-1], 96))


def test_x_in_any_order_and_at_any_address():
    q, numbers = quantized("q4_0", 96, 512), gaussian((2, 513), 1).astype(np.float16)
    x = torch.from_numpy(numbers).to("mps")
    strided = torch.stack([x, x], -1)[..., 0]
    with emulator.options(check=True), emulator.launches() as log:
        for row in (x[0, :512], x[0, 1:], strided[1, 1:]):  # from 0, 2 and 2054 bytes on, the last with gaps
            assert torch.equal(bf.quantized_linear(row, q), bf.quantized_linear(row.clone(), q))
    assert {launch.name.split("__")[0] for launch in log} == {"custom_kernel_marlin_gemv_q4_0"}


def test_few_numbers():
    """MLX hands fewer than 8 numbers to kernels as constants, and so do we to torch: x and the bias get more."""
    q = quantized("u4", 2, 40, 32)
    x, bias = torch.from_numpy(gaussian((1, 40), 1)), gaussian((2,), 2)
    y = bf.quantized_linear(x.to("mps"), q, bias=bias)  # a NumPy array goes where x is
    assert_within_contract(to_numpy(y), x.numpy(), q, bias)


def test_dequantize():
    q, dtype = quantized("q5_1", 20, 96), torch.bfloat16
    out = bf.dequantize(q, like=torch.empty(0, device="mps"), dtype=dtype)
    assert out.device.type == "mps"
    assert_same_bits(to_numpy(out), bf.dequantize(q, dtype="bfloat16", backend="reference"))


# ---- what it refuses ----------------------------------------------------------------------------------------------


def test_refusals():
    q, x = quantized("q4_0", 96, 256), torch.zeros(2, 256, device="mps")
    with pytest.raises(bf.BackendUnavailable, match="mps: no kernels for the nf4 codes of nf4"):
        bf.quantized_linear(x, bf.quantize(gaussian((96, 256)), "nf4"))
    with pytest.raises(bf.BackendUnavailable, match="mps: supports activations 'exact', not 'q8'"):
        bf.quantized_linear(x, q, activations="q8")
    with pytest.raises(bf.BackendUnavailable, match="mps"):
        bf.quantized_linear(x.cpu(), q, backend="mps")
    with pytest.raises(bf.DTypeError, match=r"quantized_linear.*x.*int32.*float32"):
        bf.quantized_linear(x.int(), q)
    with pytest.raises(TypeError, match="float64"):
        make_layer().to("mps", torch.float64)


def test_a_torch_that_is_too_old(monkeypatch):
    problem = Problem("matmul", bf.FORMATS["q4_0"], 32, 1, 8, 64, np.dtype(np.float16), "torch", "mps")
    assert BACKENDS["mps"].can_run(problem) == (True, "")
    monkeypatch.delattr(torch.mps, "compile_shader")
    assert BACKENDS["mps"].can_run(problem) == (False, "torch is too old: torch.mps.compile_shader needs 2.7")


# ---- the layer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["q4_0", "q4_k"])
def test_there_and_back(format):
    layer, x = make_layer(format), torch.from_numpy(gaussian((2, 3, 256), 2)).half()
    bits = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    before = layer(x)
    with torch.no_grad():
        there = layer.to("mps")(x.to("mps"))
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {"mps"}
    torch.testing.assert_close(there.cpu(), before, rtol=2e-3, atol=2e-3)
    other = MarlinLinear(256, 96, format=format, dtype=torch.float16, device="mps")
    other.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert torch.equal(other(x.to("mps")).cpu(), there.cpu())
    layer.to("cpu")
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), bits[name].reshape(-1).view(torch.uint8))
    assert torch.equal(layer(x), before)


def test_gradients():
    layer = make_layer("u4").to("mps")
    plain = layer.to_linear()
    assert plain.weight.device.type == "mps"
    plain = plain.cpu().double()
    x = torch.from_numpy(gaussian((1, 256), 2)).to("mps").requires_grad_()
    exact = x.detach().cpu().double().requires_grad_()
    y, expected = layer(x), plain(exact)
    tolerance = 1e-5
    assert (y.cpu().double() - expected).abs().max() <= tolerance * expected.abs().max()
    y.sum().backward()
    expected.sum().backward()
    assert x.grad.device.type == layer.bias.grad.device.type == "mps"
    assert (x.grad.cpu().double() - exact.grad).abs().max() <= tolerance * exact.grad.abs().max()
    torch.testing.assert_close(layer.bias.grad.cpu().double(), plain.bias.grad)


def test_other_weights_come_in_by_set_storage():
    layer = make_layer(bias=False).to("mps")
    other = MarlinLinear.from_quantized(quantized("q4_0", 96, 256, seed=5)).to("mps")
    x = torch.from_numpy(gaussian((1, 256), 2)).half().to("mps")
    with torch.no_grad():
        before, wanted = layer(x), other(x)
        assert not torch.equal(before, wanted)
        layer.blocks.copy_(other.blocks)  # of a copy
        assert torch.equal(layer(x), before)
        layer.set_storage(other.storage())
        assert torch.equal(layer(x), wanted)


def test_storage_comes_back():
    layer, x = make_layer().to("mps"), torch.zeros(1, 256, device="mps", dtype=torch.float16)
    with torch.no_grad():
        layer(x)
        assert layer.blocks.device.type == "mps"
        assert_same_bits(layer.quantized().storage["blocks"], quantized("q4_0", 96, 256).storage["blocks"])


def test_copies_and_pickles():
    layer, x = make_layer().to("mps"), torch.from_numpy(gaussian((2, 256), 2)).half().to("mps")
    with torch.no_grad():
        y = layer(x)
        assert torch.equal(copy.deepcopy(layer)(x), y)
        assert torch.equal(pickle.loads(pickle.dumps(layer.to("cpu"))).to("mps")(x), y)


def test_a_model():
    model = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)).to("mps")
    x = torch.from_numpy(gaussian((1, 256), 2)).to("mps")
    dense = model(x)
    bf.quantize_model(model, "q8_0", progress=False)
    assert [type(layer) for layer in model[::2]] == [MarlinLinear] * 2
    with torch.no_grad():
        y = model(x)
    assert y.device.type == "mps"
    torch.testing.assert_close(y.cpu(), dense.cpu(), rtol=0.05, atol=0.02)


def test_calibrate():
    """The sums of a model on the CPU. mps has no float64, and a float32 loses what 500 batches add to one large."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    batches = [torch.full((1, 16), 4096.0), *[torch.full((1, 16), 0.5)] * 500]
    here = bf.calibrate(model, batches, hessian=True, progress=False)
    model.to("mps")
    there = bf.calibrate(model, [batch.to("mps") for batch in batches], hessian=True, progress=False)
    for name in ("0.weight", "2.weight"):
        assert there[name].counts == here[name].counts == 501
        np.testing.assert_allclose(there[name].squares, here[name].squares, rtol=1e-7)
    assert (there["0.weight"].squares == 4096**2 + 500 / 4).all()
    np.testing.assert_allclose(there["2.weight"].outer, here["2.weight"].outer, rtol=1e-3)


def test_experts():
    shapes = ((4, 32, 64), (4, 32, 64), (4, 64, 32))
    stacks = [bf.quantize(gaussian(shape, i) / np.float32(8), "u4b8") for i, shape in enumerate(shapes)]
    layer = MarlinExperts.from_quantized(*stacks)
    for tokens in (3, 20):  # matvec, and tiles
        x, routing = torch.from_numpy(gaussian((tokens, 64), 3)).half(), torch.rand(tokens, 2)
        ids = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])
        results = []
        for place in ("cpu", "mps"):
            layer.to(place)
            leaves = [tensor.to(place).detach().requires_grad_() for tensor in (x, routing)]
            y = layer(leaves[0], ids.to(place), leaves[1])
            y.float().square().sum().backward()
            results.append([y.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
        for here, there in zip(*results, strict=True):
            torch.testing.assert_close(there, here, rtol=2e-2, atol=2e-2 * float(here.abs().max()))


# ---- the shader ---------------------------------------------------------------------------------------------------


def test_the_shader_is_mlx_text_behind_a_prelude(monkeypatch):
    shaders = []
    monkeypatch.setattr(torch.mps, "compile_shader", lambda text: shaders.append(text) or emulator.compile_shader(text))
    q, x = quantized("mxfp4", 96, 512), gaussian((1, 512), 1).astype(np.float16)
    Kernels(shader_kernel).multiply(
        torch.from_numpy(x).to("mps"), BACKENDS["mps"].pack(q, "mps:0"), torch.zeros(96).to("mps")
    )
    texts = []

    def record(**arguments):
        kernel = emulator.metal_kernel(**arguments)

        def launch(**call):
            texts.append(kernel.signature(call["inputs"], call["output_dtypes"], call["template"]).text)
            return kernel(**call)

        return launch

    Kernels(record).multiply(x, lay_out(q), np.zeros(96, np.float32))
    assert shaders == [PRELUDE + text for text in texts]
    assert shaders[0].isascii()
    names = {found.message.split()[0] for found in check_text(*shaders) if found.rule == "mlx-name"}
    assert names == {"float16_t", "bfloat16_t"}  # which the prelude has instead of MLX's
    assert {found.rule for found in check_text(*shaders)} == {"mlx-name"}
