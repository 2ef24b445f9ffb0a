"""The verbs: products against float64, every kind of array, odd shapes."""

from __future__ import annotations

import inspect
import pkgutil
from functools import partial

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch
from common import assert_same_bits, facts, gaussian, options_of

import billfish as bf
from billfish.core.arrays import Input, round_once

FORMATS = pytest.mark.parametrize("format", bf.FORMATS.values(), ids=lambda f: f.name)
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f32", "f16", "bf16"])


def exact(x: np.ndarray, q: bf.QuantizedTensor, bias: np.ndarray | None = None) -> np.ndarray:
    y = x.astype(np.float64) @ bf.dequantize(q).astype(np.float64).T
    return y if bias is None else y + bias.astype(np.float64)


@FORMATS
@DTYPES
@pytest.mark.parametrize(("m", "n"), [(0, 7), (1, 1), (2, 96), (17, 5)])
def test_quantized_linear_is_the_exact_product_rounded_once(format, dtype, m, n):
    k = 2 * format.block_size
    for options in options_of(format):
        q = bf.quantize(gaussian((n, k)), format, **options)
        x, bias = gaussian((m, k), 1).astype(dtype), gaussian((n,), 2).astype(dtype)
        y = bf.quantized_linear(x, q, bias=bias, backend="reference")
        assert_same_bits(y, round_once(exact(x, q, bias), np.dtype(dtype)))
        assert_same_bits(bf.quantized_linear(x, q, backend="reference"), round_once(exact(x, q), np.dtype(dtype)))


def test_bfloat16_results_are_rounded_once():
    """1 + 2^-8 + 2^-30 is above the tie between 1 and 1.0078125; by way of float32 it would fall on the tie."""
    blocks = np.zeros((1, 34), np.uint8)
    blocks[0, :2] = np.array([1], np.float16).view(np.uint8)
    blocks[0, 2:5] = 1
    q = bf.QuantizedTensor.from_storage("q8_0", {"blocks": blocks})
    x = np.zeros((2, 32), ml_dtypes.bfloat16)
    x[0, :3] = [1, 2.0**-8, 2.0**-30]
    x[1, :3] = [1, 2.0**-8, -(2.0**-30)]
    y = bf.quantized_linear(x, q, backend="reference")
    assert y[:, 0].astype(float).tolist() == [1.0078125, 1.0]


