"""The parts of a block on an Apple GPU: token mixers and feed-forward parts, each made from its description.

A part takes the normalized input x [rows, hidden] and gives what is added to the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from billfish.backends.metal.experts import open_gate
from billfish.backends.metal.kernels import Kernels
from billfish.llm.metal_cache import MetalCache, State, States
from billfish.llm.metal_weights import MetalPacker
from billfish.llm.model_weights import ModelTensors
from billfish.models.description import (
    Attention,
    Block,
    Convolution,
    Dense,
    DenseAndMixture,
    GatedDeltaNet,
    Mamba2,
    Mixture,
    PerLayerInput,
    Router,
    ShortConvolution,
    Vector,
)

LENGTH_EPSILON = 1e-6  # of keys and queries that get the length 1
SMALLEST_SUM = 1e-20  # of the scores of a token's experts
LARGEST = 65504.0  # of float16


class Span(NamedTuple):
    """The rows of one sequence in a pass."""

    cache: MetalCache
    row: int
    start: int  # the position of the first one
    count: int
    states: States  # of recurrent layers, before the rows
    cuts: tuple[int, ...]  # numbers of rows behind which recurrent states are kept; the last is `count`
    after: tuple[dict[int, State], ...]  # the states behind each cut, as layers make them

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.count)

    @property
    def end(self) -> int:
        return self.start + self.count


class Parts:
    """What all parts of a model are made with."""

    def __init__(self, tensors: ModelTensors, kernels: Kernels) -> None:
        self.tensors, self.kernels, self.packer = tensors, kernels, MetalPacker(tensors, kernels)
        self.epsilon = tensors.config.norm_epsilon
        self.type = mx.float16  # of activations, in the pass that is being described
        # MLX takes wavelengths, not frequencies.
        self.ropes = [(mx.array((1 / tensors.frequencies(r)).astype(np.float32)), r) for r in tensors.config.ropes]

    def rounded(self, x: mx.array) -> mx.array:
        """As an activation: float16, where no number becomes infinite, or float32."""
        return mx.clip(x, -LARGEST, LARGEST).astype(mx.float16) if self.type == mx.float16 else x.astype(mx.float32)

    def vector(self, vector: Vector | None) -> mx.array | None:
        return None if vector is None else mx.array(self.tensors.vector(vector))

    def norm(self, x: mx.array, weight: mx.array | None) -> mx.array:
        """RMSNorm over the last axis, in float32."""
        return mx.fast.rms_norm(x.astype(mx.float32), weight, self.epsilon)

    def rotated(self, heads: mx.array, rope: int | None, start: int) -> mx.array:
        """Heads [1, heads, count, size] of tokens at positions from `start` on."""
        if rope is None:
            return heads
        wavelengths, about = self.ropes[rope]
        if about.scaling.magnitude != 1:
            factors = np.ones(heads.shape[-1], np.float32)
            factors[: about.size] = about.scaling.magnitude
            heads = heads * mx.array(factors)
        return mx.fast.rope(
            heads, about.size, traditional=about.adjacent, base=None, scale=1.0, offset=start, freqs=wavelengths
        )


class MetalBlock:
    """x += scale post_norm(mixer(norm(x))), then the same with the feed-forward part; see description.Block."""

    def __init__(self, parts: Parts, block: Block) -> None:
        self._parts, self._block = parts, block
        self._mixer_norm, self._mixer_post_norm = parts.vector(block.mixer_norm), parts.vector(block.mixer_post_norm)
        self._norm, self._post_norm = parts.vector(block.feed_forward_norm), parts.vector(block.feed_forward_post_norm)
        self._mixer = MIXERS[type(block.mixer)](parts, block.mixer)
        self._feed_forward = FEED_FORWARDS[type(block.feed_forward)](parts, block.feed_forward)
        extra = block.per_layer_input
        self._layer_input = None if extra is None else LayerInput(parts, extra)
        self._output_scale = parts.vector(block.output_scale)

    def __call__(self, x: mx.array, spans: list[Span], layer: int, inputs: mx.array | None) -> mx.array:
        """inputs: what the layer takes beside the residual stream x."""
        x = self._added(x, self._mixer(self._normal(x, self._mixer_norm), spans, layer), self._mixer_post_norm)
        x = self._added(x, self._feed_forward(self._normal(x, self._norm), x), self._post_norm)
        if self._layer_input is not None:
            assert inputs is not None
            x = x + self._layer_input(x, inputs)
        return x if self._output_scale is None else x * self._output_scale

    def _normal(self, x: mx.array, weight: mx.array | None) -> mx.array:
        return self._parts.rounded(x if weight is None else self._parts.norm(x, weight))

    def _added(self, x: mx.array, y: mx.array, post_norm: mx.array | None) -> mx.array:
        y = y.astype(mx.float32) if post_norm is None else self._parts.norm(y, post_norm)
        return x + self._block.residual_scale * y


class LayerInput:
    """Gemma's input per layer: see description.PerLayerInput."""

    def __init__(self, parts: Parts, part: PerLayerInput) -> None:
        self._parts, self._activation = parts, part.activation
        self._gate, self._projection = parts.packer.linear(part.gate), parts.packer.linear(part.projection)
        self._post_norm = parts.vector(part.post_norm)

    def __call__(self, x: mx.array, inputs: mx.array) -> mx.array:
        rounded, norm = self._parts.rounded, self._parts.norm
        gate = self._gate(rounded(x)).astype(mx.float32)
        return norm(self._projection(rounded(open_gate(gate, inputs, self._activation))), self._post_norm)


