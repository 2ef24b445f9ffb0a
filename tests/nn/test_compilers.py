"""MarlinLinear and what only torch has, or only MLX: compilers, transforms, conversions."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import torch
from cases import first
from common import assert_same_bits, gaussian, random_storage
from nn_frameworks import MLX, TORCH, count_packs
from torch.utils.flop_counter import FlopCounterMode

import billfish as bf
import billfish.nn.mlx.linear
import billfish.nn.torch.linear
from billfish.nn.mlx.decode import decode, round_activations

FORMATS = pytest.mark.parametrize("format", bf.FORMATS.values(), ids=lambda f: f.name)


# ---- torch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "act_order"), [("u4", True), ("nvfp4", False), ("q4_k", False)])
def test_torch_compile_takes_the_whole_graph(format, act_order, monkeypatch):
    torch.compiler.reset()
    order = np.random.default_rng(0).permutation(256) if act_order else None
    bias = torch.nn.Parameter(torch.from_numpy(gaussian((16,))))
    layer = TORCH.ours.MarlinLinear.from_quantized(bf.quantize(gaussian((16, 256)), format), bias, permutation=order)
    model = torch.nn.Sequential(layer, torch.nn.ReLU())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    packs = count_packs(monkeypatch)
    results = []
    for call in (model, compiled):
        x = torch.from_numpy(gaussian((2, 3, 256), 1)).requires_grad_()
        y = call(x)
        y.square().sum().backward()
        results.append((y, x.grad, bias.grad))
        bias.grad = None
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)
    assert compiled(torch.zeros(7, 256)).shape == (7, 16)
    assert not packs  # neither in eager mode nor in the compiled graph: the layer holds packed weights


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_torch_inductor_compiles_it():
    layer = bf.MarlinLinear.from_linear(TORCH.make_linear(16, 64), "q4_0")
    x = torch.from_numpy(gaussian((3, 64)))
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))


def test_torch_operator_is_sound():
    layer = bf.MarlinLinear.from_linear(TORCH.make_linear(16, 64), "u4")
    x = torch.from_numpy(gaussian((3, 64))).requires_grad_()
    tensors, form = layer._weights.tensors, layer._weights.form
    arguments = (x, tensors, layer.bias, layer.format, layer.group_size, 16, "exact", form)
    torch.library.opcheck(torch.ops.billfish.linear.default, arguments)
    torch.library.opcheck(torch.ops.billfish.dequantize.default, (tensors, "u4", 32, 16, 64, form))


def test_torch_vmap():
    layer = bf.MarlinLinear.from_linear(TORCH.make_linear(16, 64), "q4_0")
    x = torch.from_numpy(gaussian((5, 64, 3)))
    y = torch.func.vmap(lambda column: layer(column.T), in_dims=0)(x)
    assert torch.equal(y, layer(x.transpose(1, 2)))
    tensors, form = layer._weights.tensors, layer._weights.form
    with pytest.raises(bf.DTypeError, match="a batch dimension of x alone"):
        torch.func.vmap(lambda bias: torch.ops.billfish.linear(x[0].T, tensors, bias, "q4_0", 32, 16, "exact", form))(
            torch.zeros(2, 16)
        )


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torch_operator_is_there_for_all_who_look(monkeypatch):
    """A call that nobody looks at goes past the operator; those of tools that know operators do not."""
    layer = bf.MarlinLinear.from_linear(TORCH.make_linear(16, 64, bias=False), "q4_0")
    x, operator, seen = torch.from_numpy(gaussian((3, 64))), billfish.nn.torch.linear.LINEAR, []

    def counted(*arguments):
        seen.append(arguments)
        return operator(*arguments)

    monkeypatch.setattr(billfish.nn.torch.linear, "LINEAR", counted)

    def in_profiler():
        with torch.profiler.profile() as profile:
            layer(x)
        assert "billfish::linear" in {event.key for event in profile.key_averages()}

    def in_dispatch_mode():
        with FlopCounterMode(display=False):
            layer(x)

    def in_forward_mode():
        with torch.autograd.forward_ad.dual_level():
            layer(x)

    y = layer(x)
    for grad in (torch.inference_mode, torch.no_grad):
        with grad():
            assert torch.equal(layer(x), y)
    assert not seen
    for look in (
        lambda: layer(x.clone().requires_grad_()),
        lambda: torch.func.vmap(layer)(x),
        lambda: torch.jit.trace(layer, x),
        lambda: layer(x.as_subclass(type("Other", (torch.Tensor,), {}))),
        lambda: layer(x.to("meta")),
        in_profiler,
        in_dispatch_mode,
        in_forward_mode,
    ):
        seen.clear()
        look()
        assert seen
    assert torch.equal(torch.jit.trace(layer, x)(2 * x), 2 * y)


def test_torch_conversions_leave_storage_alone():
    layer = bf.MarlinLinear.from_linear(TORCH.make_linear(16, 64), "u4", zero_point="fractional")
    bits = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    for convert in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.float()):
        convert(layer)
        for name, buffer in layer.named_buffers():
            assert buffer.dtype == bits[name].dtype
            assert torch.equal(buffer, bits[name])
    assert layer.bias.dtype == torch.float32
    assert layer.to("meta").scales.is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16])
def test_torch_autocast_is_followed_as_linear_does(dtype, wanted):
    """y has autocast's type, and is that of x rounded to it; inside enabled=False all is as without."""
    torch.compiler.reset()
    layer = bf.MarlinLinear.from_linear(TORCH.make_linear(16, 64), "nvfp4")
    plain = layer.to_linear()
    x = torch.from_numpy(gaussian((3, 64))).to(dtype)
    for module in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", dtype=wanted):
            ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            y = module(ours)
            assert y.dtype == plain(theirs).dtype == wanted
            with torch.no_grad():
                assert torch.equal(module(x), y)
            with torch.autocast("cpu", enabled=False):
                assert module(x).dtype == dtype
            with pytest.raises(bf.DTypeError, match=r"x.*float64"):
                layer(x.double())
        assert torch.equal(y, layer(x.to(wanted)))
        y.float().sum().backward()
        plain(theirs.to(wanted).float()).sum().backward()
        assert ours.grad.dtype == dtype
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=2**-7, atol=0)
        assert module(x).dtype == dtype


