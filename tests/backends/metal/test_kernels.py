"""The Metal kernels, executed: every format, type and kernel, in checked, shuffled and hostile launches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cases import diagonal, sample
from common import ALL_BYTES, ALL_HALVES, assert_same_bits, gaussian, random_storage
from metal_support import (
    ALL_M,
    ALL_N,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FORMATS,
    KERNELS,
    MORE_FORMATS,
    MORE_PRODUCTS,
    PRODUCTS,
    assert_within_contract,
    multiply,
    quantized,
    sizes_of_k,
)

import billfish as bf
from billfish.backends import emulator
from billfish.backends.metal import kernels, lay_out

ORDERS = ("forward", "reverse", "random")
BY_ANY_FORMAT = pytest.mark.parametrize("name", FORMATS | MORE_FORMATS)
# What is asked for in full; and of the other formats one type for each kernel.
ONE_TYPE = [(name, *product) for name in MORE_FORMATS for product in MORE_PRODUCTS]
IN_FULL = [*((name, *product) for name in FORMATS for product in PRODUCTS), *ONE_TYPE]
HOSTILE = [*((name, *product) for name in FORMATS for product in MORE_PRODUCTS), *ONE_TYPE]
BY_DTYPE = pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT32], ids=lambda dtype: dtype.name)


def shapes(kernel: str, name: str) -> list[tuple[int, int, int, int | None]]:
    """Every (M, N, K, group size) for a kernel and a format."""
    rows = [m for m in ALL_M if kernel != "gemv" or m <= 8]
    return [(m, n, *k) for k, m, n in itertools.product(sizes_of_k(name), rows, ALL_N)]


def some_shapes(kernel: str, name: str, turn: int, count: int) -> list[tuple[int, int, int, int | None]]:
    """Far from each other, and others in the next turn: most shapes are compiled for, which takes a second or more."""
    possible = shapes(kernel, name)
    return [possible[(37 * turn + i * len(possible) // count) % len(possible)] for i in range(count)]


def check_product(kernel: str, name: str, dtype: np.dtype, shape: tuple[int, int, int, int | None], turn: int) -> None:
    """Checked in one order, and the same bits in the two others; hostile, it is still near."""
    m, n, k, group_size = shape
    q = quantized(name, n, k, group_size)
    x = gaussian((m, k), m).astype(dtype)
    bias = gaussian((n,), 7).astype(dtype) if m % 2 else None
    orders = [ORDERS[(turn + i) % 3] for i in range(3)]
    y = multiply(kernel, x, q, bias, check=True, order=orders[0], seed=turn)
    assert_within_contract(y, x, q, bias)
    for order in orders[1:]:
        assert_same_bits(multiply(kernel, x, q, bias, check=True, order=order, seed=turn), y)


def check_hostile(kernel: str, name: str, dtype: np.dtype, shape: tuple[int, int, int, int | None]) -> None:
    """A compiler that reorders sums and flushes subnormal numbers changes last bits and nothing else."""
    m, n, k, group_size = shape
    q = quantized(name, n, k, group_size)
    x = gaussian((m, k), m).astype(dtype)
    assert_within_contract(multiply(kernel, x, q, hostile=True), x, q, None)


@pytest.mark.parametrize(("name", "kernel", "dtype"), sample(12, FORMATS, PRODUCTS))
def test_products(kernel, dtype, name):
    """One shape for each, another every time, so that together they cover the sizes of the full matrix."""
    possible = shapes(kernel, name)
    turn = 37 * list(FORMATS).index(name) + 11 * PRODUCTS.index((kernel, dtype))
    check_product(kernel, name, dtype, possible[turn % len(possible)], turn)


# Each format on one kernel: a compiler's freedom is in what decodes the format, and in the kernel's sums.
@pytest.mark.parametrize(("name", "kernel"), sample(12, FORMATS, ("gemv", "gemm", "fused")))
def test_hostile_products(kernel, name):
    check_hostile(kernel, name, FLOAT16, (1 if kernel == "gemv" else 20, 70, *sizes_of_k(name)[0]))


def test_a_hostile_product_of_several_rows():
    check_hostile("gemv", "u4", FLOAT16, (5, 70, *sizes_of_k("u4")[0]))


@pytest.mark.full
@pytest.mark.parametrize(("name", "kernel", "dtype"), diagonal(1, IN_FULL))
def test_all_products(kernel, dtype, name):
    turn = IN_FULL.index((name, kernel, dtype))
    for shape in some_shapes(kernel, name, turn, 2):
        check_product(kernel, name, dtype, shape, turn)


@pytest.mark.full
@pytest.mark.parametrize(("name", "kernel", "dtype"), diagonal(1, HOSTILE))
def test_all_hostile_products(kernel, dtype, name):
    (shape,) = some_shapes(kernel, name, HOSTILE.index((name, kernel, dtype)), 1)
    check_hostile(kernel, name, dtype, shape)


# ---- numbers at the ends of their range ---------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "name"), diagonal(5, [1, 9, 2, 3], ["q4_0", "mxfp4", "affine4", "q2_k", "u4"]))
def test_infinities_and_nans_are_those_of_a_dense_product(name, m):
    """inf times a weight has its sign, and inf times 0 is NaN, whatever is added for the sum of x."""
    q = quantized(name, 24, 512)
    x = gaussian((m, 512), 1).astype(np.float16)
    x[0, 7], x[-1, 300], x[-1, 301] = np.inf, -np.inf if m > 1 else 1, np.nan if m == 9 else 1
    y = multiply("gemv" if m < 9 else "gemm", x, q).astype(np.float64)
    with np.errstate(invalid="ignore"):
        expected = x.astype(np.float64) @ bf.dequantize(q, backend="reference").astype(np.float64).T
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_allclose(y, expected, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize(("kernel", "dtype"), [("gemv", FLOAT32), ("fused", FLOAT32), ("gemm", BFLOAT16)])
def test_the_largest_scales(kernel, dtype):
    """Of E8M0, up to 2^125: 6 times that is a number, and what a code lacks, 2^14, does not come on top of it."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (16, 4))
    scale = np.arange(221, 253, dtype=np.uint8).reshape(16, 2)
    q = bf.QuantizedTensor.from_planes("mxfp4", {"codes": codes, "scale": scale})
    x = (gaussian((1 if kernel == "gemv" else 9, 64)) * 2.0**-100).astype(dtype)
    assert_within_contract(multiply(kernel, x, q), x, q, None)