# ---- token mixers ----------------------------------------------------------------------------------------------------


class AttentionPart:
    """Grouped-query attention. Sequences share the matmuls, and each attends by itself."""

    def __init__(self, parts: Parts, about: Attention) -> None:
        self._parts, self._about = parts, about
        self._qkv = parts.packer.joined([matrix for matrix in (about.q, about.k, about.v) if matrix is not None])
        self._output = parts.packer.linear(about.output)
        self._q_norm, self._k_norm = parts.vector(about.q_norm), parts.vector(about.k_norm)
        sinks = parts.vector(about.sinks)
        self._sinks = sinks

    def __call__(self, x: mx.array, spans: list[Span], layer: int) -> mx.array:
        about = self._about
        q, *kv = self._qkv(x)
        gate = None
        if about.gated:
            both = q.reshape(len(x), about.heads, 2, about.head_size)
            q, gate = both[:, :, 0], both[:, :, 1]
        q = self._heads(q, about.heads, self._q_norm)
        if kv:
            k, v = self._heads(kv[0], about.kv_heads, self._k_norm), self._heads(kv[-1], about.kv_heads, None)
            if about.v_norm:
                v = self._parts.norm(v, None)
        out = []
        for span in spans:
            if kv:
                keys = self._parts.rotated(_by_head(k[span.rows]), about.rope, span.start)
                held = span.cache.keys[layer]
                span.cache.keys[layer] = held.with_rows(span.start, keys, _by_head(v[span.rows]), about.window)
            queries = self._parts.rotated(_by_head(q[span.rows]), about.rope, span.start)
            attended = self._attend(queries, span, layer if about.shares is None else about.shares)
            out.append(attended[0].swapaxes(0, 1).reshape(span.count, -1))
        y = out[0] if len(out) == 1 else mx.concatenate(out)
        if gate is not None:
            y = y.astype(mx.float32) * mx.sigmoid(gate.reshape(y.shape).astype(mx.float32))
        return self._output(self._parts.rounded(y))

    def _heads(self, x: mx.array, heads: int, norm: mx.array | None) -> mx.array:
        """[rows, heads, head size], normalized where the layer does that."""
        shape = (len(x), heads, self._about.head_size)
        if norm is None:
            return x.reshape(shape)
        joint = norm.size != self._about.head_size
        return (
            self._parts.norm(x.reshape(len(x), -1), norm).reshape(shape)
            if joint
            else self._parts.norm(x.reshape(shape), norm)
        )

    def _attend(self, q: mx.array, span: Span, source: int) -> mx.array:
        """Queries [1, heads, count, head size] -> the same of outputs."""
        about, (count, end) = self._about, (span.count, span.end)
        if about.temperature is not None:
            growth, length = about.temperature
            positions = np.arange(span.start, end) // length
            q = q * mx.array((1 + growth * np.log1p(positions)).astype(np.float32))[:, None]
        keys, values = span.cache.keys[source].seen(end, count, about.window)
        mask = _mask(count, keys.shape[2], about.window)
        q = self._parts.rounded(q)
        if about.cap:
            return _capped(q, keys, values, about.scale, about.cap, mask)
        sinks = None if self._sinks is None else self._sinks.astype(q.dtype)
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=about.scale, mask=mask, sinks=sinks)


def _by_head(rows: mx.array) -> mx.array:
    """[count, heads, size] -> [1, heads, count, size]."""
    return rows.swapaxes(0, 1)[None]


