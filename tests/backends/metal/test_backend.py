"""The Metal engine from outside: layouts, the choice of a kernel, MLX arrays, gradients, the text that Metal gets."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cases import diagonal
from common import assert_same_bits, gaussian
from metal_support import ALL_M, ALL_N, FORMATS, MORE_FORMATS, assert_within_contract, quantized

import billfish as bf
from billfish.backends import BACKENDS, Problem, choose, emulator
from billfish.backends.emulator.lint import check_text
from billfish.backends.metal import Kernels, MetalBackend, MetalProduct, lay_out
from billfish.backends.metal.kernels import EXPERT_PRODUCTS, REDUCE, ZERO, kernel_arguments, launch
from billfish.backends.metal.kernels import choose_kernel as choose_kernel
from billfish.backends.metal.layout import code_words, lay_out_experts
from billfish.core.arrays import MlxArrays

FLOAT16 = np.dtype(np.float16)


def in_mlx(q: bf.QuantizedTensor) -> Any:
    return lay_out(q).converted(MlxArrays().from_numpy)


def stack_in_mlx(*experts: bf.QuantizedTensor) -> Any:
    return lay_out_experts([*experts, *experts]).converted(MlxArrays().from_numpy)


def emulated(q: bf.QuantizedTensor) -> MetalProduct:
    return MetalProduct(Kernels(emulator.metal_kernel), in_mlx(q))


# ---- which backend ------------------------------------------------------------------------------------------------


def problem(format: str = "q4_0", kind: str = "mlx", activations: str = "exact", device: str = "cpu") -> Problem:
    return Problem("matmul", bf.FORMATS[format], 32, 1, 8, 64, FLOAT16, kind, device, activations)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (problem(kind="numpy"), "runs on MLX arrays; x is a numpy array"),
        (problem(), "MLX finds no Metal on this machine"),
    ],
)
def test_metal_says_why_not(case, reason, monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert BACKENDS["metal"].can_run(case) == (False, reason)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (problem("nf4"), "no kernels for the nf4 codes of nf4"),
        (problem(activations="q8"), "supports activations 'exact', not 'q8'"),
        (problem(device="cuda"), "runs on arrays in CPU memory; x is on cuda"),
    ],
)
def test_the_emulator_says_why_not(case, reason):
    assert BACKENDS["metal-emulator"].can_run(case) == (False, reason)


def test_mlx_on_a_machine_with_metal_goes_to_metal(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert choose("test", problem()).name == "metal"
    assert choose("test", problem(activations="q8")).name == "cpu"
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert "set_default_device" in BACKENDS["metal"].can_run(problem())[1]


def test_mlx_without_metal_goes_to_the_cpu(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert choose("test", problem()).name == "cpu"
    q = quantized("q4_0", 8, 64)
    y = bf.quantized_linear(mx.array(gaussian((3, 64))), q)
    assert isinstance(y, mx.array)


# ---- by name ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [0, 1, 9])
def test_quantized_linear_in_the_emulator(m):
    q, bias = quantized("fp4", 70, 64), gaussian((70,), 2)
    x = gaussian((2, m, 64), 1).astype(np.float16)
    y = bf.quantized_linear(x, q, bias=bias, backend="metal-emulator")
    assert (y.shape, y.dtype) == ((2, m, 70), FLOAT16)
    if m:
        assert_within_contract(y.reshape(-1, 70), x.reshape(-1, 64), q, bias)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dequantize_in_the_emulator(dtype):
    q = quantized("q5_1", 20, 96)
    expected = bf.dequantize(q, dtype, backend="reference")
    assert_same_bits(bf.dequantize(q, dtype, backend="metal-emulator"), expected)
    strided = np.empty((20, 192), expected.dtype)[:, ::2]
    bf.dequantize(q, out=strided, backend="metal-emulator")
    assert_same_bits(strided, expected)


def test_gemm_w4a8_in_the_emulator():
    x, w = bf.quantize(gaussian((9, 64), 1), "q8_0"), quantized("q4_0", 20, 64)
    y, expected = (bf.gemm_w4a8(x, w, backend=backend) for backend in ("metal-emulator", "reference"))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_strided_x():
    q = quantized("u4", 8, 64)
    x = gaussian((6, 128), 1).astype(np.float16)[::2, ::2]
    y = bf.quantized_linear(x, q, backend="metal-emulator")
    assert_within_contract(y, np.ascontiguousarray(x), q, None)


# ---- layouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS | MORE_FORMATS)
def test_weights_take_no_more_than_their_storage(name):
    """But for the two-level scales of iq4_xs, which are multiplied out; and 12 bytes for the size and the factor."""
    q = quantized(name, 64, 512)
    most = {"iq4_xs": 5.1 / 4.25}.get(name, 1)
    assert lay_out(q).nbytes <= most * q.nbytes + 12


@pytest.mark.parametrize(("name", "words"), [("u4", 4), ("u8b128", 8), ("q2_k", 2)])
def test_every_code_has_its_own_bits(name, words):
    """Runs of 32 k in words that nothing else is in: setting one code changes one field of one word."""
    format = bf.FORMATS[name]
    n, k = 16, format.block_size * -(-32 // format.block_size)
    seen = np.zeros((k // 32, 16, words), np.uint32)
    for column, at in itertools.product((0, 5, 15), range(k)):
        codes = np.zeros((n, k), np.uint8)
        codes[column, at] = 2**format.element.bits - 1
        made = code_words(codes, format.element)[0]
        assert not (made & seen).any()
        assert np.bitwise_count(made).sum() == format.element.bits
        seen |= made
    assert np.bitwise_count(seen).sum() == 3 * k * format.element.bits


# ---- the choice of a kernel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "n", "itemsize", "expected"),
    [
        (1, 4096, 2, "gemv"),
        (8, 4096, 4, "gemv"),
        (9, 4096, 2, "striped"),
        (64, 8192, 2, "gemm"),
        (64, 4096, 2, "striped"),
        (512, 4096, 2, "gemm"),
        (9, 4096, 4, "fused"),
    ],
)
def test_choice(m, n, itemsize, expected):
    assert choose_kernel(m, n, 4096, itemsize) == expected


@pytest.mark.parametrize("n", [*ALL_N, 4096, 16384])
@pytest.mark.parametrize("m", ALL_M)
def test_launches_cover_y(m, n):
    for kernel in ("gemv", "gemm", "fused", "striped"):
        if kernel == "gemv" and m > 8:
            continue
        chosen = launch(kernel, m, n, 4096)
        across, down, deep = (size // part for size, part in zip(chosen.grid, chosen.threadgroup, strict=True))
        if kernel == "gemv":
            assert chosen.kernel == ("gemv" if m == 1 else "gemv_rows")
            assert across * 16 >= n
        else:
            assert across * 32 >= n
            assert down * 64 >= m
            assert 1 <= deep <= (8 if kernel == "striped" else 1)


# ---- MLX arrays ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(shape, dtype, marks=() if (i + j) % 3 == 0 else pytest.mark.full)
        for i, shape in enumerate([(64,), (3, 64), (2, 9, 64), (0, 64), (2, 0, 64)])
        for j, dtype in enumerate([mx.float16, mx.bfloat16, mx.float32])
    ],
)
def test_mlx_arrays_stay_mlx_arrays(shape, dtype):
    q = quantized("fp4", 24, 64)
    x = mx.array(gaussian(shape, 1)).astype(dtype)
    y = emulated(q)(x)
    assert isinstance(y, mx.array)
    assert (y.dtype, tuple(y.shape)) == (dtype, (*shape[:-1], 24))


def test_linear_hands_over_the_callers_arrays(monkeypatch):
    """From `quantized_linear` on: x and the bias go to the kernels as they are, a NumPy bias is converted."""
    q, x = quantized("fp4", 24, 64), mx.array(gaussian((9, 64)))
    backend = MetalBackend()
    backend.kernels = Kernels(emulator.metal_kernel)
    monkeypatch.setitem(BACKENDS, "metal", backend)
    monkeypatch.setattr(MetalBackend, "can_run", lambda self, problem: (problem.kind == "mlx", "no"))
    monkeypatch.setattr(MlxArrays, "to_numpy", lambda self, array: pytest.fail("through NumPy"), raising=True)
    monkeypatch.setattr(
        "billfish.backends.metal.kernels.Kernels.multiply", lambda self, x, w, bias=None: x @ mx.ones((64, 24)) + bias
    )
    for bias in (mx.ones((24,)), np.ones(24, np.float32)):
        y = bf.quantized_linear(x, q, bias=bias)
        assert isinstance(y, mx.array)


@pytest.mark.parametrize("name", ["fp4", "u4", "q8_0"])
def test_gradients(name):
    q = quantized(name, 24, 64)
    product, x, bias = emulated(q), mx.array(gaussian((9, 64), 1)), mx.array(gaussian((24,), 2))
    w, weight = mx.array(bf.dequantize(q)), mx.array(gaussian((9, 24), 3))
    ours = mx.grad(lambda x, b: (product(x, b) * weight).sum(), argnums=(0, 1))(x, bias)
    dense = mx.grad(lambda x, b: ((x @ w.T + b) * weight).sum(), argnums=(0, 1))(x, bias)
    for a, b in zip(ours, dense, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-5, atol=1e-5)
    alone = mx.grad(lambda x: (product(x) * weight).sum())(x)
    np.testing.assert_allclose(np.array(alone), np.array(ours[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_gradients_are_float32_until_the_end(dtype):
    """Weights that no 16 bits hold, and a sum of ones that stops growing in 16 bits."""
    q, rows = quantized("q4_1", 24, 64), 2500
    product, x = emulated(q), mx.array(gaussian((rows, 64), 1)).astype(dtype)
    weight = mx.concatenate([mx.array(gaussian((rows, 23), 3)), mx.ones((rows, 1))], axis=1).astype(dtype)
    for_x, for_bias = mx.grad(lambda x, b: (product(x, b).astype(mx.float32) * weight).sum(), argnums=(0, 1))(
        x, mx.zeros(24, dtype)
    )
    exact = np.array(weight.astype(mx.float32)).astype(np.float64) @ bf.dequantize(q).astype(np.float64)
    bits = 11 if dtype == mx.float16 else 8
    close = {"rtol": 1.01 * 2.0**-bits, "atol": 1e-5}
    np.testing.assert_allclose(np.array(for_x.astype(mx.float32)), exact, **close)
    assert abs(float(for_bias[23]) - rows) <= rows * 2.0**-bits


def dense_kernels(q: bf.QuantizedTensor) -> Callable[..., Any]:
    """A metal_kernel of MLX operations, which `mx.compile` can run where there is no Metal."""
    w = mx.array(bf.dequantize(q))

    def build(name: str, **arguments: Any) -> Callable[..., Any]:
        if name.startswith("dequant"):
            return lambda **call: [w.astype(call["output_dtypes"][0])]
        return lambda **call: [call["inputs"][0] @ w.T]

    return build


def test_compile_and_gradients_of_what_is_compiled():
    q = quantized("fp4", 24, 64)
    product = MetalProduct(Kernels(dense_kernels(q)), in_mlx(q))
    x, w = mx.array(gaussian((4, 64), 1)), mx.array(bf.dequantize(q))
    y = mx.compile(lambda x: product(x) * 2)(x)
    np.testing.assert_allclose(np.array(y), np.array(x @ w.T * 2), rtol=1e-5, atol=1e-5)
    gradient = mx.compile(mx.grad(lambda x: (product(x) ** 2).sum()))(x)
    dense = mx.grad(lambda x: ((x @ w.T) ** 2).sum())(x)
    np.testing.assert_allclose(np.array(gradient), np.array(dense), rtol=1e-4, atol=1e-4)


# ---- the text for Metal ---------------------------------------------------------------------------------------------


def printed_by_mlx(tmp_path: Path, call: Callable[[Kernels], Any]) -> list[str]:
    """What MLX would compile for the kernels that `call` runs: it prints them while it exports a function."""

    def build(**arguments: Any) -> Callable[..., Any]:
        kernel = mx.fast.metal_kernel(**arguments)
        return lambda **launch: kernel(**launch, verbose=True, stream=mx.gpu)

    saved = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)  # it prints from C++
        try:
            mx.export_function(str(tmp_path / "exported.mlxfn"), lambda: call(Kernels(build)))
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        file.seek(0)
        text = file.read().decode()
    return [part.removesuffix("\n") for part in text.split("```\n")[1::2]]


class Recorder:
    """The emulator's metal_kernel, which writes down the text instead of running it."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, **arguments: Any) -> Callable[..., Any]:
        kernel = emulator.metal_kernel(**arguments)

        def launch(**call: Any) -> list[Any]:
            text = kernel.signature(call["inputs"], call["output_dtypes"], call.get("template"))
            self.texts.append(text.text)
            return [
                mx.zeros(shape, dtype)
                for shape, dtype in zip(call["output_shapes"], call["output_dtypes"], strict=True)
            ]

        return launch