def test_torch_layer_under_inference_mode():
    with torch.inference_mode():
        layer = bf.MarlinLinear.from_linear(TORCH.make_linear(16, 64), "q4_0")
        assert layer(torch.zeros(2, 64)).shape == (2, 16)


# ---- MLX ------------------------------------------------------------------------------------------------------------


@FORMATS
def test_mlx_operations_decode_every_byte_as_dequantize_does(format):
    rng = np.random.default_rng(7)
    for group_size in format.group_sizes:
        k = 3 * np.lcm(format.block_size, group_size)
        tensor = bf.QuantizedTensor.from_storage(format, random_storage(format, 16, k, rng, group_size), group_size)
        arrays = [MLX.arrays.from_numpy(tensor.storage[name]) for name in format.storage_names]
        assert_same_bits(np.array(decode(format, arrays, group_size)), bf.dequantize(tensor))


@pytest.mark.parametrize("group_size", [32, -1])
def test_mlx_operations_decode_partial_and_whole_row_groups(group_size):
    for format in ("u4", "u4b8", "fp4"):
        tensor = bf.quantize(gaussian((8, 72)), format, group_size=group_size)
        arrays = [mx.array(tensor.storage[name]) for name in tensor.format.storage_names]
        assert_same_bits(np.array(decode(tensor.format, arrays, tensor.group_size)), bf.dequantize(tensor))


