"""The CPU engine at the edges of float32: x of any size beside any other, scales of any size, and what is kept of x."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from cases import diagonal
from common import assert_same_bits, gaussian, multiply
from cpu_levels import LEVELS, backend_at, magnitude

import billfish as bf
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.packed import FLOAT_CODES
from billfish.core.activations import DIGITS, quantize_activations
from billfish.core.format import Format

ROWS = range(1, 10)
TINY = 2.0**-149
KEPT_BYTES = 8 << 20  # as in layout/problem.h


def columns_of(format: Format) -> int:
    """K of a few blocks."""
    return max(format.block_size, 64)


def assert_within_the_bound(y: np.ndarray, x: np.ndarray, w: np.ndarray, size: np.ndarray) -> None:
    """y = x w^T, off by no more than K * 2^-23 of the sizes that are added up, and K subnormal steps."""
    k = x.shape[1]
    expected = x.astype(np.float64) @ w.astype(np.float64).T
    sizes = np.abs(x).astype(np.float64) @ size.astype(np.float64).T
    finite = sizes < np.finfo(np.float32).max
    off = np.abs(y - expected)
    assert (off[finite] <= k * 2.0**-23 * sizes[finite] + k * TINY).all(), np.nanmax(off / sizes)


def one_huge(m: int, k: int, first: int, huge: float) -> tuple[np.ndarray, np.ndarray]:
    """x with a huge value in every 32, at place `first` and then others, and where these are: x [m, k], bool [k]."""
    x, blocks = gaussian((m, k), first), np.arange(k // 32)
    places = blocks * 32 + (first + blocks * 5) % 32
    x[:, places] = huge
    return x, np.isin(np.arange(k), places)


def log_uniform(shape: tuple[int, ...], lowest: float, highest: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    exponents = rng.uniform(np.log(lowest), np.log(highest), shape)
    return (np.exp(exponents) * rng.choice([-1, 1], shape)).astype(np.float32)


# ---- exact, with x of any size beside any other ---------------------------------------------------------------------


@LEVELS
def test_small_terms_stay_where_the_largest_x_meets_a_zero(level):
    w = np.ones((16, 64), np.float32)
    w[:, 0] = 0
    x = np.ones((1, 64), np.float32)
    x[0, 0] = 1e12
    backend, q = backend_at(level), bf.quantize(w, "q8_0")
    np.testing.assert_allclose(multiply(backend, x, backend.pack(q)), x[:, 1:] @ bf.dequantize(q)[:, 1:].T, rtol=1e-6)


@pytest.mark.promise(
    "numerics",
    "exact `quantized_linear` on the CPU is within [the bound](cpu.md) of float32, for any finite input and result",
)
@pytest.mark.parametrize(
    ("level", "format", "huge"), diagonal(6, _cpu.levels(), bf.FORMATS.values(), [1e7, 1e12, 1e30])
)
def test_a_huge_x_in_every_place_beside_zeros_of_w(level, format, huge):
    """Next to the huge value, minimums and zero points are no reason to lose the others."""
    k, backend = columns_of(format), backend_at(level)
    for first in range(32):
        x, places = one_huge(ROWS[first % len(ROWS)], k, first, huge)
        w = gaussian((20, k), first)
        w[:, places] = 0
        q = bf.quantize(w, format)
        decoded = bf.dequantize(q, backend="reference")
        assert_within_the_bound(multiply(backend, x, backend.pack(q)), x, decoded, np.abs(decoded))


X_OF_ALL_SIZES = {
    "1e-30 to 1e30": lambda shape: log_uniform(shape, 1e-30, 1e30),
    "1e-5 to 1": lambda shape: log_uniform(shape, 1e-5, 1),
    "all of float32": lambda shape: log_uniform(shape, 1e-45, 1e35),
    "subnormal": lambda shape: log_uniform(shape, 1e-45, 1e-38),
    "rows from 1e-40 to 1e30": lambda shape: (
        gaussian(shape) * np.logspace(-40, 30, shape[0], dtype=np.float32)[:, None]
    ),
    "blocks from 1e-40 to 1e30": lambda shape: gaussian(shape) * np.logspace(-40, 30, shape[1], dtype=np.float32),
    "few": lambda shape: log_uniform(shape, 1e-30, 1e30) * (gaussian(shape, 1) > 1),
}


@pytest.mark.promise(
    "numerics",
    "exact `quantized_linear` on the CPU is within [the bound](cpu.md) of float32, for any finite input and result",
)
@pytest.mark.parametrize(("level", "format", "kind"), diagonal(3, _cpu.levels(), bf.FORMATS.values(), X_OF_ALL_SIZES))
def test_x_of_all_sizes(level, format, kind):
    make_x = X_OF_ALL_SIZES[kind]
    k, backend = columns_of(format), backend_at(level)
    w = gaussian((20, k)) * (gaussian((20, k), 1) > 0)  # half of them 0
    q = bf.quantize(w, format)
    packed, decoded, size = backend.pack(q), bf.dequantize(q, backend="reference"), magnitude(q)
    for m in ROWS:
        x = make_x((m, k))
        assert_within_the_bound(multiply(backend, x, packed), x, decoded, size)


@LEVELS
@pytest.mark.parametrize("k", [32, 96, 512, 4096])
def test_each_x_alone_stays_within_the_bound(level, k):
    """Products with one: no other value covers up what one of them loses."""
    codes = np.full((k, k), 128, np.uint8) + np.eye(k, dtype=np.uint8)
    q = bf.QuantizedTensor.from_planes("u8b128", {"codes": codes, "scale": np.ones((k, k // 32), np.float16)})
    backend = backend_at(level)
    packed = backend.pack(q)
    for x in (gaussian((1, k)), log_uniform((1, k), 1e-8, 1), log_uniform((1, k), 1e-30, 1e30)):
        assert (np.abs(multiply(backend, x, packed) - x) <= min(k, 4096) * 2.0**-24 * np.abs(x)).all()


@LEVELS
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=["f32", "f16", "bf16"])
def test_plain_weights(level, dtype):
    backend = backend_at(level)
    x, places = one_huge(9, 96, 3, 1e12)
    w = gaussian((20, 96))
    w[:, places] = 0
    w = w.astype(dtype)
    packed = backend.pack_all([w])[0]
    for rows in (x, log_uniform((9, 96), 1e-30, 1e30)):
        for m in ROWS:
            assert_within_the_bound(multiply(backend, rows[:m], packed), rows[:m], w, np.abs(w))


def test_columns_in_another_order():
    order = np.random.default_rng(3).permutation(256).astype(np.int32)
    q = dataclasses.replace(bf.quantize(gaussian((24, 256)), "u4b8", group_size=32), permutation=order)
    w = bf.dequantize(q, backend="reference")
    for m in ROWS:
        x = log_uniform((m, 256), 1e-30, 1e30)
        assert_within_the_bound(bf.quantized_linear(x, q, backend="cpu"), x, w, np.abs(w))


@pytest.mark.promise("numerics", "a row has the same bits alone and in a batch, where the docs say so")
@LEVELS
@pytest.mark.parametrize("name", ["q4_0", "q4_k", "u4"])
def test_a_row_has_its_bits_alone_and_beside_any_others(level, name):
    """Wide blocks and rows that are not finite, for any number of threads."""
    backend = backend_at(level)
    packed = backend.pack(bf.quantize(gaussian((200, 512)), name))
    x = gaussian((7, 512))
    x[1, ::32], x[2], x[4, 40], x[6, 500] = 1e12, log_uniform((512,), 1e-30, 1e30), np.inf, np.nan
    before = _cpu.threads()
    try:
        for count in (1, 2, 3, 7):
            _cpu.set_threads(count)
            y = multiply(backend, x, packed)
            assert_same_bits(y, np.concatenate([multiply(backend, row[None], packed) for row in x]))
            if count == 1:
                first = y
            assert_same_bits(y, first)
    finally:
        _cpu.set_threads(before)
    assert np.isnan(first[6]).all()
    assert not np.isfinite(first[4]).any()
    assert np.isfinite(np.delete(first, [4, 6], axis=0)).all()


# ---- scales of any size ---------------------------------------------------------------------------------------------

SIZES_OF_X = (1e-42, 1e-36, 1e-20, 1.0, 1e20, 1e33, 1e37)


def check_all_activations(level: str, q: bf.QuantizedTensor, sizes: tuple[float, ...] = SIZES_OF_X) -> None:
    k, backend = q.shape[1], backend_at(level)
    packed, w = backend.pack(q), bf.dequantize(q, backend="reference")
    with np.errstate(over="ignore", invalid="ignore"):
        size = magnitude(q)
    representable = np.isfinite(w).all(axis=1)  # rows of W
    for factor in sizes:
        for m in (1, 4, 9, 17):
            x = (gaussian((m, k), m) * np.float64(factor)).astype(np.float32)
            for activations in DIGITS:
                as_it_is = activations == "exact" or packed.axes.codes in FLOAT_CODES
                values = x if as_it_is else quantize_activations(x, activations, q.group_size).values(k)
                y = multiply(backend, x, packed, None, activations)
                assert_within_the_bound(y[:, representable], values, w[representable], size[representable])


@pytest.mark.promise("numerics", "`q8` and `q16` give finite results where the exact result is finite")
@pytest.mark.parametrize(("level", "format", "scale"), diagonal(3, _cpu.levels(), bf.FORMATS.values(), [1e-6, 1, 1e3]))
def test_x_of_any_size_with_every_format(level, format, scale):
    check_all_activations(level, bf.quantize(gaussian((20, columns_of(format))) * np.float32(scale), format))


@LEVELS
@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_gguf", "mxfp8"])
def test_every_power_of_two_as_a_scale(level, name):
    """A row of W for each of E8M0's. Where a product is finite, so is what it is made of."""
    planes = bf.quantize(gaussian((255, 64)), name).planes
    scale = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 2, axis=1)
    whole = bf.QuantizedTensor.from_planes(name, {**planes, "scale": scale})
    check_all_activations(level, whole)
    for first, last in ((0, 64), (64, 160), (161, 255)):  # some of them only, so that kernels read them as they are
        part = {"codes": planes["codes"][first:last], "scale": scale[first:last]}
        check_all_activations(level, bf.QuantizedTensor.from_planes(name, part))


