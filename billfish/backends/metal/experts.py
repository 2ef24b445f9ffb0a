"""Products with experts, of NumPy, MLX or torch arrays: nothing here looks at a value, so nobody waits for the GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from billfish.backends.metal.kernels import Kernels, cast, library, zeros
from billfish.backends.metal.layout import MetalWeights
from billfish.core.mixture import CLAMP, STEEPNESS

# x [T, K] or [T, k, K], packed weights [E, N, K], ids [T, k], biases [E, N] or none, type of y -> y [T, k, N]
Multiply = Callable[[Any, Any, Any, Any, Any], Any]


def multiply(kernels: Kernels, x: Any, w: MetalWeights, ids: Any, biases: Any, dtype: Any) -> Any:
    """y [T, k, N] = W[ids] times x [T, K] or [T, k, K], + biases[ids]."""
    (tokens, chosen), n = ids.shape, w.shape[1]
    if tokens == 0:
        return zeros((0, chosen, n), dtype, beside=x)
    y = kernels.multiply_experts(x.reshape(-1, x.shape[-1]), w, ids.reshape(-1), biases, dtype=dtype)
    return y.reshape(tokens, chosen, n)


def block(
    multiply: Multiply,
    open_gate: Callable[[Any, Any, str], Any],
    x: Any,
    ids: Any,
    routing: Any,
    gate_up: Sequence[Any],
    gate_up_biases: Sequence[Any],
    down: Any,
    down_biases: Any,
    activation: str,
) -> Any:
    """The feed-forward part, as bf.experts says it: y [T, H]. h is of x's type; what is summed is float32."""
    float32 = library(x).float32
    parts = [multiply(x, w, ids, b, x.dtype) for w, b in zip(gate_up, gate_up_biases, strict=True)]
    inner = parts[0].shape[-1] // 2
    gate, up = parts if len(parts) == 2 else (parts[0][..., :inner], parts[0][..., inner:])
    h = cast(open_gate(cast(gate, float32), cast(up, float32), activation), x.dtype)
    results, weights = multiply(h, down, ids, down_biases, float32), cast(routing, float32)[..., None]
    in_order = (weights[:, j] * results[:, j] for j in range(ids.shape[1]))
    return cast(reduce(lambda total, one: total + one, in_order), x.dtype)


class MetalExperts:
    """Products of MLX arrays with one stack, with gradients for x and for the biases."""

    def __init__(self, kernels: Kernels, weights: MetalWeights) -> None:
        self.kernels, self.weights = kernels, weights

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    def __call__(self, x: Any, ids: Any, biases: Any = None, dtype: Any = None) -> Any:
        """As `multiply`; y is of x's type unless another is given."""
        import mlx.core as mx

        @mx.custom_function
        def product(x: Any, ids: Any, *biases: Any) -> Any:
            return multiply(self.kernels, x, self.weights, ids, biases[0] if biases else None, dtype or x.dtype)

        @product.vjp
        def gradient(primals: Any, cotangent: Any, output: Any) -> Any:
            x, ids, *biases = primals
            wide = cotangent.astype(mx.float32)
            w = self.kernels.dequantize(self.weights, mx.float32)
            each = mx.gather_mm(wide[:, :, None], w, rhs_indices=ids)[:, :, 0]
            with_x = (each if x.ndim == 3 else each.sum(axis=1)).astype(x.dtype)
            flat = wide.reshape(math.prod(ids.shape), -1)
            sums = (mx.zeros(b.shape, mx.float32).at[ids.reshape(-1)].add(flat) for b in biases)
            with_biases = [total.astype(b.dtype) for total, b in zip(sums, biases, strict=True)]
            return with_x, mx.zeros_like(ids), *with_biases

        return product(x, ids, *([] if biases is None else [biases]))


def open_gate(gate: Any, up: Any, activation: str) -> Any:
    """As billfish.core.mixture.open_gate, of float32 arrays of MLX or torch."""
    xp = library(gate)
    if activation == "clamped_silu":
        g = xp.clip(gate, None, CLAMP)
        return g * xp.sigmoid(STEEPNESS * g) * (xp.clip(up, -CLAMP, CLAMP) + 1)
    if activation == "gelu":
        return gate * xp.sigmoid(math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3)) * up
    return gate * xp.sigmoid(gate) * up