@pytest.mark.parametrize(
    ("format", "capture"), first(1, [("u4", True), ("q4_k", False), ("nvfp4", False), ("q4_0", True)])
)
def test_mx_compile(format, capture):
    k = 256
    layer = bf.MarlinLinear.from_linear(MLX.make_linear(16, k), format)
    x = mx.array(gaussian((2, 3, k), 1))
    y = layer(x)
    compiled = mx.compile(lambda x: mx.maximum(layer(x), 0), inputs=layer.state if capture else [])
    error = mx.abs(compiled(x) - mx.maximum(y, 0)).max().item()
    assert error <= 4e-6 * mx.abs(y).max().item()
    # Weights that are inputs of the graph may change later.
    if capture:
        layer.update(bf.MarlinLinear.from_linear(mlx.nn.Linear(k, 16), format).parameters())
        y = mx.maximum(layer(x), 0)
        assert mx.abs(compiled(x) - y).max().item() <= 4e-6 * mx.abs(y).max().item()


@pytest.mark.parametrize("activations", ["q8", "q16"])
def test_mx_compile_with_integer_activations(activations):
    layer = bf.MarlinLinear.from_linear(MLX.make_linear(16, 104), "u4b8", activations=activations)
    x = gaussian((4, 104), 2)
    x[1] = 0
    x[2, 40] = np.nan
    x[3, 50] = 1e-40
    compiled, eager = np.array(mx.compile(layer)(mx.array(x))), np.array(layer(mx.array(x)))
    np.testing.assert_allclose(compiled, eager, rtol=1e-5, atol=1e-5)
    rounded = np.array(round_activations(mx.array(x), activations, layer.group_size))
    expected = (
        billfish.core.activations.quantize_activations(x, activations, layer.group_size).values(104).astype(np.float32)
    )
    assert_same_bits(rounded + 0, expected + 0)


def test_mlx_gradients_inside_and_around_compile():
    layer = bf.MarlinLinear.from_linear(MLX.make_linear(16, 64), "q4_0")
    x = mx.array(gaussian((3, 64)))
    expected = mx.grad(lambda x: layer(x).square().sum())(x)
    for gradient in (
        mx.compile(mx.grad(lambda x: layer(x).square().sum())),
        mx.grad(mx.compile(lambda x: layer(x).square().sum())),
    ):
        assert mx.allclose(gradient(x), expected, rtol=1e-5, atol=1e-5)
    rows = mx.vmap(layer)(x)
    assert mx.allclose(rows, layer(x), atol=1e-5)


def test_mlx_compiles_what_metal_computes_lazily(monkeypatch):
    """A backend that only builds MLX's graph is part of what mx.compile traces, and brings its own gradient."""
    metal = bf.BACKENDS["metal"]
    monkeypatch.setattr(metal, "can_run", lambda problem: (problem.kind == "mlx", "it takes MLX arrays"))
    monkeypatch.setattr(metal, "pack", lambda tensor, place: mx.array(bf.dequantize(tensor)))
    monkeypatch.setattr(
        metal, "linears", lambda products, _: [p.x.source @ p.weights.T + p.bias.source for p in products]
    )
    layer = bf.MarlinLinear.from_linear(MLX.make_linear(16, 64), "q4_0")
    monkeypatch.setattr(billfish.nn.mlx.linear, "decode", None)  # not needed
    x, plain = mx.array(gaussian((3, 64))), layer.to_linear()
    assert mx.allclose(mx.compile(layer)(x), plain(x), atol=1e-5)
    for module in (layer, mx.compile(layer)):
        gradient = mx.grad(lambda x: module(x).square().sum())(x)  # noqa: B023
        assert mx.allclose(gradient, mx.grad(lambda x: plain(x).square().sum())(x), atol=1e-4)


def test_mlx_set_dtype_does_not_change_weights():
    layer = bf.MarlinLinear.from_linear(MLX.make_linear(16, 64), "fp4")
    layer.set_dtype(mx.float16)  # scales are float16 already
    with pytest.raises(bf.DTypeError, match=r"scales.*mlx\.core\.bfloat16.*mlx\.core\.float16"):
        layer.set_dtype(mx.bfloat16)


def test_mlx_layers_start_frozen():
    layer = bf.MarlinLinear.from_linear(MLX.make_linear(16, 64), "fp4")
    assert layer.trainable_parameters() == {}
