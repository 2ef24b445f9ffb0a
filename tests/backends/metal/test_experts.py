"""The Metal kernels for experts, executed: every format, checked, in three orders, hostile, and their bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import expert_oracle
import mlx.core as mx
import numpy as np
import pytest
from cases import first, sample
from common import assert_same_bits, gaussian
from metal_support import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FORMATS,
    KERNELS,
    MORE_FORMATS,
    assert_within_contract,
    kernels_for,
    quantized,
    sizes_of_k,
)

import billfish as bf
from billfish.backends import BACKENDS, emulator
from billfish.backends.metal import Kernels, MetalBackend, MetalWeights
from billfish.backends.metal.kernels import EXPERT_PRODUCTS, choose_experts, launch_experts
from billfish.backends.metal.layout import lay_out_experts

ORDERS = ("forward", "reverse", "random")
EXPERTS = 5
BY_KERNEL = pytest.mark.parametrize("kernel", EXPERT_PRODUCTS)
BY_ANY_FORMAT = pytest.mark.parametrize("name", FORMATS | MORE_FORMATS)


@lru_cache(maxsize=64)
def stack(name: str, n: int, k: int, group_size: int | None = None) -> tuple[list[bf.QuantizedTensor], MetalWeights]:
    tensors = [quantized(name, n, k, group_size, seed) for seed in range(EXPERTS)]
    return tensors, lay_out_experts(tensors)


def routing(tokens: int, chosen: int, seed: int = 0) -> np.ndarray:
    """Experts of each token, flat: some have many tokens, and expert 3 has none."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.permutation([0, 1, 2, 4])[:chosen] for _ in range(tokens)])


def products(x: np.ndarray, w: MetalWeights, ids: np.ndarray, bias: Any, kernel: str, **options: Any) -> np.ndarray:
    with emulator.options(**options):
        return kernels_for(**options).multiply_experts(x, w, ids, bias, kernel=kernel)


