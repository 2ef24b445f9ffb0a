"""Every kernel of an Apple GPU beside NumPy, for `billfish doctor` and `tools.metal_compile`.

Matmuls choose a kernel by shape, so that a few of them leave some out. Here each is called by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.backends import BACKENDS, Problem
from billfish.backends.metal import MLX, has_kernels
from billfish.backends.metal.decoder import DecoderKernels, Heads
from billfish.backends.metal.kernels import Kernels
from billfish.backends.metal.layout import lay_out, lay_out_experts
from billfish.core.arrays import FLOATS
from billfish.core.format import FORMATS
from billfish.core.tensor import QuantizedTensor
from billfish.ops.matmul import dequantize
from billfish.ops.quantization import quantize

Array = NDArray[Any]
Check = Callable[[], dict[str, Any]]  # what it finds: error, allowed, verdict
NAMES = ("metal", "mps", "metal-emulator")
N, K = 96, 256
# Kernel, rows of x, type of x.
MATMULS = [
    ("gemv", 1, "float16"),
    ("gemv", 1, "float32"),
    ("gemv", 8, "float16"),
    ("gemv", 8, "bfloat16"),
    ("gemm", 20, "float16"),
    ("gemm", 20, "bfloat16"),
    ("striped", 20, "float16"),
    ("fused", 20, "float32"),
]
WITH_UNITS = [("tensor", 70, "float16"), ("tensor", 70, "bfloat16")]
EXPERTS = [("gemv_experts", 5, "float16"), ("gemm_experts", 40, "bfloat16"), ("fused_experts", 40, "float32")]


class Device(NamedTuple):
    """A backend's kernels, and how NumPy's arrays come there and back."""

    kernels: Kernels
    to: Callable[[Array], Any]
    back: Callable[[Any], Array]


def device_of(name: str) -> Device:
    kernels: Kernels = BACKENDS[name].kernels  # type: ignore[attr-defined]
    if name == "metal":
        return Device(kernels, MLX.from_numpy, MLX.to_numpy)
    if name == "mps":
        from billfish.backends.metal.mps import TORCH, on_device

        return Device(kernels, partial(on_device, "mps:0"), lambda y: TORCH.to_numpy(y.cpu()))
    return Device(kernels, np.array, np.asarray)


def checks(name: str, formats: Iterable[str], device: Device | None = None) -> Iterator[dict[str, Any]]:
    """A record for each kernel, format and type. An error may be twice that of a dense matmul of the same types."""
    device = device or device_of(name)
    for format in formats:
        about = FORMATS[format]
        if has_kernels(Problem("matmul", about, about.default_group_size, 1, N, K, FLOATS["float16"]))[0]:
            for kernel, rows, dtype, check in _of_format(device, format):
                record = {"backend": name, "format": format, "kernel": kernel, "rows": rows, "type": dtype}
                yield record | _outcome(check)
    if name == "mps":
        return  # torch's models are made of layers
    for kernel, check in _of_decoder(device).items():
        yield {"backend": name, "format": "", "kernel": kernel, "rows": 3, "type": "float32"} | _outcome(check)


def _outcome(check: Check) -> dict[str, Any]:
    try:
        return check()
    except Exception as error:  # of a compiler or a driver: what it says is what the report is for
        return {"verdict": f"{type(error).__name__}: {error}"}


def _of_format(device: Device, format: str) -> Iterator[tuple[str, int, str, Check]]:
    generator = np.random.default_rng(0)
    q, other = (quantize(generator.standard_normal((N, K)).astype(np.float32), format, method="rtn") for _ in range(2))
    numbers = generator.standard_normal((80, K)).astype(np.float32)
    for kernel, rows, dtype in MATMULS + ([] if device.kernels.without_units else WITH_UNITS):
        yield kernel, rows, dtype, partial(_matmul, device, kernel, numbers[:rows].astype(FLOATS[dtype]), q)
    for kernel, rows, dtype in EXPERTS:
        yield kernel, rows, dtype, partial(_experts, device, kernel, numbers[:rows].astype(FLOATS[dtype]), [q, other])
    yield "dequantize", N, "float16", partial(_dequantized, device, q)
    yield "embed", 9, "float32", partial(_embedded, device, q)


def judged(x: Array, w: Array, y: Array) -> dict[str, Any]:
    """The error of y = x @ w.T beside that of a dense matmul in x's type. w [N, K], or a matrix for each row of x."""

    def product(x: Array, w: Array) -> Array:
        return x @ w.T if w.ndim == 2 else np.einsum("mk,mnk->mn", x, w)

    def error_of(y: Array) -> float:
        return float(np.sqrt(np.square(y.astype(np.float64) - exact).mean() / np.square(exact).mean()))

    exact = product(x.astype(np.float64), w.astype(np.float64))
    dense = product(x.astype(np.float32), w.astype(x.dtype).astype(np.float32)).astype(x.dtype)
    error, allowed = error_of(y), 2 * error_of(dense) + 2.0**-22  # float32 sums may be in another order
    return {"error": error, "allowed": allowed, "verdict": "right" if error <= allowed else "wrong"}


def _alike(y: Array, expected: Array, allowed: float = 0.0) -> dict[str, Any]:
    error = float(np.abs(y.astype(np.float64) - expected).max() / np.abs(expected.astype(np.float64)).max())
    return {"error": error, "allowed": allowed, "verdict": "right" if error <= allowed else "wrong"}


