"""The CPU engine against the oracle: format x activations x dtype x ISA level x shape."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cases import diagonal
from common import assert_same_bits, decode_into, gaussian, multiply, options_of, random_storage
from cpu_levels import FORMATS, LEVELS, backend_at, magnitude
from foreign_formats import FOREIGN

import billfish as bf
from billfish.backends import BACKENDS
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.backend import CpuBackend
from billfish.backends.cpu.packed import FLOAT_CODES
from billfish.core.activations import DIGITS, block_size, quantize_activations

REFERENCE = BACKENDS["reference"]

M_SIZES = (0, 1, 2, 3, 8, 11, 16, 17, 31, 33, 256)
N_SIZES = (1, 4, 7, 96, 200)


def assert_close(y: np.ndarray, x: np.ndarray, w: np.ndarray, expected: np.ndarray) -> None:
    """Within a few roundings of the exact product, measured against the size of what was added up."""
    size = np.abs(x).astype(np.float64) @ w.astype(np.float64).T
    step = np.finfo(np.float32).eps
    if y.dtype != np.float32:
        step += float(ml_dtypes.finfo(y.dtype).eps)
    tiny = float(ml_dtypes.finfo(y.dtype).smallest_subnormal)
    assert (np.abs(y.astype(np.float64) - expected) <= 4 * step * size + tiny + step * np.abs(expected)).all()


def check_products(backend: CpuBackend, q: bf.QuantizedTensor, m: int, dtype: type, bias: np.ndarray | None) -> None:
    k = q.shape[1]
    x = gaussian((m, k), m).astype(dtype)
    w = bf.dequantize(q, backend="reference")
    packed = backend.pack(q)
    for activations in ("exact", "q8", "q16"):
        y = multiply(backend, x, packed, bias, activations)
        assert (y.dtype, y.shape) == (np.dtype(dtype), (m, q.shape[0]))
        as_it_is = activations == "exact" or packed.axes.codes in FLOAT_CODES
        values = x if as_it_is else quantize_activations(x.astype(np.float32), activations, q.group_size).values(k)
        expected = values.astype(np.float64) @ w.astype(np.float64).T
        assert_close(y, values, magnitude(q), expected if bias is None else expected + bias.astype(np.float64))


@pytest.mark.parametrize(("level", "format", "m"), diagonal(5, _cpu.levels(), bf.FORMATS.values(), M_SIZES))
def test_products(level, format, m):
    """Every M with every N; K from one block on."""
    for i, n in enumerate(N_SIZES):
        if m * n > 7000 and level == "portable":
            continue  # the same code as at smaller sizes, slowly
        for options in options_of(format):
            q = bf.quantize(gaussian((n, (1 + i) * format.block_size), n), format, **options)
            check_products(backend_at(level), q, m, np.float32, gaussian((n,), 3) if i % 2 else None)


@LEVELS
@FORMATS
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"])
def test_narrow_x(level, format, dtype):
    q = bf.quantize(gaussian((20, 2 * format.block_size)), format)
    for m in (1, 5, 9):
        check_products(backend_at(level), q, m, dtype, gaussian((20,), 3).astype(dtype))


@LEVELS
@pytest.mark.parametrize("format", [format for format in FOREIGN if format.name != "fp4_with_zeros"])
def test_codes_with_scales_that_no_format_of_ours_has(level, format):
    """A level has kernels of many rows only for usual pairs of both."""
    made = format()
    for options in options_of(made):
        q = bf.quantize(gaussian((11, 256 + made.block_size)), made, **options)
        check_products(backend_at(level), q, 17, np.float32, None)


@LEVELS
@pytest.mark.parametrize("name", ["fp4", "u4", "u4b8", "u8b128"])
@pytest.mark.parametrize(("k", "group_size"), [(8, 32), (40, 32), (72, 64), (264, 128), (520, -1), (200, -1), (24, 16)])
def test_group_sizes_and_partial_groups(level, name, k, group_size):
    if group_size == 16 and name != "fp4":
        group_size = 32
    q = bf.quantize(gaussian((11, k)), name, group_size=group_size)
    for m in (1, 3, 9):
        check_products(backend_at(level), q, m, np.float32, None)


@LEVELS
@FORMATS
def test_zero_blocks_and_scales_at_the_float16_limits(level, format):
    w = gaussian((9, 2 * max(format.block_size, 32)))
    w[0] = 0
    w[1] *= np.float32(1e-7)
    w[2] *= np.float32(5000)
    q = bf.quantize(w, format)
    for m in (1, 4, 9):
        check_products(backend_at(level), q, m, np.float32, None)


@LEVELS
@FORMATS
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dequantize_equals_the_oracle_on_random_bytes(level, format, dtype):
    k = 3 * format.block_size
    for group_size in format.group_sizes:
        storage = random_storage(format, 37, k, np.random.default_rng(1), group_size)
        q = bf.QuantizedTensor.from_storage(format, storage, group_size)
        expected = bf.dequantize(q, dtype, backend="reference")
        out = np.empty_like(expected)
        decode_into(backend_at(level), q, out)
        assert_same_bits(out, expected)
        strided = np.empty((37, 2 * k), expected.dtype)[:, ::2]
        decode_into(backend_at(level), q, strided)
        assert_same_bits(strided, expected)


@LEVELS
@FORMATS
def test_every_scale_that_a_file_can_hold(level, format):
    """Random bytes: NaN, infinite and subnormal scales give the same NaN and infinities as the oracle."""
    q = bf.QuantizedTensor.from_storage(
        format, random_storage(format, 24, 2 * format.block_size, np.random.default_rng(2))
    )
    backend = backend_at(level)
    x = np.abs(gaussian((3, q.shape[1]))) + 1
    y, expected = multiply(backend, x, backend.pack(q), None), multiply(REFERENCE, x, REFERENCE.pack(q), None)
    finite = np.isfinite(expected) & (np.abs(expected) < 1e30)
    size = np.abs(x).astype(np.float64) @ np.abs(np.nan_to_num(REFERENCE.pack(q).values, posinf=0, neginf=0)).T
    assert (np.abs(y[finite] - expected[finite]) <= 1e-5 * size[finite] + 1e-37).all()
    assert not np.isfinite(y[np.isnan(expected)]).any()


@LEVELS
@FORMATS
def test_packed_weights_take_no_more_than_five_percent_more(level, format):
    q = bf.quantize(gaussian((256, 1024)), format)
    # The kernels' bytes are signed, so affine8's minimum takes in 128 scales, which only float32 holds.
    allowed = 1.12 if format.name == "affine8" else 1.05
    assert backend_at(level).pack(q).nbytes <= allowed * q.nbytes


@pytest.mark.promise("numerics", "the same call gives the same bits for any number of threads")
@LEVELS
@pytest.mark.parametrize("activations", ["exact", "q8", "q16"])
def test_same_bits_for_any_number_of_threads(level, activations):
    q = bf.quantize(gaussian((300, 512)), "q4_k")
    backend = backend_at(level)
    packed = backend.pack(q)
    before = _cpu.threads()
    try:
        for m in (1, 7, 40):
            x = gaussian((m, 512), m)
            results = []
            for count in (1, 2, 3, 7):
                _cpu.set_threads(count)
                results.append(multiply(backend, x, packed, None, activations))
            for y in results[1:]:
                assert_same_bits(y, results[0])
    finally:
        _cpu.set_threads(before)


AARCH64 = platform.machine() in ("aarch64", "arm64")
EMULATOR = shutil.which("qemu-aarch64")


@pytest.mark.skipif(not AARCH64, reason="neon_i8mm is a level of aarch64")
@pytest.mark.skipif("neon_i8mm" not in _cpu.levels() and EMULATOR is None, reason="no i8mm here, and no qemu-aarch64")
def test_isa_level_neon_i8mm_has_the_bits_of_neon_dotprod():
    emulated = [] if "neon_i8mm" in _cpu.levels() else [str(EMULATOR), "-cpu", "max"]
    script = str(Path(__file__).parents[2] / "support" / "matrix_products.py")
    done = subprocess.run([*emulated, sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, list(bf.FORMATS)), done.stderr


@pytest.mark.promise("threads", "matmuls, generation (even on one KV cache) and chat templates are thread-safe")
def test_calls_from_several_python_threads_at_once():
    q = bf.quantize(gaussian((256, 512)), "q4_0")
    x = gaussian((4, 512))
    expected = bf.quantized_linear(x, q, activations="q8")
    wrong = []

    def work() -> None:
        for _ in range(50):
            if not np.array_equal(bf.quantized_linear(x, q, activations="q8"), expected):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


RUN_IN_A_CHILD = """
import os, sys, numpy as np, billfish as bf
q = bf.quantize(np.ones((64, 64), np.float32), "q4_0")
x = np.ones((2, 64), np.float32)
before = bf.quantized_linear(x, q, activations="q8")
child = os.fork()
same = np.array_equal(bf.quantized_linear(x, q, activations="q8"), before)
if child == 0:
    os._exit(0 if same else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or (0 if same else 1))