@pytest.mark.parametrize(
    "kernel", ["gemv", "gemv_rows", "gemm", "fused", "striped", "tensor", "dequantize", *EXPERT_PRODUCTS]
)
@pytest.mark.parametrize("name", FORMATS | MORE_FORMATS)
def test_metal_gets_the_text_that_was_executed(name, kernel, tmp_path):
    w, stack = in_mlx(quantized(name, 96, 512)), stack_in_mlx(quantized(name, 96, 512))
    x, bias = mx.zeros((8, 512), mx.float16), mx.zeros((96,), mx.float16)

    def call(kernels: Kernels) -> Any:
        if kernel == "dequantize":
            return kernels.dequantize(w, mx.bfloat16)
        if kernel in EXPERT_PRODUCTS:
            return kernels.multiply_experts(x, stack, mx.zeros((16,), mx.uint32), mx.stack([bias, bias]), kernel=kernel)
        if kernel == "gemv_rows":
            return kernels.multiply(x, w, bias)
        return kernels.multiply(x[:1] if kernel == "gemv" else x, w, bias, kernel)

    recorder = Recorder()
    call(Kernels(recorder))
    assert len(recorder.texts) == (2 if kernel in ("striped", "tensor") else 1)
    assert printed_by_mlx(tmp_path, call) == recorder.texts