@FORMATS
def test_identity_activations_give_the_weights(format):
    """Every code times the identity: a device that flushes the raw FP4 subnormal would lose ±0.5 here."""
    k = format.block_size * max(1, 32 // format.block_size)
    q = bf.quantize(gaussian((64, k)), format)
    assert_same_bits(bf.quantized_linear(np.eye(k, dtype=np.float32), q).T + 0, bf.dequantize(q) + 0)


def test_leading_axes_strides_and_broadcasts():
    linear = partial(bf.quantized_linear, backend="reference")
    q = bf.quantize(gaussian((9, 64)), "q4_0")
    x = gaussian((2, 3, 4, 64))
    y = linear(x, q)
    assert y.shape == (2, 3, 4, 9)
    assert_same_bits(y.reshape(-1, 9), linear(x.reshape(-1, 64), q))
    assert_same_bits(linear(x[0, 0, 0], q), y[0, 0, 0])
    strided = gaussian((8, 128))[::2, ::2]
    assert_same_bits(linear(strided, q), linear(strided.copy(), q))
    assert_same_bits(linear(strided.T.copy().T, q), linear(strided.copy(), q))
    broadcast = np.broadcast_to(x[0, 0, 0], (5, 64))
    assert_same_bits(linear(broadcast, q), np.broadcast_to(y[0, 0, 0], (5, 9)))
    assert linear(np.zeros((3, 0, 64), np.float32), q).shape == (3, 0, 9)


@pytest.mark.parametrize(
    ("name", "pack"), [("fp4", bf.pack_fp4_weights), ("u4b8", bf.pack_s4_weights), ("u4", bf.pack_u4_weights)]
)
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_packed_arrays_are_the_same_weights(name, pack, group_size):
    w_kn, x = gaussian((192, 40)), gaussian((3, 192))
    packed, scales, *zeros = pack(w_kn, group_size)
    groups = 1 if group_size == -1 else -(-192 // group_size)
    assert (packed.dtype, packed.shape) == (np.uint32, (24, 40))
    assert (scales.dtype, scales.shape) == (np.float16, (groups, 40))
    y = bf.quantized_linear(x, packed, scales, zeros=zeros[0] if zeros else None, group_size=group_size, format=name)
    assert_same_bits(y, bf.quantized_linear(x, bf.quantize(w_kn.T, name, group_size=group_size)))
    unpack = getattr(bf, pack.__name__.replace("pack", "unpack"))
    assert_same_bits(
        unpack(packed, scales, *zeros, group_size), bf.dequantize(bf.quantize(w_kn.T, name, group_size=group_size)).T
    )


def test_pack_of_unpack_is_the_identity_on_representable_weights():
    w = bf.unpack_fp4_weights(*bf.pack_fp4_weights(gaussian((256, 16))))
    assert_same_bits(bf.unpack_fp4_weights(*bf.pack_fp4_weights(w)), w)


def test_the_call_of_the_readme_defaults_to_fp4_in_groups_of_32():
    packed, scales = bf.pack_fp4_weights(gaussian((64, 8)))
    x = gaussian((2, 64))
    assert_same_bits(
        bf.quantized_linear(x, packed, scales), bf.quantized_linear(x, packed, scales, group_size=32, format="fp4")
    )


@pytest.mark.parametrize("zero_point", ["integer", "fractional"])
def test_u4_has_both_kinds_of_zero_points(zero_point):
    w = gaussian((64, 16)) + np.float32(0.7)
    packed, scales, zeros = bf.pack_u4_weights(w, zero_point=zero_point)
    assert zeros.dtype == (np.uint8 if zero_point == "integer" else np.float16)
    restored = bf.unpack_u4_weights(packed, scales, zeros)
    # The least squared error may cost the ends of a range a little more than half a step.
    assert np.abs(w - restored).max() <= np.abs(scales.astype(np.float32)).max() * 0.75


# ---- other libraries' arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_torch_in_torch_out(dtype):
    w, x, b = (torch.from_numpy(gaussian(shape, i)).to(dtype) for i, shape in enumerate([(24, 64), (2, 3, 64), (24,)]))
    q = bf.quantize(torch.nn.Parameter(w), "q4_0")
    y = bf.quantized_linear(x.requires_grad_(), q, bias=b, backend="reference")
    assert y.dtype == dtype
    expected = (x.double() @ torch.from_numpy(bf.dequantize(q)).double().T + b.double()).to(dtype)
    assert torch.equal(y, expected)
    out = torch.empty(24, 64, dtype=dtype)
    assert bf.dequantize(q, out=out) is out
    assert torch.equal(out, torch.from_numpy(bf.dequantize(q)).to(dtype))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("activations", ["exact", "q8"])
def test_a_product_into_out_is_the_product(backend, dtype, activations):
    q = bf.quantize(gaussian((24, 64)), "q4_0")
    x, bias = (gaussian(shape, 1).astype(dtype) for shape in [(2, 3, 64), (24,)])
    how = {"bias": bias, "activations": activations, "backend": backend}
    y = bf.quantized_linear(x, q, **how)
    wide = np.zeros((2, 3, 48), dtype)
    for out in (np.empty_like(y), wide[..., ::2], np.empty_like(y).transpose(1, 0, 2).copy().transpose(1, 0, 2)):
        assert bf.quantized_linear(x, q, out=out, **how) is out
        assert_same_bits(out, y)
    assert not wide[..., 1::2].any()
    tensor = torch.empty(y.shape, dtype=getattr(torch, dtype))
    assert bf.quantized_linear(torch.from_numpy(x), q, out=tensor, **how) is tensor
    assert_same_bits(tensor.numpy(), y)
    assert bf.quantized_linear(x[:0], q, out=np.empty((0, 3, 24), dtype), **how).shape == (0, 3, 24)
    from_mlx = np.empty_like(y)
    assert_same_bits(bf.quantized_linear(mx.array(x), q, out=from_mlx, **how), y)


@pytest.mark.parametrize("rows", [1, 4, 20])
@pytest.mark.parametrize("activations", ["exact", "q8", "q16"])
def test_out_may_be_x_or_the_bias(rows, activations):
    q = bf.quantize(gaussian((64, 64)), "q4_0")
    x, bias = gaussian((rows, 64), 1), gaussian((64,), 2)
    y = bf.quantized_linear(x, q, bias=bias, activations=activations)
    assert_same_bits(bf.quantized_linear(x, q, bias=bias, activations=activations, out=x), y)
    x = gaussian((1, 64), 1)
    y = bf.quantized_linear(x, q, bias=bias, activations=activations)
    assert_same_bits(bf.quantized_linear(x, q, bias=bias, activations=activations, out=bias[None])[0], y[0])


def test_out_that_cannot_be_written_is_an_error():
    q, x = bf.quantize(gaussian((24, 64)), "q4_0"), gaussian((3, 64))
    frozen = np.empty((3, 24), np.float32)
    frozen.flags.writeable = False
    for error, out, words in [
        (bf.ShapeError, np.empty((3, 64), np.float32), "(3, 24)"),
        (bf.DTypeError, np.empty((3, 24), np.float16), "float32 in CPU memory"),
        (bf.DTypeError, np.empty((3, 24), np.int32), "float32"),
        (bf.DTypeError, frozen, "a writable one"),
        (bf.DTypeError, np.broadcast_to(np.float32(0), (3, 24)), "a writable one"),
        (bf.DTypeError, mx.zeros((3, 24)), "an array of NumPy, torch or CuPy"),
        (bf.DTypeError, [0.0], "a NumPy array"),
    ]:
        with pytest.raises(error, match=facts(words)):
            bf.quantized_linear(x, q, out=out)


SEVERAL = ("q4_0", "q4_0", "q4_k", "nvfp4", "u4b8", "q8_0")  # kinds that the CPU prepares x for alike, and differently


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("activations", ["exact", "q8", "q16"])
@pytest.mark.parametrize("shape", [(1, 256), (2, 2, 256), (20, 256), (0, 256), (256,)], ids=str)
def test_several_products_in_one_call_are_the_products(backend, activations, shape):
    weights = [bf.quantize(gaussian((8 + 20 * i, 256), i), name) for i, name in enumerate(SEVERAL)]
    biases = [None if i == 2 else gaussian((8 + 20 * i,), 10 + i) for i in range(len(weights))]
    x, infinite = gaussian(shape, 20), gaussian(shape, 20)
    infinite[..., 3] = np.inf
    how = {"activations": activations, "backend": backend}
    for one in [x, x.astype(np.float16), torch.from_numpy(x).bfloat16(), mx.array(x), infinite]:
        expected = [bf.quantized_linear(one, w, bias=b, **how) for w, b in zip(weights, biases, strict=True)]
        together = bf.quantized_linears(one, weights, biases=biases, **how)
        apart = bf.quantized_linears([one + 0 for _ in weights], weights, biases=biases, **how)
        for y, first, second in zip(expected, together, apart, strict=True):
            assert type(first) is type(y)
            assert first.dtype == y.dtype
            for other in (first, second):
                assert_same_bits(*(Input("test", "y", array).numpy() for array in (other, y)))
    assert bf.quantized_linears(x, [], **how) == []


def test_several_products_take_weights_that_are_packed_or_not_and_x_of_many_shapes():
    weights = [bf.quantize(gaussian((40, k), k), "q4_0") for k in (64, 64, 96)]
    xs = [gaussian((1, 64)), gaussian((2, 5, 64), 1), gaussian((3, 96), 2)]
    packed = [bf.prepack(weights[0]), weights[1], bf.prepack(weights[2])]
    for y, x, w in zip(bf.quantized_linears(xs, packed, activations="q8"), xs, weights, strict=True):
        assert_same_bits(y, bf.quantized_linear(x, w, activations="q8"))


def test_several_products_that_do_not_fit_are_an_error():
    q, x = bf.quantize(gaussian((24, 64)), "q4_0"), gaussian((3, 64))
    for error, arguments, words in [
        (bf.DTypeError, {"x": x, "weights": q}, "quantized_linears|weights|QuantizedTensor|list"),
        (bf.DTypeError, {"x": x, "weights": [q, x]}, "weights[1]|ndarray"),
        (bf.DTypeError, {"x": [x, "x"], "weights": [q, q]}, "x[1]"),
        (bf.DTypeError, {"x": x, "weights": [q], "biases": x}, "biases|ndarray"),
        (bf.ShapeError, {"x": [x], "weights": [q, q]}, "x|1|2"),
        (bf.ShapeError, {"x": x, "weights": [q], "biases": []}, "biases|0|1"),
        (bf.ShapeError, {"x": [x, x[:, :32]], "weights": [q, q]}, "x[1]|(3, 32)"),
        (bf.ShapeError, {"x": x, "weights": [q], "biases": [x]}, "(24,)"),
        (bf.FormatError, {"x": x, "weights": [q], "activations": "q4"}, "activations"),
        (bf.BackendUnavailable, {"x": x, "weights": [bf.prepack(q)], "backend": "reference"}, "'cpu'"),
    ]:
        with pytest.raises(error, match=facts(words)):
            bf.quantized_linears(**arguments)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_mlx_in_mlx_out(dtype):
    w, x = (mx.array(gaussian(shape, i)).astype(dtype) for i, shape in enumerate([(24, 64), (2, 3, 64)]))
    q = bf.quantize(w, "fp4")
    y = bf.quantized_linear(x, q, backend="reference")
    assert isinstance(y, mx.array)
    assert y.dtype == dtype
    values = np.array(x.astype(mx.float32))
    expected = mx.array(exact(values, q).astype(np.float32)).astype(dtype)
    assert mx.array_equal(y, expected)


def test_torch_packed_arrays_and_blocks():
    w, x = torch.from_numpy(gaussian((64, 8))), torch.from_numpy(gaussian((3, 64), 1))
    packed, scales = bf.pack_fp4_weights(w)
    assert packed.dtype == torch.uint32
    assert torch.equal(
        bf.quantized_linear(x, packed, scales),
        torch.from_numpy(bf.quantized_linear(x.numpy(), packed.numpy(), scales.numpy())),
    )
    blocks = bf.quantize_q8_0(x)
    assert isinstance(blocks, torch.Tensor)
    assert isinstance(bf.dequantize_q8_0(blocks), torch.Tensor)
    assert isinstance(bf.gemm_w4a8(blocks, bf.quantize_q4_0(w.T.contiguous())), torch.Tensor)


# ---- ggml blocks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"), [("q4_0", 18), ("q4_1", 20), ("q5_0", 22), ("q5_1", 24), ("q8_0", 34), ("q8_1", 36)]
)
def test_block_functions(name, size):
    quantize, dequantize = getattr(bf, f"quantize_{name}"), getattr(bf, f"dequantize_{name}")
    assert quantize.__name__ == f"quantize_{name}"
    assert dequantize.__name__ == f"dequantize_{name}"
    x = gaussian((2, 3, 96))
    blocks = quantize(x)
    assert (blocks.dtype, blocks.shape) == (np.uint8, (2, 3, 3 * size))
    restored = dequantize(blocks)
    assert (restored.dtype, restored.shape) == (np.float32, x.shape)
    assert_same_bits(restored.reshape(6, 96), bf.dequantize(bf.quantize(x.reshape(6, 96), name, method="rtn")))
    assert quantize(x[0, 0]).shape == (3 * size,)
    assert quantize(np.zeros((0, 64), np.float32)).shape == (0, 2 * size)
    assert dequantize(np.zeros((0, 2 * size), np.uint8)).shape == (0, 64)
    assert ((x - dequantize(quantize(x, method="mse"))) ** 2).sum() <= ((x - restored) ** 2).sum()


@pytest.mark.parametrize("activations", ["q8_0", "q8_1"])
@pytest.mark.parametrize("m", [0, 1, 5])
def test_gemm_w4a8_is_the_exact_integer_product(activations, m):
    x_q8 = getattr(bf, f"quantize_{activations}")(gaussian((m, 128)))
    w_q4 = bf.quantize_q4_0(gaussian((6, 128), 1))
    y = bf.gemm_w4a8(x_q8, w_q4, backend="reference")
    assert (y.dtype, y.shape) == (np.float32, (m, 6))
    if m == 0:
        return
    # Integer dot products block by block, then the two scales.
    x = bf.QuantizedTensor.from_storage(activations, {"blocks": x_q8}).planes
    w = bf.QuantizedTensor.from_storage("q4_0", {"blocks": w_q4}).planes
    expected = np.zeros((m, 6))
    for block in range(4):
        span = slice(32 * block, 32 * block + 32)
        products = x["codes"][:, span].view(np.int8).astype(int) @ (w["codes"][:, span].astype(int) - 8).T
        expected += products * np.outer(x["scale"][:, block].astype(float), w["scale"][:, block].astype(float))
    assert_same_bits(y, expected.astype(np.float32))


@FORMATS
def test_gemm_w4a8_takes_tensors_of_any_format(format):
    k = 2 * max(32, format.block_size)
    x, w = bf.quantize(gaussian((3, k)), "q8_1"), bf.quantize(gaussian((4, k), 1), format)
    expected = exact(bf.dequantize(x), w)
    assert_same_bits(bf.gemm_w4a8(x, w, backend="reference"), expected.astype(np.float32))
    np.testing.assert_allclose(bf.gemm_w4a8(x, w), expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_gemm_w4a8_reads_blocks_of_another_format():
    x, w = gaussian((3, 64)), gaussian((4, 64), 1)
    y = bf.gemm_w4a8(bf.quantize_q8_1(x), bf.quantize_q4_1(w), format="q4_1")
    blocks = bf.quantize(x, "q8_1", method="rtn"), bf.quantize(w, "q4_1", method="rtn")
    assert_same_bits(y, bf.gemm_w4a8(*blocks))


def test_no_public_function_hides_a_module():
    """As `bf.experts`, a function, once hid billfish/experts.py."""
    modules = {module.name for module in pkgutil.iter_modules(bf.__path__)}
    hidden = [name for name in modules & set(bf.__all__) if not inspect.ismodule(getattr(bf, name))]
    assert not hidden