"""


@pytest.mark.parametrize("activations", ["exact", "q8", "q16"])
@pytest.mark.parametrize("rows", [1, 3, 9, 40])
def test_no_columns_give_the_bias(rows, activations):
    """Only a file of packed weights can have none; an integer division by their number would end the process."""
    held, bias = bf.prepack(bf.quantize(np.ones((4, 256), np.float32), "q8_0")), np.arange(4, dtype=np.float32)
    room = np.zeros(_cpu.packed_bytes(held.level, held.axes.describe((4, 0))), np.uint8)
    empty = dataclasses.replace(held, shape=(4, 0), data=room)
    x, expected = np.ones((rows, 0), np.float32), np.tile(bias, (rows, 1))
    assert_same_bits(bf.quantized_linear(x, empty, bias=bias, activations=activations), expected)
    for y in bf.quantized_linears(x, [empty, empty], biases=[bias, None], activations=activations):
        assert_same_bits(y, expected)
        expected = np.zeros_like(expected)


@pytest.mark.promise("threads", "CPU kernels and chat templates work after a fork")
def test_works_after_fork():
    subprocess.run([sys.executable, "-W", "ignore", "-c", RUN_IN_A_CHILD], check=True, timeout=60)


@LEVELS
def test_an_isa_level_can_be_forced(level):
    code = "from billfish.backends import BACKENDS; print(BACKENDS['cpu'].level)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "BILLFISH_ISA": level},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == level


def test_an_unknown_isa_level_is_an_error(monkeypatch):
    monkeypatch.setenv("BILLFISH_ISA", "mmx")
    with pytest.raises(bf.BackendUnavailable, match=f"cpu.*BILLFISH_ISA.*'mmx'.*{', '.join(_cpu.levels())}"):
        CpuBackend()


@LEVELS
@pytest.mark.parametrize(
    ("format", "k", "group_size"), [("u4", 448, 32), ("affine4", 448, 64), ("u4", 512, 128), ("u4b8", 416, 416)]
)
def test_whole_groups_share_a_scale_of_x(level, format, k, group_size):
    """q8 beside groups of 64 and more: one scale of x for each, 128 values at most. The last block may be short."""
    q = bf.quantize(gaussian((40, k), 3), format, group_size=group_size)
    backend = backend_at(level)
    x = gaussian((29, k), 4)
    x[:, 70] = 100  # the values beside it are rounded to steps of 0.8, up to the end of its block
    block = block_size("q8", group_size)
    values = quantize_activations(x, "q8", group_size).values(k)
    off = np.abs(values - x).max(axis=0)
    assert off[64:96].max() > 0.1 > 0.03 > off[128:].max()
    assert (off[:64].max() > 0.1) == (block == 128)
    expected = values @ bf.dequantize(q, backend="reference").T.astype(np.float64)
    for m in (1, 2, 3, 4, 7, 9, 24, 29):
        y = multiply(backend, x[:m], backend.pack(q), None, "q8")
        assert_close(y, values[:m], magnitude(q), expected[:m])


@pytest.mark.parametrize("activations", ["q8", "q16"])
def test_codes_of_x_are_those_of_the_oracle(activations):
    """Identity weights return codes * scale, so every code can be read off the product."""
    x = np.concatenate([gaussian((8, 64)), np.zeros((1, 64), np.float32), gaussian((4, 64)) * np.float32(1e-30)])
    q = bf.quantize(np.eye(64, dtype=np.float32), "q8_0")
    y = bf.quantized_linear(x, q, activations=activations)
    values = quantize_activations(x, activations, q.group_size).values(64) @ bf.dequantize(q).T.astype(np.float64)
    np.testing.assert_allclose(y, values, rtol=2e-7, atol=0)


@pytest.mark.parametrize("activations", ["q8", "q16"])
def test_what_is_not_finite_in_x_spoils_only_its_row(activations):
    q = bf.quantize(gaussian((8, 64)), "q4_0")
    x = gaussian((3, 64))
    clean = bf.quantized_linear(x, q, activations=activations)
    x[1, 40] = np.inf
    y = bf.quantized_linear(x, q, activations=activations)
    assert np.isnan(y[1]).all()
    assert_same_bits(y[[0, 2]], clean[[0, 2]])


@LEVELS
@pytest.mark.parametrize("m", [1, 3, 9])
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "fp4", "q8_0"])
def test_exact_products_keep_infinities_and_nans(level, name, m):
    """As a dense product has them: inf times a weight has its sign, and inf times 0 is NaN."""
    q = bf.quantize(gaussian((24, 512)), name)
    x = gaussian((m, 512))
    x[0, 7], x[-1, 300] = np.inf, -np.inf if m > 1 else 1
    backend = backend_at(level)
    y = multiply(backend, x, backend.pack(q), None)
    with np.errstate(invalid="ignore"):
        expected = x.astype(np.float64) @ bf.dequantize(q, backend="reference").astype(np.float64).T
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@LEVELS
@pytest.mark.parametrize("m", [1, 4, 9])
def test_exact_rows_of_any_size(level, m):
    """A row near the end of the range, above or below, keeps its precision."""
    q = bf.quantize(gaussian((24, 512)), "q4_0")
    w = bf.dequantize(q).astype(np.float64)
    backend = backend_at(level)
    for factor in (1e-40, 1e-36, 1.0, 1e34):
        x = (gaussian((m, 512)) * np.float64(factor)).astype(np.float32)
        y = multiply(backend, x, backend.pack(q), None)
        size = np.abs(x).astype(np.float64) @ np.abs(w).T
        assert (np.abs(y - x.astype(np.float64) @ w.T) <= 1e-6 * size + 1e-44).all()


@LEVELS
@pytest.mark.parametrize("m", [1, 7, 9])
@pytest.mark.parametrize("outlier", [1, 300, 30000])
def test_exact_is_hardly_further_off_than_a_dense_product(level, m, outlier):
    """Of many rows in float32, by NumPy; also where one value in each 32 is much larger than the others."""
    q = bf.quantize(gaussian((64, 1024)), "q4_0")
    w = bf.dequantize(q)
    x = gaussian((m, 1024), 3)
    x[:, ::32] *= np.float32(outlier)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    backend = backend_at(level)
    ours = np.abs(multiply(backend, x, backend.pack(q), None) - exact)
    dense = np.abs((np.tile(x, (16, 1)) @ w.T)[:m] - exact)
    assert np.sqrt((ours**2).mean()) <= 1.5 * np.sqrt((dense**2).mean())


@LEVELS
@pytest.mark.parametrize("m", [1, 7, 9])
def test_exact_products_with_one_are_exact(level, m):
    """Every bit of x comes through, down to a 64th of the largest value of its 32."""
    codes = np.eye(256, dtype=np.uint8) + np.uint8(128)
    q = bf.QuantizedTensor.from_planes("u8b128", {"codes": codes, "scale": np.ones((256, 8), np.float16)})
    x = np.random.default_rng(5).uniform(1 / 64, 1, (m, 256)).astype(np.float32)
    x[:, ::32] = np.nextafter(np.float32(1), np.float32(0))
    backend = backend_at(level)
    assert_same_bits(multiply(backend, x, backend.pack(q), None), x)


@LEVELS
@pytest.mark.parametrize("name", ["u4b8", "mxfp4", "q8_0", "u8b128"])
def test_codes_of_zero_give_exact_zeros(level, name):
    """Kernels add up unsigned codes and take their bias off: for zeros nothing may be left over."""
    planes = bf.quantize(gaussian((16, 512)), name).planes
    zero = {"u4b8": 8, "u8b128": 128}.get(name, 0)
    q = bf.QuantizedTensor.from_planes(name, {**planes, "codes": np.full_like(planes["codes"], zero)})
    backend = backend_at(level)
    for m in (1, 4, 9):
        assert not multiply(backend, gaussian((m, 512)), backend.pack(q), None).any()


def test_q16_is_closer_than_float16_activations():
    q = bf.quantize(gaussian((64, 1024)), "q4_0")
    x = gaussian((16, 1024))
    w = bf.dequantize(q).astype(np.float64)
    exact = x.astype(np.float64) @ w.T
    ours = np.abs(bf.quantized_linear(x, q, activations="q16") - exact).mean()
    halves = np.abs(x.astype(np.float16).astype(np.float64) @ w.T - exact).mean()
    assert ours < halves


def test_an_unknown_kind_of_activations_is_an_error():
    q = bf.quantize(gaussian((8, 64)), "q4_0")
    with pytest.raises(bf.FormatError, match=r"quantized_linear.*activations.*'q4'.*'exact' or 'q8' or 'q16' or 'fp8'"):
        bf.quantized_linear(gaussian((1, 64)), q, activations="q4")


# ---- packed weights as an object ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", bf.FORMATS)
def test_packed_weights_multiply_like_their_tensor_and_survive_a_file(name, tmp_path):
    tensor = bf.quantize(gaussian((37, 512)), name)
    packed, x, bias = bf.prepack(tensor), gaussian((3, 512), seed=1), gaussian((37,), seed=2)
    packed.save(tmp_path / "packed.npz")
    for weights in (packed, bf.PackedWeights.load(tmp_path / "packed.npz"), pickle.loads(pickle.dumps(packed))):
        for activations in DIGITS:
            y = bf.quantized_linear(x, weights, bias=bias, activations=activations)
            assert_same_bits(y, bf.quantized_linear(x, tensor, bias=bias, activations=activations, backend="cpu"))
    assert [path.name for path in tmp_path.iterdir()] == ["packed.npz"]


def test_streams_begin_with_a_cache_line(tmp_path):
    packed = bf.prepack(bf.quantize(gaussian((37, 512)), "q4_0"))
    packed.save(tmp_path / "packed.npz")
    stack = BACKENDS["cpu"].pack_experts(gaussian((3, 37, 64)))
    plain = BACKENDS["cpu"].pack_all([gaussian((37, 64))])[0]
    for weights in (packed, bf.PackedWeights.load(tmp_path / "packed.npz"), stack, plain):
        assert weights.data.ctypes.data % 64 == 0


@pytest.mark.skipif("avx_vnni" not in _cpu.levels(), reason="no AVX-VNNI")
@pytest.mark.parametrize("name", bf.FORMATS)
def test_avx_vnni_gives_the_bits_of_avx2(name):
    tensor = bf.quantize(gaussian((50, 512)), name)
    weights = [backend_at(level).pack(tensor) for level in ("avx2", "avx_vnni")]
    for activations in DIGITS:
        for m in (1, 4, 9, 33):
            x = gaussian((m, 512), seed=m)
            assert_same_bits(*(bf.quantized_linear(x, w, activations=activations) for w in weights))


@pytest.mark.skipif("neon_dotprod" not in _cpu.levels(), reason="of NEON")
def test_neon_levels_take_files_of_each_other(tmp_path):
    packed = backend_at("neon_dotprod").pack(bf.quantize(gaussian((37, 512)), "q4_0"))
    x = gaussian((20, 512), seed=1)
    for level in ("neon_i8mm", "neon_dotprod"):
        save_as(tmp_path / "packed.npz", packed, level=level)
        loaded = bf.PackedWeights.load(tmp_path / "packed.npz")
        assert loaded.level == _cpu.levels()[0]
        y = bf.quantized_linear(x, loaded, activations="q8")
        assert_same_bits(y, bf.quantized_linear(x, packed, activations="q8"))


def test_packed_weights_say_what_is_wrong(tmp_path, monkeypatch):
    packed, x = bf.prepack(bf.quantize(gaussian((4, 64)), "q4_0")), gaussian((1, 64))
    with pytest.raises(bf.FormatError, match=r"group_size"):
        bf.quantized_linear(x, packed, group_size=32)
    with pytest.raises(bf.BackendUnavailable, match="expected 'cpu'"):
        bf.quantized_linear(x, packed, backend="reference")
    with pytest.raises(bf.DTypeError, match=r"prepack.*q.*ndarray.*QuantizedTensor"):
        bf.prepack(x)
    path = tmp_path / "packed.npz"
    with monkeypatch.context() as patch:
        patch.setattr("billfish.backends.cpu.packed.LAYOUT", 1)
        packed.save(path)
    with pytest.raises(bf.BackendUnavailable, match="another version"):
        bf.PackedWeights.load(path)
    save_as(path, packed, level="abacus")
    with pytest.raises(bf.BackendUnavailable, match=r"packed for abacus.*this machine"):
        bf.PackedWeights.load(path)
    packed.save(path)
    whole = path.read_bytes()
    middle = whole.index(packed.data.tobytes()) + packed.nbytes // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for damaged in (b"", whole[:-30], flipped, whole[:middle], b"PK" + bytes(100)):
        path.write_bytes(damaged)
        with pytest.raises(bf.CheckpointError, match=r"not a file of PackedWeights\.save"):
            bf.PackedWeights.load(path)
    for change in ({"shape": (4, 96)}, {"axes": dataclasses.replace(packed.axes, group=7)}, {"data": packed.data[:-1]}):
        with pytest.raises(bf.ShapeError, match=r"the packed bytes of \[4, \d+\]"):
            dataclasses.replace(packed, **change)
        save_as(path, packed, **change)
        with pytest.raises(bf.CheckpointError):
            bf.PackedWeights.load(path)


def save_as(path, packed, **claims):
    """A file that says something else about packed weights than is true of them."""
    other = copy.copy(packed)
    other.__dict__.update(claims)
    other.save(path)


def test_the_number_of_threads_is_the_users():
    before = _cpu.threads()
    bf.set_threads(3)
    assert _cpu.threads() == 3
    bf.set_threads(0)
    assert _cpu.threads() == before
    for wrong in (-1, 1.5, "2", True, 10**6):
        with pytest.raises(bf.FormatError, match="0 to 1024"):
            bf.set_threads(wrong)