def test_the_text_of_zero_reduction(tmp_path):
    recorder = Recorder()
    Kernels(recorder).zero_reduction(100, mx)
    assert printed_by_mlx(tmp_path, lambda kernels: kernels.zero_reduction(100, mx)) == recorder.texts
    assert check_text(*recorder.texts) == []


# Every kind of element, scale and offset is in one of them.
LINTED = ["fp4", "u4", "q5_1", "q8_0", "nvfp4", "mxfp4", "iq4_nl", "mxfp4_gguf", "nvfp4_gguf"]
LINTED += ["q4_k", "q6_k", "q2_k", "q3_k", "fp8"]


@pytest.mark.parametrize(
    ("kernel", "name"),
    diagonal(14, ["gemv", "gemv_rows", "gemm", "fused", "striped", "tensor", "dequantize", *EXPERT_PRODUCTS], LINTED),
)
def test_the_lint_finds_nothing(kernel, name):
    """Address spaces, vector casts, arrays of matrices, names that MLX takes: what only a Mac would show."""
    recorder = Recorder()
    w = in_mlx(quantized(name, 96, 512))
    if kernel == "dequantize":
        Kernels(recorder).dequantize(w, mx.float16)
    elif kernel in EXPERT_PRODUCTS:
        x, ids = mx.zeros((8, 512), mx.float16), mx.zeros((8,), mx.uint32)
        Kernels(recorder).multiply_experts(x, stack_in_mlx(quantized(name, 96, 512)), ids, kernel=kernel)
    else:
        rows = 1 if kernel == "gemv" else 8
        Kernels(recorder).multiply(mx.zeros((rows, 512), mx.float16), w, None, kernel.removesuffix("_rows"))
    for text in recorder.texts:
        assert check_text(text) == []