# ---- dequantize -------------------------------------------------------------------------------------------------


def check_dequantize(q: bf.QuantizedTensor, dtype: np.dtype, **options: object) -> None:
    with emulator.options(**options):
        w = KERNELS.dequantize(lay_out(q), dtype)
    assert_same_bits(w, bf.dequantize(q, dtype, backend="reference"))


@pytest.mark.parametrize("name", diagonal(3, FORMATS | MORE_FORMATS))
def test_dequantize_is_exact_on_random_bytes(name):
    """All codes, and scales of every kind, NaN and infinities included; in three orders, checked."""
    format = bf.FORMATS[name.split()[0]]
    for turn, (n, (k, group_size)) in enumerate(zip((8, 70, 200, 96, 64), sizes_of_k(name), strict=False)):
        storage = random_storage(format, n, k, np.random.default_rng(turn), group_size if group_size != -1 else k)
        if "fractional" in name:
            storage["zeros"] = storage["zeros"].astype(np.float16) / np.float16(16)
        q = bf.QuantizedTensor.from_storage(format, storage, group_size)
        check_dequantize(q, (FLOAT16, BFLOAT16, FLOAT32)[turn % 3], check=True, order=ORDERS[turn % 3])


@pytest.mark.full
@BY_ANY_FORMAT
@BY_DTYPE
def test_dequantize_all_sizes(name, dtype):
    for (k, group_size), n, order in itertools.product(sizes_of_k(name), ALL_N, ORDERS):
        check_dequantize(quantized(name, n, k, group_size), dtype, check=True, order=order)


@BY_DTYPE
def test_every_code_with_every_float16_scale(dtype):
    codes = np.tile(np.arange(16, dtype=np.uint8), (4096, 16))
    # One NaN for all: the emulator's compiler rounds a quiet NaN with a payload of ones up to a zero in bfloat16.
    scales = np.where(np.isnan(ALL_HALVES), np.float16(np.nan), ALL_HALVES)
    planes = {"codes": codes, "scale": scales.reshape(4096, 16)}
    check_dequantize(bf.QuantizedTensor.from_planes("fp4", planes, 16), dtype)


