"""What a gated feed-forward part does to its gate and up rows: the names, and the formulas in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import FormatError, complaint

# By the number that kernels know an activation by.
GATES = ("silu", "gelu", "clamped_silu")
# Of "clamped_silu", as gpt-oss has it.
CLAMP, STEEPNESS = 7.0, 1.702


def check_gate(call: str, activation: str) -> str:
    """Raises unless `activation` is one of GATES."""
    if activation not in GATES:
        raise FormatError(complaint(call, "activation", repr(activation), " or ".join(map(repr, GATES))))
    return activation


def open_gate(gate: NDArray[np.float32], up: NDArray[np.float32], activation: str) -> NDArray[np.float32]:
    """h of gate and up, all of one shape: computed in float64, rounded once.

    "silu": silu(gate) * up. "gelu": gelu(gate) * up, by its tanh formula. "clamped_silu": with g = min(gate, 7) and
    u = clamp(up, -7, 7), g * sigmoid(1.702 g) * (u + 1).
    """
    g, u = gate.astype(np.float64), up.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if activation == "clamped_silu":
            g, u = np.minimum(g, CLAMP), np.clip(u, -CLAMP, CLAMP) + 1
            z = STEEPNESS * g
        elif activation == "gelu":
            z = np.sqrt(8 / np.pi) * (g + 0.044715 * g**3)
        else:
            z = g
        return (g / (1 + np.exp(-z)) * u).astype(np.float32)
