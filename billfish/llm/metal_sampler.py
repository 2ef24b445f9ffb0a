"""Sampling on an Apple GPU: `sampler.choose_token` as a graph of MLX's operations."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from billfish.llm.sampler import UNIT, Sampler, Sampling


def next_tokens(logits: mx.array, samplers: Sequence[Sampler]) -> mx.array:
    """The next token of each row of logits float32 [rows, vocabulary], uint32 [rows]. Samplers need no scores."""
    if all(sampler.takes_best for sampler in samplers):
        return mx.argmax(logits, axis=-1)
    return mx.stack([_chosen(row, sampler.how, sampler.peek()) for row, sampler in zip(logits, samplers, strict=True)])


def _chosen(logits: mx.array, how: Sampling, random: float) -> mx.array:
    if how.temperature == 0:
        return mx.argmax(logits)
    powers = mx.exp((logits - logits.max()) / how.temperature)
    weights = (powers * UNIT).astype(mx.uint64)  # whole numbers, so that no sum depends on its order
    if how.top_k or how.top_p < 1:
        weights = mx.where(_kept(weights, how), weights, 0)
    sums = mx.cumsum(weights)
    passed = (random * sums[-1].astype(mx.float32)).astype(mx.uint64)
    return (sums <= passed).sum().astype(mx.uint32)


def _kept(weights: mx.array, how: Sampling) -> mx.array:
    """Which tokens top_k and then top_p leave; of equal ones, the first."""
    best = mx.sort(weights)[::-1]
    if how.top_k:
        best = best[: how.top_k]
    least = (how.top_p * best.sum().astype(mx.float32)).astype(mx.uint64)
    enough = (mx.cumsum(best) < least).sum() + 1
    limit = mx.take(best, mx.minimum(enough, len(best)) - 1)
    equal = weights == limit
    return (weights > limit) | (equal & (mx.cumsum(equal.astype(mx.int32)) <= enough - (weights > limit).sum()))