def assert_right(y: np.ndarray, x: np.ndarray, tensors: list[bf.QuantizedTensor], ids: np.ndarray, bias: Any) -> None:
    share = len(ids) // len(x)
    for expert, tensor in enumerate(tensors):
        choices = np.flatnonzero(ids == expert)
        if len(choices):
            assert_within_contract(y[choices], x[choices // share], tensor, None if bias is None else bias[expert])


# All kernels take a format by the same axes: each format on one kernel, three of them on all.
ONE_KERNEL = [(name, EXPERT_PRODUCTS[turn % 3]) for turn, name in enumerate(FORMATS | MORE_FORMATS)]
ALL_KERNELS = [(name, kernel) for name in ("fp4", "u4", "q5_1") for kernel in EXPERT_PRODUCTS]


@pytest.mark.parametrize(("name", "kernel"), sample(4, sorted({*ONE_KERNEL, *ALL_KERNELS})))
def test_products_with_experts(name, kernel):
    """Another size every time: of tokens, of experts for each, of N and of K. Checked, in three orders."""
    turn = 7 * list(FORMATS | MORE_FORMATS).index(name) + EXPERT_PRODUCTS.index(kernel)
    (k, group_size), n = sizes_of_k(name)[turn % len(sizes_of_k(name))], (8, 64, 70, 200)[turn % 4]
    tokens, chosen = (1, 3, 20, 75)[turn % 4], (1, 2, 4)[turn % 3]
    tensors, w = stack(name, n, k, group_size)
    dtype = FLOAT32 if kernel == "fused_experts" else (FLOAT16, BFLOAT16)[turn % 2]
    x, ids = gaussian((tokens, k), turn).astype(dtype), routing(tokens, chosen, turn)
    bias = gaussian((EXPERTS, n), 7).astype(dtype) if turn % 2 else None
    y, *others = (products(x, w, ids, bias, kernel, check=True, order=order, seed=turn) for order in ORDERS)
    assert_right(y, x, tensors, ids, bias)
    for other in others:
        assert_same_bits(other, y)
    if (name, kernel) in ALL_KERNELS:
        assert_right(products(x, w, ids, bias, kernel, hostile=True), x, tensors, ids, bias)


@pytest.mark.full
@BY_KERNEL
@BY_ANY_FORMAT
def test_all_products_with_experts(name, kernel):
    first = list(FORMATS | MORE_FORMATS).index(name) + EXPERT_PRODUCTS.index(kernel)
    for turn, (k, group_size) in enumerate(sizes_of_k(name), first):
        n, tokens = (8, 64, 70, 96, 200)[turn % 5], (1, 3, 9, 33, 75)[2 * turn % 5]
        tensors, w = stack(name, n, k, group_size)
        dtype = FLOAT32 if kernel == "fused_experts" else FLOAT16
        x, ids = gaussian((tokens, k), tokens).astype(dtype), routing(tokens, 1 + turn % 4, tokens)
        y = products(x, w, ids, None, kernel, check=True, order=ORDERS[turn % 3])
        assert_right(y, x, tensors, ids, None)


@BY_KERNEL
def test_a_row_for_each_choice(kernel):
    """As in the second product of a block: what an expert gave goes to the same expert."""
    tensors, w = stack("q4_0", 70, 64)
    x, ids = gaussian((22, 64), 1).astype(FLOAT16), routing(11, 2)
    assert_right(products(x, w, ids, None, kernel, check=True), x, tensors, ids, None)


@BY_KERNEL
def test_a_row_does_not_see_the_others(kernel):
    """A choice has the same bits alone, and wherever its row is among others."""
    _, w = stack("u4", 70, 128, 64)
    x, ids = gaussian((9, 128), 2).astype(FLOAT16), routing(9, 2, 5)
    y = products(x, w, ids, None, kernel)
    assert_same_bits(products(x[4:5], w, ids[8:10], None, kernel), y[8:10])
    assert_same_bits(
        products(x[::-1], w, ids.reshape(9, 2)[::-1].reshape(-1), None, kernel),
        y.reshape(9, 2, -1)[::-1].reshape(18, -1),
    )


@BY_KERNEL
@pytest.mark.parametrize("unknown", [EXPERTS, -1, 2**31 - 1, 2**32, -(2**32)])
def test_an_expert_that_is_not_there_gives_nan(kernel, unknown):
    """And nothing is read for it."""
    tensors, w = stack("fp4", 24, 64)
    x, ids = gaussian((6, 64), 3).astype(FLOAT16), routing(6, 2).astype(np.int64)
    ids[7] = unknown
    bias = gaussian((EXPERTS, 24), 4).astype(FLOAT16)
    y = products(x, w, ids, bias, kernel, check=True)
    assert np.isnan(y[7]).all()
    assert np.isfinite(np.delete(y, 7, axis=0)).all()
    assert_right(y, x, tensors, ids, bias)


@BY_KERNEL
def test_sums_can_stay_float32(kernel):
    tensors, w = stack("u4b8", 24, 64)
    x, ids = gaussian((6, 64), 3).astype(FLOAT16), routing(6, 2)
    y = KERNELS.multiply_experts(x, w, ids, dtype=np.float32, kernel=kernel)
    assert y.dtype == np.float32
    assert_right(y, x, tensors, ids, None)


@pytest.mark.parametrize(("n", "k"), [(1, 4), (3, 8), (1, 12)])
@BY_KERNEL
def test_tiny_problems(kernel, n, k):
    """Fewer than eight numbers arrive in another address space; nobody notices."""
    tensors = [bf.quantize(gaussian((n, k), seed), "u8b128", group_size=-1) for seed in range(2)]
    x, ids, bias = gaussian((1, k), 1).astype(FLOAT16), np.array([1]), gaussian((2, n), 2).astype(FLOAT16)
    assert_right(products(x, lay_out_experts(tensors), ids, bias, kernel, check=True), x, tensors, ids, bias)


@pytest.mark.parametrize("name", ["fp4", "u4", "q5_1", "nvfp4"])
def test_dequantize_a_stack(name):
    tensors, w = stack(name, 70, *sizes_of_k(name)[0])
    expected = np.stack([bf.dequantize(tensor, "float16", backend="reference") for tensor in tensors])
    with emulator.options(check=True):
        assert_same_bits(KERNELS.dequantize(w, FLOAT16), expected)


@pytest.mark.parametrize("name", first(1, ["mxfp4", "u4"]))
@BY_KERNEL
def test_only_chosen_experts_are_read(name, kernel):
    """Matvec: each expert's codes once for each choice. Tiles: once for a tile that has choices of it."""
    tensors, w = stack(name, 64, 512)
    x, ids = gaussian((4, 512)).astype(FLOAT16), np.array([2, 4, 4, 2, 2, 4, 4, 2])
    with emulator.launches() as log:
        KERNELS.multiply_experts(x, w, ids, kernel=kernel)
    (read,) = (launch.read for launch in log)
    times = 8 if kernel == "gemv_experts" else 2
    assert read["codes"] == times * w.expert(0).arrays["codes"].nbytes
    # Four lanes of a tile share a column.
    assert read["scales"] + read["offsets"] <= (1 if kernel == "gemv_experts" else 4) * times * (
        tensors[0].nbytes - w.expert(0).arrays["codes"].nbytes
    )


def test_a_stack_takes_no_more_than_its_experts():
    tensors, w = stack("q4_0", 64, 512)
    assert w.nbytes <= sum(tensor.nbytes for tensor in tensors) + 8 * 4 + 2 * 4  # the factors and the size
    assert w.arrays["high"] is w.arrays["codes"]


@pytest.mark.parametrize(
    ("choices", "experts", "itemsize", "expected"),
    [
        (8, 128, 2, "gemv_experts"),
        (2, 8, 4, "gemv_experts"),
        (31, 8, 2, "gemv_experts"),
        (32, 8, 2, "gemm_experts"),
        (512, 128, 4, "fused_experts"),
    ],
)
def test_choice(choices, experts, itemsize, expected):
    assert choose_experts(choices, experts, itemsize) == expected


@pytest.mark.parametrize(("choices", "rows"), [(32, 16), (128, 16), (256, 32), (4096, 64)])
def test_tiles_have_about_the_choices_of_an_expert(choices, rows):
    chosen = launch_experts("gemm_experts", choices, 8, 200, 512)
    assert chosen.grid == (7 * 64, -(-choices // rows), 1)


# ---- by name ------------------------------------------------------------------------------------------------------


def arguments(seed: int = 0, dtype: np.dtype = FLOAT32, tokens: int = 7) -> dict[str, Any]:
    """Of `bf.experts`: 6 experts, 3 of them for each token, H = 64 and I = 96."""
    rng = np.random.default_rng(seed)
    ids, weights = expert_oracle.random_routing(rng, tokens, 3, 6)
    return {
        "x": gaussian((tokens, 64), seed).astype(dtype),
        "gate_up": expert_oracle.random_stack(rng, 6, 192, 64, "q4_0"),
        "down": expert_oracle.random_stack(rng, 6, 64, 96, "mxfp4"),
        "ids": ids,
        "weights": weights,
        "gate_up_biases": rng.standard_normal((6, 192)).astype(dtype),
        "down_biases": rng.standard_normal((6, 64)).astype(dtype),
    }


@pytest.mark.parametrize("activation", ["silu", "gelu", "clamped_silu"])
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_the_block_in_the_emulator(tokens, activation):
    given = arguments(tokens=tokens)
    y = bf.experts(**given, hidden_act=activation, backend="metal-emulator")
    assert (y.shape, y.dtype) == ((tokens, 64), FLOAT32)
    if tokens:
        expected = expert_oracle.experts(**given, activation=activation)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_errors_of_routing_in_the_emulator():
    given = arguments()
    given["ids"] = given["ids"] + 4
    with pytest.raises(bf.BillfishError, match="ids"):
        bf.experts(**given, backend="metal-emulator")


def metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend `metal`, its kernels in the emulator."""
    backend = MetalBackend()
    backend.kernels = Kernels(emulator.metal_kernel)
    monkeypatch.setitem(BACKENDS, "metal", backend)
    monkeypatch.setattr(MetalBackend, "can_run", lambda self, problem: (problem.kind == "mlx", "no"))


def in_mlx(given: dict[str, Any]) -> dict[str, Any]:
    return {name: mx.array(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}


@pytest.mark.parametrize("pair", [False, True])
def test_the_block_of_mlx_arrays(pair, monkeypatch):
    metal(monkeypatch)
    given = arguments()
    expected = expert_oracle.experts(**given)
    taken = in_mlx(given)
    if pair:
        halves = np.arange(96), np.arange(96, 192)
        taken["gate_up"] = tuple(given["gate_up"].take_rows(rows) for rows in halves)
        taken["gate_up_biases"] = tuple(given["gate_up_biases"][:, rows] for rows in halves)
    y = bf.experts(**taken)
    assert isinstance(y, mx.array)
    np.testing.assert_allclose(np.array(y), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_gradients_of_the_block(monkeypatch):
    """For x, the routing weights and the biases."""
    metal(monkeypatch)
    given = in_mlx(arguments())
    gate_up, down = (mx.array(bf.dequantize(given.pop(name))) for name in ("gate_up", "down"))
    stacks = {name: arguments()[name] for name in ("gate_up", "down")}
    ids, names = given.pop("ids"), list(given)

    def ours(*values: mx.array) -> mx.array:
        return (bf.experts(**dict(zip(names, values, strict=True)), **stacks, ids=ids) ** 2).sum()

    def dense(x: mx.array, weights: mx.array, gate_up_biases: mx.array, down_biases: mx.array) -> mx.array:
        both = mx.einsum("th,tknh->tkn", x, gate_up[ids]) + gate_up_biases[ids]
        h = both[..., :96] * mx.sigmoid(both[..., :96]) * both[..., 96:]
        y = mx.einsum("tki,tkhi->tkh", h, down[ids]) + down_biases[ids]
        return ((y * weights[..., None]).sum(axis=1) ** 2).sum()

    every = tuple(range(len(names)))
    assert names == ["x", "weights", "gate_up_biases", "down_biases"]
    for a, b in zip(mx.grad(ours, every)(*given.values()), mx.grad(dense, every)(*given.values()), strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-3, atol=1e-3 * float(mx.abs(b).max()))


def test_the_gradient_of_a_bias_is_summed_in_float32(monkeypatch):
    """In float16 a sum of ones stops at 2048."""
    metal(monkeypatch)
    stack, ids = arguments()["down"], mx.zeros((2500, 1), mx.uint32)
    experts, n, k = stack.shape
    x = mx.zeros((2500, k), mx.float16)
    gradient = mx.grad(lambda biases: bf.expert_linear(x, stack, ids, biases=biases).sum())
    assert np.array_equal(np.array(gradient(mx.zeros((experts, n), mx.float16))[0]), np.full(n, 2500, np.float16))
