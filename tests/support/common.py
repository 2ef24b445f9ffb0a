"""What several test files share."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

import billfish as bf
from billfish.backends.base import Product
from billfish.core.activations import IntegerActivations
from billfish.core.arrays import Input
from billfish.core.format import Format, Planes
from billfish.core.storage import Storage


def facts(text: str) -> str:
    """A pattern for `match=`: the facts of a message, separated by |, in this order. Words between them are free."""
    return ".*".join(map(re.escape, text.split("|")))


ALL_HALVES = np.arange(65536, dtype=np.uint16).view(np.float16)
ALL_BYTES = np.arange(256, dtype=np.uint8)

# What gguf calls the types it shares with us.
GGUF_NAMES = {
    "q4_0": "Q4_0",
    "q4_1": "Q4_1",
    "q5_0": "Q5_0",
    "q5_1": "Q5_1",
    "q8_0": "Q8_0",
    "q2_k": "Q2_K",
    "q3_k": "Q3_K",
    "q4_k": "Q4_K",
    "q5_k": "Q5_K",
    "q6_k": "Q6_K",
    "iq4_nl": "IQ4_NL",
    "iq4_xs": "IQ4_XS",
    "mxfp4_gguf": "MXFP4",
    "nvfp4_gguf": "NVFP4",
}


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal to the bit, with +0 and -0 told apart. A NaN equals any NaN: its payload is nobody's contract."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    unsigned = np.dtype(f"u{actual.dtype.itemsize}")
    a, b = np.ascontiguousarray(actual), np.ascontiguousarray(expected)
    with np.errstate(invalid="ignore"):
        same = (a.view(unsigned) == b.view(unsigned)) | ((a != a) & (b != b))
    assert same.all(), f"{(~same).sum()} differ, first: {a[~same][0]!r} instead of {b[~same][0]!r}"


def random_storage(format: Format, n: int, k: int, rng: np.random.Generator, group_size: int | None = None) -> Storage:
    """Storage of the right shape, every byte random: all codes, and all scale patterns, NaN and infinities included."""
    group_size = group_size or format.default_group_size
    storage: dict[str, Any] = {}
    for name, spec in format.storage_spec(n, k, group_size).items():
        raw = rng.integers(0, 256, (spec.nbytes,), dtype=np.uint8)
        storage[name] = raw.view(spec.dtype).reshape(spec.shape)
    if "global_scale" in storage:
        storage["global_scale"] = np.asarray(rng.uniform(0.1, 2), np.float32)
    return storage


def options_of(format: Format) -> list[dict[str, str]]:
    """Every combination of the options of a format (there is one option at most)."""
    return [{name: value} for name, allowed in format.options.items() for value in allowed] or [{}]


def group_errors(w: np.ndarray, tensor: bf.QuantizedTensor) -> np.ndarray:
    """The squared error of each group that is quantized on its own, in float64: [N, groups]."""
    run = tensor.format.quantization_run(tensor.group_size)
    squares = (w.astype(np.float64) - bf.dequantize(tensor).astype(np.float64)) ** 2
    starts = np.arange(0, w.shape[1], run)
    return np.add.reduceat(squares, starts, axis=1)


def assert_same_planes(actual: Planes, expected: Planes) -> None:
    assert actual.keys() == expected.keys()
    for name, plane in expected.items():
        assert actual[name].dtype == plane.dtype, name
        assert actual[name].tobytes() == plane.tobytes(), name


def multiply(backend: Any, x: Any, weights: Any, bias: Any = None, activations: str = "exact") -> Any:
    """x @ W.T + bias by one backend; weights as its `pack` made them."""
    given = x if isinstance(x, IntegerActivations) else Input("test", "x", x)
    added = None if bias is None else Input("test", "bias", bias)
    return backend.linears([Product(given, weights, weights.shape[0], added)], activations)[0]


def decode_into(backend: Any, tensor: bf.QuantizedTensor, out: Any) -> None:
    """W into `out` by one backend."""
    backend.dequantize(tensor, Input("test", "out", out))


def gaussian(shape: tuple[int, ...], seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def student_t(shape: tuple[int, ...], seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_t(4, shape).astype(np.float32)