def _matmul(device: Device, kernel: str, x: Array, q: QuantizedTensor) -> dict[str, Any]:
    y = device.kernels.multiply(device.to(x), lay_out(q).converted(device.to), None, kernel)
    return judged(x, dequantize(q), device.back(y))


def _experts(device: Device, kernel: str, x: Array, experts: Sequence[QuantizedTensor]) -> dict[str, Any]:
    ids = (np.arange(len(x)) * 7 % 5 % len(experts)).astype(np.int32)
    stack = lay_out_experts(list(experts)).converted(device.to)
    there = device.to(np.resize(ids, 64))[: len(ids)]  # fewer than 8 numbers would stay in CPU memory
    y = device.kernels.multiply_experts(device.to(x), stack, there, kernel=kernel)
    return judged(x, np.stack([dequantize(experts[int(i)]) for i in ids]), device.back(y))


def _dequantized(device: Device, q: QuantizedTensor) -> dict[str, Any]:
    half = device.to(np.zeros(8, np.float16)).dtype
    w = device.back(device.kernels.dequantize(lay_out(q).converted(device.to), half))
    return _alike(w, dequantize(q, "float16"))


def _embedded(device: Device, q: QuantizedTensor) -> dict[str, Any]:
    tokens = np.arange(9) * 10 % N
    float32 = device.to(np.zeros(8, np.float32)).dtype
    rows = device.kernels.embed(lay_out(q).converted(device.to), device.to(tokens.astype(np.int32)), float32)
    return _alike(device.back(rows), dequantize(q)[tokens])


# ---- what a decoder has between its matmuls --------------------------------------------------------------------------


def _of_decoder(device: Device) -> dict[str, Check]:
    built = DecoderKernels(device.kernels)
    return {
        "add_norm": partial(_add_norm, device, built),
        "rotate": partial(_rotate, device, built),
        "recurrence": partial(_recurrence, device, built),
    }


def _normed(x: Array) -> Array:
    return np.asarray(x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-6))


def _add_norm(device: Device, built: DecoderKernels) -> dict[str, Any]:
    generator = np.random.default_rng(1)
    residual, y = (generator.standard_normal((3, 512)).astype(np.float32) for _ in range(2))
    post, weight = (generator.standard_normal(512).astype(np.float32) for _ in range(2))
    there = [device.to(a) for a in (residual, y, post, weight)]
    h, x = built.add_norm(*there, epsilon=1e-6, scale=0.5, dtype=there[0].dtype)
    expected = residual + 0.5 * _normed(y.astype(np.float64)) * post
    both = np.stack([expected, _normed(expected) * weight])
    return _alike(np.stack([device.back(h), device.back(x)]), both, 1e-5)


def _rotate(device: Device, built: DecoderKernels) -> dict[str, Any]:
    heads, kv_heads, size, pairs = 2, 1, 32, 8
    generator = np.random.default_rng(2)
    qkv = generator.standard_normal((3, (heads + 2 * kv_heads) * size)).astype(np.float32)
    norm = generator.standard_normal(size).astype(np.float32)
    frequencies = (100.0 ** -(np.arange(pairs) / pairs)).astype(np.float32)
    about = Heads(heads, kv_heads, size, device.to(frequencies), q_norm=device.to(norm), k_norm=device.to(norm))
    positions = np.array([0, 5, 9])
    there, apart = device.to(positions.astype(np.int32)), (heads + kv_heads) * size
    made = [
        built.rotate(device.to(qkv), about, there, 1e-6),
        built.rotate(device.to(qkv[:, :apart].copy()), about, there, 1e-6, device.to(qkv[:, apart:].copy())),
    ]
    each = qkv.astype(np.float64).reshape(3, heads + 2 * kv_heads, size).transpose(1, 0, 2)
    turned = _normed(each[: heads + kv_heads]) * norm
    angles = positions[:, None] * frequencies.astype(np.float64)
    a, b = turned[..., :pairs].copy(), turned[..., pairs : 2 * pairs].copy()
    turned[..., :pairs] = a * np.cos(angles) - b * np.sin(angles)
    turned[..., pairs : 2 * pairs] = b * np.cos(angles) + a * np.sin(angles)
    found = np.stack([np.concatenate([device.back(q), *device.back(kv)]) for q, kv in made])
    return _alike(found, np.stack([np.concatenate([turned, each[heads + kv_heads :]])] * 2), 1e-5)


def _recurrence(device: Device, built: DecoderKernels) -> dict[str, Any]:
    tokens, key_heads, heads, key, value = 3, 1, 2, 32, 8
    generator = np.random.default_rng(3)
    q, k = (generator.standard_normal((tokens, key_heads, key)).astype(np.float32) / 6 for _ in range(2))
    v = generator.standard_normal((tokens, heads, value)).astype(np.float32)
    decay, beta = (generator.random((tokens, heads)).astype(np.float32) for _ in range(2))
    state = generator.standard_normal((heads, value, key)).astype(np.float32)
    there = [device.to(a) for a in (q, k, v, decay, beta, state)]
    out, after = built.recurrence(*there, delta=True, tiled=False)
    s, outs = state.astype(np.float64), []
    for t in range(tokens):
        s = s * decay[t][:, None, None]
        s = s + beta[t][:, None, None] * (v[t] - s @ k[t, 0])[..., None] * k[t, 0]
        outs.append(s @ q[t, 0])
    found = np.concatenate([device.back(out).ravel(), device.back(after).ravel()])
    return _alike(found, np.concatenate([np.stack(outs).ravel(), s.ravel()]), 1e-5)