def test_the_kernels_have_the_names_of_the_documents():
    weights = {name: lay_out(quantized(name, 8, 64)) for name in ("fp4", "u4")}
    names = {
        str(kernel_arguments(kernel, name, w.axes)["name"])
        for name, w in weights.items()
        for kernel in ("gemm", "fused", "striped", "dequantize")
    }
    names |= {str(REDUCE["name"]), str(ZERO["name"])}
    assert {
        "marlin_gemm_fp4",
        "marlin_gemm_fp4_striped",
        "marlin_gemm_fused_fp4",
        "marlin_gemm_fused_u4",
        "marlin_zero_reduction",
        "dequant_fp4",
        "dequant_u4",
    } <= names


def test_kernels_are_built_once():
    built: list[str] = []

    def build(**arguments: Any) -> Any:
        built.append(arguments["name"])
        assert arguments["compile_options"] == {"math_mode": "safe"}
        return emulator.metal_kernel(**arguments)

    kernels = Kernels(build)
    for group_size in (32, 64):
        w = lay_out(quantized("fp4", 8, 64, group_size))
        for m in (1, 2, 8):
            kernels.multiply(gaussian((m, 64)).astype(np.float16), w)
    assert built == ["marlin_gemv_fp4", "marlin_gemv_rows_fp4"]


def test_nothing_is_compiled_again_for_other_sizes():
    """One text for each kernel and type, whatever M, N and K are."""
    recorder = Recorder()
    kernels = Kernels(recorder)
    for m, (n, k) in itertools.product((1, 2, 3, 8, 9, 64, 130, 512), ((8, 64), (96, 512), (4096, 1024))):
        x, w = mx.zeros((m, k), mx.float16), in_mlx(quantized("fp4", n, k, 32))
        kernels.multiply(x, w, None, None if m <= 8 else ("gemm", "fused", "striped")[m % 3])
    names = {re.search(r"custom_kernel_(\w+?)_fp4", text)[1] for text in recorder.texts if "_fp4" in text}
    assert names == {"marlin_gemv", "marlin_gemv_rows", "marlin_gemm", "marlin_gemm_fused"}
    assert len(set(recorder.texts)) == 4 + 2  # striped, which ends in another name, and reduce
