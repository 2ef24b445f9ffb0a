"""Attention with an int8 cache, the slow way: what decoder/attention_int8.h computes, in float64."""

from __future__ import annotations

import numpy as np
from llm_oracle import Oracle

SLICE, BLOCK = 256, 64


def rotate(x: np.ndarray) -> np.ndarray:
    """x [..., size] times the Hadamard matrix of the largest power of two that divides the size, part by part."""
    size = x.shape[-1] & -x.shape[-1]
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (x.reshape(*x.shape[:-1], -1, size) @ matrix).reshape(x.shape)


def quantize(x: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers up to `top`, and a scale for each last axis."""
    scale = np.abs(x).max(-1, keepdims=True) / top
    return np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)), scale


class Int8Oracle(Oracle):
    """With keys and values, q and weights rounded as an int8 cache has them."""

    def mix(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        power = q.shape[-1] & -q.shape[-1]
        (q_codes, q_scale), (k_codes, k_scale) = quantize(rotate(q) / power, 127), quantize(rotate(k), 127)
        v_codes, v_scale = quantize(v, 127)
        scores = q_codes @ k_codes.swapaxes(1, 2) * q_scale * k_scale.swapaxes(1, 2)
        scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
        largest, out, total = scores.max(-1, keepdims=True), np.zeros_like(q), 0.0
        for start in range(0, q.shape[1], SLICE):
            part, end = scores[..., start : start + SLICE], start + SLICE
            top = part.max(-1, keepdims=True)
            weights = np.exp(part - np.where(np.isfinite(top), top, 0))
            factor = np.exp(top - largest)
            for at in range(start, min(end, q.shape[1]), BLOCK):
                part = weights[..., at - start : at - start + BLOCK] * v_scale[:, at : at + BLOCK].swapaxes(1, 2)
                codes, scale = quantize(part, 127)
                out += codes @ v_codes[:, at : at + BLOCK] * scale * factor
            total = total + weights.sum(-1, keepdims=True) * factor
        return out / total
