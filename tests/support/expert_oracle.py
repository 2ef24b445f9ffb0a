"""What products with experts should give, in NumPy and float64, row by row: obvious and slow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

import billfish as bf
from billfish.backends.cpu.packed import FLOAT_CODES
from billfish.core.activations import quantize_activations

Numbers = NDArray[Any]


def random_stack(rng: np.random.Generator, experts: int, n: int, k: int, format: str = "q4_0", **options: Any) -> Any:
    """QuantizedExperts [experts, n, k] of random weights."""
    w = rng.standard_normal((experts, n, k)).astype(np.float32) / math.sqrt(k)
    return bf.quantize(w, format, method="rtn", **options)


def random_routing(rng: np.random.Generator, tokens: int, chosen: int, experts: int) -> tuple[Numbers, Numbers]:
    """ids [tokens, chosen], unlike in each row, and routing weights that add up to 1."""
    ids = np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)]) if tokens else np.empty((0, chosen))
    weights = rng.random((tokens, chosen)).astype(np.float32) + np.float32(0.1)
    return ids.astype(np.int32), weights / weights.sum(axis=1, keepdims=True)


def activations_of(w: Any, activations: str, backend: str) -> str:
    """How a backend sees x beside w: the CPU's kernels round it only beside codes that stand for integers."""
    in_floats = backend == "cpu" and bf.prepack(w).axes.codes in FLOAT_CODES
    return "exact" if in_floats else activations


def seen(x: Numbers, activations: str, group_size: int) -> NDArray[np.float64]:
    """x [rows, K] as kernels see it beside weights in such groups: rounded to integers, or as it is."""
    if activations == "exact":
        return x.astype(np.float64)
    return quantize_activations(x, activations, group_size).values(x.shape[1])


def expert_linear(x: Numbers, w: Any, ids: Numbers, biases: Numbers | None, activations: str) -> NDArray[np.float64]:
    """y [T, k, N] of x [T, K] or [T, k, K]."""
    numbers = bf.dequantize(w, backend="reference").astype(np.float64)
    rows = seen(x.reshape(-1, x.shape[-1]), activations, w.group_size).reshape(x.shape)
    y = np.zeros((*ids.shape, w.shape[1]))
    for t, j in np.ndindex(*ids.shape):
        y[t, j] = numbers[ids[t, j]] @ (rows[t] if x.ndim == 2 else rows[t, j])
        if biases is not None:
            y[t, j] += biases[ids[t, j]].astype(np.float64)
    return y


def activated(gate: Numbers, up: Numbers, activation: str) -> Numbers:
    """h of the gate and up rows, as the papers write it."""
    if activation == "clamped_silu":
        g = np.minimum(gate, 7.0)
        return g / (1 + np.exp(-1.702 * g)) * (np.clip(up, -7.0, 7.0) + 1)
    if activation == "gelu":
        return 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    return gate / (1 + np.exp(-gate)) * up


def experts(
    x: Numbers,
    gate_up: Any,
    down: Any,
    ids: Numbers,
    weights: Numbers,
    activation: str = "silu",
    gate_up_biases: Any = None,
    down_biases: Any = None,
    activations: str = "exact",
) -> NDArray[np.float64]:
    """y [T, H]; h is rounded to float32 before it is multiplied."""
    if isinstance(gate_up, tuple):
        biases = gate_up_biases or (None, None)
        gate, up = (expert_linear(x, w, ids, b, activations) for w, b in zip(gate_up, biases, strict=True))
    else:
        both = expert_linear(x, gate_up, ids, gate_up_biases, activations)
        gate, up = both[..., : both.shape[-1] // 2], both[..., both.shape[-1] // 2 :]
    h = activated(gate, up, activation).astype(np.float32)
    y = expert_linear(h, down, ids, down_biases, activations)
    return np.einsum("tk,tkn->tn", weights.astype(np.float64), y)