@LEVELS
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_gguf"])
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-10, 1e10, 1e30, 1e36])
def test_a_global_scale_of_any_size(level, name, scale):
    planes = bf.quantize(gaussian((20, 64)), name).planes
    scales = {"scale": planes["scale"] // 4, "global_scale": np.asarray(scale, np.float32)}  # up to 0.1 and `scale`
    check_all_activations(level, bf.QuantizedTensor.from_planes(name, planes | scales))


@pytest.mark.promise("numerics", "`q8` and `q16` give finite results where the exact result is finite")
@pytest.mark.parametrize("activations", DIGITS)
@pytest.mark.parametrize("size", [1e28, 1e34, 5e36])
def test_products_with_large_weights_are_finite(activations, size):
    q = bf.quantize(gaussian((16, 64)) * np.float32(size), "mxfp4")
    for m in (1, 3, 9, 20):
        assert np.isfinite(bf.quantized_linear(gaussian((m, 64)) * np.float32(1e-10), q, activations=activations)).all()


# ---- what is kept ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("numerics", "a thread keeps at most 8 MiB of scratch memory")
@pytest.mark.parametrize("activations", DIGITS)
def test_a_thread_keeps_little_of_the_room_for_a_large_x(activations):
    q, kept = bf.quantize(gaussian((8, 2048)), "q4_0"), {}

    def work() -> None:
        for m in (64, 3000, 64):
            bf.quantized_linear(np.ones((m, 2048), np.float32), q, activations=activations)
            kept[m] = _cpu.kept_bytes()

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert kept[3000] == 0
    assert 0 < kept[64] <= KEPT_BYTES


MEMORY_OF_THREADS = """
import threading, numpy as np, billfish as bf
q = bf.quantize(np.ones((8, 2048), np.float32), "q4_0")
x = np.ones((16000, 2048), np.float32)
done, leave = threading.Barrier(5), threading.Event()

def work():
    bf.quantized_linear(x, q, activations="q16")
    done.wait()
    leave.wait()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 20

bf.quantized_linear(x[:8], q, activations="q16")
before = resident()
workers = [threading.Thread(target=work) for _ in range(4)]
for worker in workers:
    worker.start()
done.wait()
print(resident() - before)
leave.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_threads_that_live_on_give_memory_back():
    """Four threads with an x of 125 MiB each, which takes about as much again when it is quantized."""
    run = [sys.executable, "-c", MEMORY_OF_THREADS]
    grown = int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    assert grown < 100


# ---- sums of magnitudes beyond float32 ------------------------------------------------------------------------------


def cancelling(m: int, k: int) -> np.ndarray:
    """Rows whose terms are large, and whose sums with weights of 1 are small beside them."""
    x = gaussian((m, k)) * np.float32(1e30)
    x[:, :3], x[:, k // 2 : k // 2 + 3], x[:, -1] = 2e38, -2e38, 1e38
    x[m // 2] = gaussian((k,))  # an ordinary row between them
    return x


@pytest.mark.promise(
    "numerics",
    "exact `quantized_linear` on the CPU is within [the bound](cpu.md) of float32, for any finite input and result",
)
@pytest.mark.parametrize(
    ("level", "format", "activations"), diagonal(6, _cpu.levels(), bf.FORMATS.values(), ["exact", "q16", "q8"])
)
@pytest.mark.parametrize("m", [1, 3, 16, 33])
def test_a_finite_y_is_finite_however_large_its_terms(level, format, activations, m):
    k, backend = max(2 * columns_of(format), 256), backend_at(level)
    q, x = bf.quantize(np.ones((20, k), np.float32), format), cancelling(m, k)
    w, bias = bf.dequantize(q).astype(np.float64), gaussian((20,))
    y = multiply(backend, x, backend.pack(q), bias=bias, activations=activations)
    expected, sizes = (
        x.astype(np.float64) @ w.T + bias,
        np.abs(x).astype(np.float64) @ magnitude(q).T.astype(np.float64),
    )
    assert np.isfinite(y).all()
    if activations == "exact":
        assert (np.abs(y - expected) <= k * 2.0**-23 * sizes).all()
    alone = multiply(backend, x[m // 2 : m // 2 + 1], backend.pack(q), bias=bias, activations=activations)
    np.testing.assert_allclose(y[m // 2], alone[0], rtol=1e-4, atol=1e-3)


def test_overflow_is_mended_where_y_takes_the_place_of_x():
    q, x = bf.quantize(np.ones((256, 256), np.float32), "q4_0"), cancelling(16, 256)
    expected = bf.quantized_linear(x, q)
    assert np.isfinite(expected).all()
    assert_same_bits(bf.quantized_linear(x, q, out=x), expected)


def test_what_is_infinite_stays_infinite():
    q = bf.quantize(np.ones((8, 256), np.float32), "q4_0")
    x = np.full((3, 256), 1e38, np.float32)
    x[1], x[2, 0] = -1e38, np.nan
    y = bf.quantized_linear(x, q)
    assert (y[0] == np.inf).all()
    assert (y[1] == -np.inf).all()
    assert np.isnan(y[2]).all()
