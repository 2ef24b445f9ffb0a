"""Results do not depend on a thread's floating-point mode: `torch.set_flush_denormal(True)` makes subnormals zero."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
import torch
from cases import diagonal
from common import assert_same_bits, gaussian, multiply

import billfish as bf
from billfish.backends import BACKENDS
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.backend import CpuBackend
from billfish.core.machine import with_known_floats
from billfish.core.mixture import GATES

if not torch.set_flush_denormal(False):
    pytest.skip("torch cannot flush subnormals on this machine", allow_module_level=True)

NAMES = ("fp4", "u4", "mxfp4", "nvfp4", "nvfp4_gguf", "q4_0", "q4_1", "q8_0", "q4_k", "q6_k")
FORMATS = pytest.mark.parametrize("format", NAMES)
LEVELS = pytest.mark.parametrize("level", _cpu.levels())
# Weights and x whose scales, products or sums are subnormal: as float16, as float32, or both.
SIZES = [2.0**-20, 2.0**-126]
SMALL = pytest.mark.parametrize("size", SIZES)


def flushes() -> bool:
    """Whether this thread does."""
    return bool(np.float32(2.0**-140) * np.float32(1) == 0)


@contextmanager
def flushing() -> Iterator[None]:
    """A thread that flushes subnormals, inside and afterwards as before, whatever was called meanwhile."""
    torch.set_flush_denormal(True)
    try:
        assert flushes()
        yield
        assert flushes()
    finally:
        torch.set_flush_denormal(False)
    assert not flushes()


@pytest.fixture(autouse=True)
def as_before():
    threads = _cpu.threads()
    yield
    _cpu.set_threads(threads)
    assert not flushes()


@FORMATS
@SMALL
def test_quantize(format, size):
    w = gaussian((9, 512)) * np.float32(size)
    expected = bf.quantize(w, format)
    with flushing():
        q = bf.quantize(w, format)
    for name, values in expected.storage.items():
        assert_same_bits(np.asarray(q.storage[name]), np.asarray(values))


@FORMATS
@SMALL
@LEVELS
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dequantize(format, size, level, dtype, monkeypatch):
    monkeypatch.setattr(BACKENDS["cpu"], "level", level)
    q = bf.quantize(gaussian((9, 512)) * np.float32(size), format)
    expected = bf.dequantize(q, dtype, backend="reference")
    for threads in (1, 3):
        with flushing():
            _cpu.set_threads(threads)
            got = bf.dequantize(q, dtype)
            reference = bf.dequantize(q, dtype, backend="reference")
        assert_same_bits(got, expected)
        assert_same_bits(reference, expected)


@pytest.mark.parametrize(
    ("activations", "size", "level", "format"), diagonal(3, ["exact", "q8", "q16"], SIZES, _cpu.levels(), NAMES)
)
def test_products(format, size, level, activations):
    backend = CpuBackend()
    backend.level = level
    q = bf.quantize(gaussian((33, 512)) * np.float32(size), format)
    packed = backend.pack(q)
    _cpu.set_threads(1)
    for m in (1, 9):
        x = gaussian((m, 512), m)
        for values in (x, x * np.float32(2.0**100), x * np.float32(2.0**-130)):
            expected = multiply(backend, values, packed, None, activations)
            for threads in (1, 3):
                with flushing():
                    _cpu.set_threads(threads)  # threads that are born flushing
                    repacked = backend.pack(bf.QuantizedTensor.from_storage(q.format, dict(q.storage), q.group_size))
                    got = multiply(backend, values, repacked, None, activations)
                assert_same_bits(got, expected)
                assert_same_bits(multiply(backend, values, packed, None, activations), expected)
            _cpu.set_threads(1)


@LEVELS
@pytest.mark.parametrize(
    ("dtype", "size"), [(np.float32, 2.0**-130), (np.float16, 2.0**-18), (ml_dtypes.bfloat16, 2.0**-130)]
)
def test_products_with_plain_weights(level, dtype, size):
    """Weights that are subnormal in their own type."""
    backend = CpuBackend()
    backend.level = level
    packed = backend.pack_all([(gaussian((33, 300)) * np.float32(size)).astype(dtype)])[0]
    for m in (1, 9):
        x = gaussian((m, 300), m)
        _cpu.set_threads(1)
        expected = multiply(backend, x, packed)
        assert np.abs(expected).min() > 0
        for threads in (1, 3):
            with flushing():
                _cpu.set_threads(threads)  # threads that are born flushing
                got = multiply(backend, x, packed)
            assert_same_bits(got, expected)


@LEVELS
@pytest.mark.parametrize("threads", [1, 3])
def test_decoder(level, threads):
    hidden, head_size, rows = 64, 32, 5
    backend = CpuBackend()
    backend.level = level
    ones = np.ones(hidden, np.float32)

    def matrix(n: int, k: int) -> tuple[object, np.ndarray, None, None]:
        packed = backend.pack(bf.quantize(gaussian((n, k), n + k), "q8_0"))
        return packed.description, packed.data, None, None

    rope = {"frequencies": [0.1] * (head_size // 2), "magnitude": 1.0, "adjacent": False}
    decoder = _cpu.Decoder(level, hidden, 1e-6, 0.0, [rope])
    attention = {
        "kind": "Attention",
        "heads": 2,
        "kv_heads": 1,
        "head_size": head_size,
        "q": matrix(hidden, hidden),
        "k": matrix(head_size, hidden),
        "v": matrix(head_size, hidden),
        "output": matrix(hidden, hidden),
        "scale": head_size**-0.5,
        "cap": 0.0,
        "window": 0,
        "rope": 0,
        "v_norm": False,
        "gated": False,
        "bidirectional": False,
    }
    parts = {name: matrix(hidden, hidden) for name in ("gate", "up", "down")}
    feed_forward = {"kind": "Dense", "activation": GATES.index("silu"), **parts}
    norms = {"mixer_norm": ones, "feed_forward_norm": ones}
    decoder.add_block({"mixer": attention, "feed_forward": feed_forward, "residual_scale": 1.0, **norms})
    decoder.set_head({"norm": ones}, matrix(100, hidden))
    x = gaussian((rows, hidden)) * np.float32(2.0**-130)

    def results() -> list[np.ndarray]:
        state = _cpu.SequenceState([(1, head_size, 0, 0)], type=0, capacity=rows)
        logits, through = np.empty((rows, 100), np.float32), x.copy()
        decoder.finish(x, 0, logits)
        decoder.run(through, [(state, 0, rows)], 0, None)
        return [logits, through, np.array(state.keys(0)), np.array(state.values(0))]

    _cpu.set_threads(1)
    expected = results()
    assert all(np.abs(values).max() > 0 for values in expected)
    with flushing():
        _cpu.set_threads(threads)
        got = results()
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)


def test_the_mode_is_restored_after_an_error():
    def fail() -> None:
        assert not flushes()
        raise RuntimeError

    with flushing(), pytest.raises(RuntimeError):
        with_known_floats(fail)()
