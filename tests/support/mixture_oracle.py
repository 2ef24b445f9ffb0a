"""What a mixture of experts should give, in NumPy and float64: every kind of router, shared experts, biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import expert_oracle
import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]


@dataclass
class Router:
    """As models/description.py has it, with its numbers."""

    chosen: int
    sigmoid: bool = False
    renormalized: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1
    selection_bias: Numbers | None = None
    expert_scale: Numbers | None = None

    def chosen_of(self, logits: Numbers) -> tuple[Numbers, Numbers]:
        """ids and weights [rows, chosen], the largest score first; of equal ones the lower index."""
        logits = logits.astype(np.float64)
        if self.sigmoid:
            scores = 1 / (1 + np.exp(-logits))
        else:
            scores = np.exp(logits - logits.max(axis=1, keepdims=True))
            scores /= scores.sum(axis=1, keepdims=True)
        by = scores.astype(np.float32) if self.sigmoid or self.selection_bias is not None else logits
        if self.selection_bias is not None:
            by = by + self.selection_bias
        by = by.astype(np.float64)
        if self.groups > 1:
            groups = by.reshape(len(by), self.groups, -1)
            sums = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
            used = np.argsort(-sums, axis=1, kind="stable")[:, : self.groups_used]
            there = np.zeros(sums.shape, bool)
            np.put_along_axis(there, used, True, axis=1)
            by = np.where(there[:, :, None], groups, -np.inf).reshape(by.shape)
        ids = np.argsort(-by, axis=1, kind="stable")[:, : self.chosen].astype(np.int32)
        weights = np.take_along_axis(scores, ids, axis=1)
        if self.renormalized:
            weights = weights / (weights.sum(axis=1, keepdims=True) + (1e-20 if self.sigmoid else 0))
        weights = weights * self.scale
        return ids, weights if self.expert_scale is None else weights * self.expert_scale[ids]


@dataclass(frozen=True)
class RouterKind:
    """A router whose vectors are random."""

    router: Router
    biased: bool = False
    scaled: bool = False

    def made(self, rng: np.random.Generator, experts: int) -> Router:
        bias = (0.3 * rng.standard_normal(experts)).astype(np.float32) if self.biased else None
        scale = (0.5 + rng.random(experts)).astype(np.float32) if self.scaled else None
        return Router(**(vars(self.router) | {"selection_bias": bias, "expert_scale": scale}))


ROUTERS = {
    "softmax": RouterKind(Router(3)),
    "softmax, not renormalized": RouterKind(Router(3, renormalized=False, scale=1.5)),
    "softmax, biased": RouterKind(Router(3), biased=True),
    "softmax, scaled by expert": RouterKind(Router(2), scaled=True),
    "sigmoid": RouterKind(Router(3, sigmoid=True, scale=2.5), biased=True),
    "sigmoid, not renormalized": RouterKind(Router(3, sigmoid=True, renormalized=False)),
    "sigmoid, groups": RouterKind(Router(3, sigmoid=True, scale=1.5, groups=4, groups_used=2), biased=True),
    "softmax, groups": RouterKind(Router(2, groups=4, groups_used=1)),
}


def mixture(
    x: Numbers,
    ids: Numbers,
    weights: Numbers,
    gate: Numbers,
    up: Numbers,
    down: Numbers,
    activation: str,
    biases: tuple[Numbers, Numbers, Numbers] | None = None,
) -> Numbers:
    """y [rows, hidden] of x, with matrices [experts, n, k] as numbers, in float64."""
    y = np.zeros((len(x), down.shape[1]))
    for e in np.unique(ids):
        rows, places = np.nonzero(ids == e)
        own = x[rows].astype(np.float64)
        g, u = own @ gate[e].T.astype(np.float64), own @ up[e].T.astype(np.float64)
        if biases is not None:
            g, u = g + biases[0][e], u + biases[1][e]
        out = expert_oracle.activated(g, u, activation) @ down[e].T.astype(np.float64)
        if biases is not None:
            out = out + biases[2][e]
        y[rows] += weights[rows, places, None] * out
    return y