def _mask(count: int, keys: int, window: int) -> mx.array | str | None:
    """Which of the last `keys` positions each of the last `count` tokens attends to. None: all."""
    if count == 1:
        return None  # `KeysAndValues.seen` has no more than the window
    if not window or keys <= window:
        return "causal"
    distances = np.arange(keys - count, keys)[:, None] - np.arange(keys)
    return mx.array((distances >= 0) & (distances < window))


def _capped(
    q: mx.array, keys: mx.array, values: mx.array, scale: float, cap: float, mask: mx.array | str | None
) -> mx.array:
    """Attention whose scores s are cap tanh(s / cap), which MLX has no kernel for."""
    _, heads, count, size = q.shape
    kv_heads = keys.shape[1]
    grouped = q.reshape(kv_heads, heads // kv_heads, count, size)
    scores = scale * (grouped @ keys[0][:, None].swapaxes(-1, -2)).astype(mx.float32)
    scores = cap * mx.tanh(scores / cap)
    if mask is not None:
        seen = mx.tri(count, keys.shape[2], keys.shape[2] - count, mx.bool_) if isinstance(mask, str) else mask
        scores = mx.where(seen, scores, -mx.inf)
    y = mx.softmax(scores, axis=-1).astype(q.dtype) @ values[0][:, None]
    return y.reshape(1, heads, count, size)


class CausalConvolution:
    """A causal convolution over the last tokens, each channel for itself."""

    def __init__(self, parts: Parts, about: Convolution) -> None:
        weights, bias = parts.tensors.convolution(about)
        self._about, self._weights = about, mx.array(weights)
        self._bias = None if bias is None else mx.array(bias)

    def __call__(self, rows: mx.array, tail: mx.array | None, cuts: tuple[int, ...]) -> tuple[mx.array, list[mx.array]]:
        """Of rows float32 [count, channels] behind `tail`, the last rows before them: what comes out, and the tail
        behind each cut."""
        taps, count = self._about.taps, len(rows)
        if tail is None:
            tail = mx.zeros((taps - 1, self._about.channels), mx.float32)
        all_rows = mx.concatenate([tail, rows])
        y = sum(
            (all_rows[tap : tap + count] * self._weights[tap] for tap in range(1, taps)),
            all_rows[:count] * self._weights[0],
        )
        return y if self._bias is None else y + self._bias, [all_rows[cut : cut + taps - 1] for cut in cuts]


def _silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def _softplus(x: mx.array) -> mx.array:
    return mx.logaddexp(x, 0.0)


def _pieces(cuts: tuple[int, ...]) -> Iterator[slice]:
    """The rows between cuts."""
    return (slice(first, last) for first, last in zip((0, *cuts), cuts, strict=False))


class DeltaNetPart:
    """A gated delta net: see description.GatedDeltaNet."""

    def __init__(self, parts: Parts, about: GatedDeltaNet) -> None:
        self._parts, self._about = parts, about
        self._products = parts.packer.joined([about.qkv, about.z, about.beta, about.alpha])
        self._convolution, self._output = CausalConvolution(parts, about.convolution), parts.packer.linear(about.output)
        self._decay, self._step = parts.vector(about.decay), parts.vector(about.step)
        self._norm = parts.vector(about.norm)

    def __call__(self, x: mx.array, spans: list[Span], layer: int) -> mx.array:
        about = self._about
        qkv, z, beta, alpha = (part.astype(mx.float32) for part in self._products(x))
        decay, beta = mx.exp(self._decay * _softplus(alpha + self._step)), mx.sigmoid(beta)
        out = mx.concatenate(
            [self._scan(span, layer, qkv[span.rows], decay[span.rows], beta[span.rows]) for span in spans]
        )
        gate = z.reshape(len(x), about.value_heads, about.value_size)
        y = self._parts.norm(out, self._norm) * _silu(gate)
        return self._output(self._parts.rounded(y.reshape(len(x), -1)))

    def _scan(self, span: Span, layer: int, qkv: mx.array, decay: mx.array, beta: mx.array) -> mx.array:
        about, keys = self._about, self._about.key_heads * self._about.key_size
        tail, state = span.states.get(layer, (None, None))
        if state is None:
            state = mx.zeros((about.value_heads, about.value_size, about.key_size), mx.float32)
        mixed, tails = self._convolution(qkv, tail, span.cuts)
        mixed = _silu(mixed)
        by_key = (span.count, about.key_heads, about.key_size)
        q = _length_one(mixed[:, :keys].reshape(by_key)) * about.key_size**-0.5
        k = _length_one(mixed[:, keys : 2 * keys].reshape(by_key))
        v = mixed[:, 2 * keys :].reshape(span.count, about.value_heads, about.value_size)
        out = []
        for rows, after, kept in zip(_pieces(span.cuts), span.after, tails, strict=True):
            arrays = (q[rows], k[rows], v[rows], decay[rows], beta[rows], state)
            y, state = self._parts.kernels.recurrence(*arrays, delta=True, tiled=about.tiled)
            after[layer] = kept, state
            out.append(y)
        return mx.concatenate(out)


def _length_one(x: mx.array) -> mx.array:
    return x * mx.rsqrt(mx.square(x).sum(axis=-1, keepdims=True) + LENGTH_EPSILON)


class Mamba2Part:
    """The scan of Mamba-2: see description.Mamba2."""

    def __init__(self, parts: Parts, about: Mamba2) -> None:
        self._parts, self._about = parts, about
        self._projection, self._output = parts.packer.linear(about.projection), parts.packer.linear(about.output)
        self._convolution = CausalConvolution(parts, about.convolution)
        self._step, self._decay, self._skip = (parts.vector(v) for v in (about.step, about.decay, about.skip))
        self._norm = parts.vector(about.norm)

    def __call__(self, x: mx.array, spans: list[Span], layer: int) -> mx.array:
        about, size = self._about, self._about.heads * self._about.head_size
        rows = self._projection(x).astype(mx.float32)
        z, mixed, steps = mx.split(rows, [size, size + about.convolution.channels], axis=-1)
        steps = _softplus(steps + self._step)
        out = mx.concatenate([self._scan(span, layer, mixed[span.rows], steps[span.rows]) for span in spans])
        y = (out * _silu(z)).reshape(len(x), about.groups, -1)
        y = self._parts.norm(y, None).reshape(len(x), size) * self._norm
        return self._output(self._parts.rounded(y))

    def _scan(self, span: Span, layer: int, rows: mx.array, steps: mx.array) -> mx.array:
        about, size, shared = (
            self._about,
            self._about.heads * self._about.head_size,
            self._about.groups * self._about.state_size,
        )
        tail, state = span.states.get(layer, (None, None))
        if state is None:
            state = mx.zeros((about.heads, about.head_size, about.state_size), mx.float32)
        mixed, tails = self._convolution(rows, tail, span.cuts)
        x, b, c = mx.split(_silu(mixed), [size, size + shared], axis=-1)
        x = x.reshape(span.count, about.heads, about.head_size)
        b, c = (part.reshape(span.count, about.groups, about.state_size) for part in (b, c))
        decay, out = mx.exp(self._decay * steps), []
        for piece, after, kept in zip(_pieces(span.cuts), span.after, tails, strict=True):
            arrays = (c[piece], b[piece], x[piece], decay[piece], steps[piece], state)
            y, state = self._parts.kernels.recurrence(*arrays, delta=False, tiled=False)
            after[layer] = kept, state
            out.append(y)
        return (mx.concatenate(out) + self._skip[:, None] * x).reshape(span.count, size)


class ShortConvolutionPart:
    """Two gates around a causal convolution: see description.ShortConvolution."""

    def __init__(self, parts: Parts, about: ShortConvolution) -> None:
        self._parts = parts
        self._projection, self._output = parts.packer.linear(about.projection), parts.packer.linear(about.output)
        self._convolution = CausalConvolution(parts, about.convolution)

    def __call__(self, x: mx.array, spans: list[Span], layer: int) -> mx.array:
        b, c, inner = mx.split(self._projection(x).astype(mx.float32), 3, axis=-1)
        out, gated = [], b * inner
        for span in spans:
            (tail,) = span.states.get(layer, (None,))
            y, tails = self._convolution(gated[span.rows], tail, span.cuts)
            for after, kept in zip(span.after, tails, strict=True):
                after[layer] = (kept,)
            out.append(y)
        return self._output(self._parts.rounded(c * mx.concatenate(out)))


# ---- feed-forward parts ----------------------------------------------------------------------------------------------


class DensePart:
    """down(activation(gate x) * up x)."""

    def __init__(self, parts: Parts, about: Dense) -> None:
        self._parts, self._activation = parts, about.activation
        self._gate_up, self._down = parts.packer.joined([about.gate, about.up]), parts.packer.linear(about.down)

    def __call__(self, x: mx.array, residual: mx.array) -> mx.array:
        gate, up = (part.astype(mx.float32) for part in self._gate_up(x))
        return self._down(self._parts.rounded(open_gate(gate, up, self._activation)))


class MixturePart:
    """A mixture of experts. Which experts a row takes is computed on the GPU, and nothing waits for it."""

    def __init__(self, parts: Parts, about: Mixture) -> None:
        self._parts, self._about = parts, about
        self._router = RouterPart(parts, about.router)
        stacks = [about.gate] if about.up is None else [about.gate, about.up]
        self._gate_up = [parts.packer.experts(stack) for stack in stacks]
        self._down = parts.packer.experts(about.down)
        self._shared = None if about.shared is None else DensePart(parts, about.shared)
        self._shared_gate = parts.vector(about.shared_gate)

    def __call__(self, x: mx.array, residual: mx.array) -> mx.array:
        y = self.chosen(x, x)
        if self._shared is None:
            return y
        shared = self._shared(x, residual).astype(mx.float32)
        if self._shared_gate is not None:
            shared = shared * mx.sigmoid(x.astype(mx.float32) @ self._shared_gate)[:, None]
        return y + shared

    def chosen(self, x: mx.array, routed: mx.array) -> mx.array:
        """What the experts make of x that the router chooses for `routed`, in float32."""
        ids, weights = self._router(routed)
        parts = [part(x, ids, x.dtype) for part in self._gate_up]
        gate, up = parts if len(parts) == 2 else mx.split(parts[0], 2, axis=-1)
        h = self._parts.rounded(open_gate(gate.astype(mx.float32), up.astype(mx.float32), self._about.activation))
        return (self._down(h, ids, mx.float32) * weights[..., None]).sum(axis=1)


class RouterPart:
    """Which experts a row takes, and with what weights: see description.Router."""

    def __init__(self, parts: Parts, about: Router) -> None:
        self._about, self._matrix = about, parts.packer.linear(about.matrix)
        self._bias, self._scale = parts.vector(about.selection_bias), parts.vector(about.expert_scale)

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Experts uint32 [rows, chosen] and their weights float32."""
        about, logits = self._about, self._matrix(x.astype(mx.float32))
        sigmoid = about.scores == "sigmoid"
        scores = mx.sigmoid(logits) if sigmoid else mx.softmax(logits, axis=-1)
        by = scores if self._bias is None else scores + self._bias
        ids = mx.argsort(-self._of_groups(by), axis=-1)[:, : about.chosen]
        weights = mx.take_along_axis(scores, ids, axis=-1)
        if about.renormalized:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + (SMALLEST_SUM if sigmoid else 0))
        weights = weights * about.scale
        return ids, weights if self._scale is None else weights * self._scale[ids]

    def _of_groups(self, scores: mx.array) -> mx.array:
        """Scores, with those of groups that nothing is chosen from below all others."""
        about = self._about
        if about.groups == 1:
            return scores
        grouped = scores.reshape(len(scores), about.groups, -1)
        best = mx.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
        order = mx.argsort(mx.argsort(-best, axis=-1), axis=-1)
        return mx.where((order < about.groups_used)[..., None], grouped, -mx.inf).reshape(scores.shape)


class DenseAndMixturePart:
    """A dense part and experts side by side: see description.DenseAndMixture."""

    def __init__(self, parts: Parts, about: DenseAndMixture) -> None:
        self._parts = parts
        self._dense, self._mixture = DensePart(parts, about.dense), MixturePart(parts, about.mixture)
        self._dense_post_norm, self._router_norm = parts.vector(about.dense_post_norm), parts.vector(about.router_norm)
        self._mixture_norm, self._mixture_post_norm = (
            parts.vector(about.mixture_norm),
            parts.vector(about.mixture_post_norm),
        )

    def __call__(self, x: mx.array, residual: mx.array) -> mx.array:
        norm, rounded = self._parts.norm, self._parts.rounded
        routed, inner = rounded(norm(residual, self._router_norm)), rounded(norm(residual, self._mixture_norm))
        mixed = norm(self._mixture.chosen(inner, routed), self._mixture_post_norm)
        return norm(self._dense(x, residual), self._dense_post_norm) + mixed


MIXERS = {
    Attention: AttentionPart,
    GatedDeltaNet: DeltaNetPart,
    ShortConvolution: ShortConvolutionPart,
    Mamba2: Mamba2Part,
}
FEED_FORWARDS = {Dense: DensePart, Mixture: MixturePart, DenseAndMixture: DenseAndMixturePart}