@pytest.mark.parametrize(
    ("name", "dtype"), diagonal(3, ["mxfp4", "nvfp4", "mxfp4_gguf", "nvfp4_gguf"], [FLOAT16, BFLOAT16, FLOAT32])
)
def test_every_code_with_every_byte_as_scale(name, dtype):
    format = bf.FORMATS[name]
    group = format.default_group_size
    codes = np.tile(np.arange(16, dtype=np.uint8), (64, 4 * group // 16))
    planes = {"codes": codes, "scale": ALL_BYTES.reshape(64, 4)}
    if "nvfp4" in name:
        planes["global_scale"] = np.asarray(0.37, np.float32)
    check_dequantize(bf.QuantizedTensor.from_planes(name, planes), dtype)


# ---- codes, one by one ------------------------------------------------------------------------------------------


# mxfp4 and nvfp4 have the codes of fp4: what is theirs is how a flushed half and the scale meet.
FLUSHED = [("fp4", FLOAT16, False), *((name, FLOAT16, True) for name in ("fp4", "mxfp4", "nvfp4"))]


@pytest.mark.parametrize(
    ("kernel", "name", "dtype", "hostile"),
    diagonal(3, ["gemv", "gemm", "fused", "striped"], [*FLUSHED, ("fp4", BFLOAT16, True)]),
)
def test_sixteen_codes_times_the_identity(name, kernel, dtype, hostile):
    """Raw, code 1 is a subnormal half. Where that is flushed, 0.5 would silently be 0."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (8, 2))
    group = 32 if name != "nvfp4" else 16
    one = {"fp4": np.float16(1), "mxfp4": np.uint8(127), "nvfp4": np.uint8(0x38)}[name]
    planes = {"codes": codes, "scale": np.full((8, 32 // group), one)}
    if name == "nvfp4":
        planes["global_scale"] = np.asarray(1, np.float32)
    q = bf.QuantizedTensor.from_planes(name, planes)
    identity = np.eye(32, dtype=np.float32).astype(dtype)
    rows = 1 if kernel == "gemv" else 32  # one row is quicker to compile
    y = np.concatenate([multiply(kernel, identity[i : i + rows], q, hostile=hostile) for i in range(0, 32, rows)])
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    np.testing.assert_array_equal(y.astype(np.float64).T, np.tile(values, (8, 2)))


def test_where_halves_are_flushed_the_ordinary_build_is_wrong():
    """It relies on subnormal halves, as MLX does; that is what the other build is for."""
    q = quantized("fp4", 8, 32)
    rows = np.eye(8, 32, dtype=np.float16)[:, None]
    with emulator.options(hostile=True):
        wrong = [KERNELS.multiply(x, lay_out(q)) for x in rows]
    assert not np.array_equal(wrong, [multiply("gemv", x, q, hostile=True) for x in rows])


@pytest.mark.parametrize(
    ("name", "kernel"),
    [*diagonal(3, FORMATS, ["gemv", "gemm", "fused"]), *diagonal(5, MORE_FORMATS, ["gemv"])],
)
def test_identity_returns_the_weights(name, kernel):
    k, group_size = sizes_of_k(name)[0]
    q = quantized(name, 24, k, group_size)
    identity = np.eye(k, dtype=np.float16)
    rows = k if kernel != "gemv" else 1  # one row is quicker to compile
    y = np.concatenate([multiply(kernel, identity[i : i + rows], q) for i in range(0, k, rows)])
    np.testing.assert_array_equal(y.T, bf.dequantize(q, "float16", backend="reference"))


# ---- shapes that are easily forgotten -----------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 4), (1, 3, 8), (2, 1, 12), (1, 7, 36), (9, 1, 4), (17, 5, 20)])
def test_tiny_problems(m, n, k):
    """Fewer than eight numbers arrive in another address space; nobody notices."""
    q = bf.quantize(gaussian((n, k)), "u8b128", group_size=-1)
    x, bias = gaussian((m, k), 1).astype(np.float16), gaussian((n,), 2).astype(np.float16)
    for kernel in ("gemv", "gemm", "fused", "striped"):
        if kernel != "gemv" or m <= 8:
            assert_within_contract(multiply(kernel, x, q, bias, check=True), x, q, bias)


@pytest.mark.parametrize(
    ("kernel", "name"), diagonal(3, ["gemv", "gemm", "fused", "striped"], ["u4b8", "u4", "u4 fractional"])
)
def test_what_lies_beyond_k_is_not_seen(name, kernel):
    """The last group is partial and its scale infinite: no code of it, so no NaN from padding. The matvec makes
    weights of code * scale - zero * scale, so it has the largest scale instead."""
    q = quantized(name, 8, 40, 32)
    storage = {name: array.copy() for name, array in q.storage.items()}
    storage["scales"][1] = 65504 if kernel == "gemv" else np.inf
    storage["packed"][4:] = 0xFFFFFFFF  # more than any zero point
    q = bf.QuantizedTensor.from_storage(q.format, storage, 32)
    x = np.ones((1 if kernel == "gemv" else 4, 40), np.float16)
    if kernel == "gemv":
        x[:, 32:] = 2**-10
        assert_within_contract(multiply(kernel, x, q), x, q, None)
    else:
        assert np.isposinf(multiply(kernel, x, q)).all()


@pytest.mark.parametrize(("parts", "name"), diagonal(3, [1, 3, 8], ["fp4", "u4", "q5_1", "u8b128", "nvfp4", "q4_k"]))
def test_simdgroups_of_the_matvec(name, parts, monkeypatch):
    """They share K, which is for long ones; here they are forced, and some of them have nothing to do."""

    def forced(kernel: str, m: int, n: int, k: int) -> kernels.Dispatch:
        return kernels.Dispatch("gemv", (kernels.up(n, 16) * 32 * parts, 1, 1), (32 * parts, 1, 1))

    monkeypatch.setattr(kernels, "launch", forced)
    k, group_size = sizes_of_k(name)[-1]
    q = quantized(name, 36, k, group_size)
    x = gaussian((1, k), 3).astype(np.float16)
    assert_within_contract(multiply("gemv", x, q, check=True), x, q, None)


@pytest.mark.parametrize(("slices", "name"), diagonal(3, [1, 3, 8], ["fp4", "u4", "q5_0", "nvfp4"]))
def test_stripes(name, slices, monkeypatch):
    """Slices of K, of which some have nothing in it."""

    def forced(kernel: str, m: int, n: int, k: int) -> kernels.Dispatch:
        return kernels.Dispatch("striped", (kernels.up(n, 32) * 64, 1, slices), (64, 1, 1))

    monkeypatch.setattr(kernels, "launch", forced)
    q = quantized(name, 70, 352)  # 11 runs of K: of 8 slices, two are empty
    x, bias = gaussian((33, 352), 3).astype(np.float16), gaussian((70,), 4).astype(np.float16)
    y, *others = (multiply("striped", x, q, bias, check=True, order=order) for order in ORDERS)
    assert_within_contract(y, x, q, bias)
    for other in others:
        assert_same_bits(other, y)


@pytest.mark.parametrize(("kernel", "rows"), [("gemm", 9), ("gemv", 5)])
def test_x_may_begin_anywhere(kernel, rows):
    """MLX hands contiguous slices over as they are, at any offset."""
    q = quantized("q4_0", 16, 64)
    x = gaussian((1 + rows * 64,)).astype(np.float16)[1:].reshape(rows, 64)
    assert x.ctypes.data % 16 != 0
    assert_within_contract(multiply(kernel, x, q, check=True), x, q, None)


# Weights with a zero point, a minimum, and two groups in a run. A kernel for several rows takes 3 s to compile.
OFTEN = ("u4", "q2_k", "nvfp4")


@pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in FORMATS | MORE_FORMATS],
)
def test_a_row_has_the_same_bits_beside_any_others(name):
    """From one row to eight, with a rest of K, and where rows are at no multiple of 16 bytes."""
    turn = list(FORMATS | MORE_FORMATS).index(name)
    k, group_size = sizes_of_k(name)[turn % len(sizes_of_k(name))]
    q, dtype = quantized(name, 40, k, group_size), (FLOAT16, FLOAT32, BFLOAT16)[turn % 3]
    x, bias = gaussian((8, k), 5).astype(dtype), gaussian((40,), 7).astype(dtype)
    alone = np.concatenate([multiply("gemv", x[i : i + 1], q, bias) for i in range(8)])
    assert_within_contract(alone, x, q, bias)
    for m in range(2, 9):
        assert_same_bits(multiply("gemv", x[:m], q, bias), alone[:m])
    anywhere = np.concatenate([x[0, :1], x.ravel()])[1:].reshape(8, k)
    assert_same_bits(multiply("gemv", anywhere, q, bias), alone)


@pytest.mark.parametrize("count", [1, 7, 256, 1000])
def test_zero_reduction(count):
    with emulator.options(check=True):
        y = KERNELS.zero_reduction(count)
    assert_same_bits(y, np.zeros(count, np.float32))
