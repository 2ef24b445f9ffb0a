"""The parts of a block on an Apple GPU: token mixers and feed-forward parts, each made from its description.

A part takes the normalized input x [rows, hidden] and gives what is added to the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from billfish.backends.metal.decoder import DecoderKernels, Heads
from billfish.backends.metal.experts import open_gate
from billfish.backends.metal.kernels import MATVEC_ROWS, Kernels
from billfish.backends.metal.layout import LEAST_SIZE
from billfish.llm.metal_cache import KeysAndValues, MetalCache, State, States
from billfish.llm.metal_weights import MetalPacker, rounded
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


@dataclass(frozen=True)
class Span:
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


class Pass:
    """Rows of several sequences on their way through the layers."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans
        positions = np.concatenate([np.arange(s.start, s.end) for s in spans])
        padding = np.zeros(max(0, LEAST_SIZE - len(positions)))  # here it is no launch
        self.positions = mx.array(np.concatenate([positions, padding]).astype(np.int32))

    def of_each(self, part: Callable[[Span], mx.array], axis: int = 0) -> mx.array:
        """What a part makes of each sequence, one behind the other."""
        made = [part(span) for span in self.spans]
        return made[0] if len(made) == 1 else mx.concatenate(made, axis=axis)


class Parts:
    """What all parts of a model are made with."""

    def __init__(self, tensors: ModelTensors, kernels: Kernels) -> None:
        self.tensors, self.packer, self.kernels = tensors, MetalPacker(tensors, kernels), DecoderKernels(kernels)
        self.epsilon = tensors.config.norm_epsilon
        self.type = mx.float16  # of activations, in the pass that is being described
        self.ropes = [(mx.array(tensors.frequencies(rope).astype(np.float32)), rope) for rope in tensors.config.ropes]

    def rounded(self, x: mx.array) -> mx.array:
        """As an activation of the pass."""
        return rounded(x, self.type)

    def vector(self, vector: Vector) -> mx.array:
        return mx.array(self.tensors.vector(vector))

    def vector_if(self, vector: Vector | None) -> mx.array | None:
        return None if vector is None else self.vector(vector)

    def norm(self, x: mx.array, weight: mx.array | None) -> mx.array:
        """RMSNorm over the last axis, in float32."""
        return mx.fast.rms_norm(x.astype(mx.float32), weight, self.epsilon)


class Residual:
    """The residual stream float32 [rows, hidden]. What a part adds is taken in together with the next norm."""

    def __init__(self, parts: Parts, x: mx.array) -> None:
        self._parts, self._x = parts, x
        self._added: tuple[mx.array, mx.array | None, float] | None = None

    def add(self, y: mx.array, post_norm: mx.array | None, scale: float) -> None:
        """x += scale post_norm(y). Nothing is added beside it before the next call."""
        self._added = y, post_norm, scale

    def normal(self, weight: mx.array | None) -> mx.array:
        """Its RMSNorm as activations, or itself without a weight."""
        y, post_norm, scale = self._added or (None, None, 1.0)
        parts = self._parts
        self._x, x = parts.kernels.add_norm(
            self._x, y, post_norm, weight, epsilon=parts.epsilon, scale=scale, dtype=parts.type
        )
        self._added = None
        return x

    def value(self) -> mx.array:
        if self._added is not None:
            y, post_norm, scale = self._added
            self._added = None
            y = y.astype(mx.float32) if post_norm is None else self._parts.norm(y, post_norm)
            self._x = self._x + (y if scale == 1 else scale * y)
        return self._x

    def multiply(self, factor: mx.array) -> None:
        self._x = self.value() * factor


class MetalBlock:
    """x += scale post_norm(mixer(norm(x))), then the same with the feed-forward part; see description.Block."""

    def __init__(self, parts: Parts, block: Block) -> None:
        self._scale, vector_if = block.residual_scale, parts.vector_if
        self._mixer_norm, self._mixer_post_norm = vector_if(block.mixer_norm), vector_if(block.mixer_post_norm)
        self._norm, self._post_norm = vector_if(block.feed_forward_norm), vector_if(block.feed_forward_post_norm)
        self._mixer = MIXERS[type(block.mixer)](parts, block.mixer)
        self._feed_forward = FEED_FORWARDS[type(block.feed_forward)](parts, block.feed_forward)
        self._layer_input = None if block.per_layer_input is None else LayerInput(parts, block.per_layer_input)
        self._output_scale = vector_if(block.output_scale)

    def __call__(self, x: Residual, step: Pass, layer: int, inputs: mx.array | None) -> None:
        """inputs: what the layer takes beside the residual stream x."""
        x.add(self._mixer(x.normal(self._mixer_norm), step, layer), self._mixer_post_norm, self._scale)
        x.add(self._feed_forward(x.normal(self._norm), x), self._post_norm, self._scale)
        if self._layer_input is not None:
            assert inputs is not None
            self._layer_input(x, inputs)
        if self._output_scale is not None:
            x.multiply(self._output_scale)

    def watch(self, see: Callable[[int, mx.array], object]) -> None:
        """Have `see` told of what the products multiply: see(number, x), numbered as `LayerInput` of the CPU's decoder.
        Of a block whose feed-forward part is dense."""
        mixer, feed_forward = self._mixer, self._feed_forward
        products = ((mixer, mixer.first), (mixer, "_output"), (feed_forward, "_gate_up"), (feed_forward, "_down"))
        for number, (part, name) in enumerate(products):
            setattr(part, name, Watched(getattr(part, name), partial(see, number)))


class Watched:
    """A product whose inputs somebody sees."""

    def __init__(self, product: Any, see: Callable[[mx.array], object]) -> None:
        self._product, self._see = product, see

    @property
    def sizes(self) -> tuple[int, ...]:
        sizes: tuple[int, ...] = self._product.sizes
        return sizes

    def __call__(self, x: mx.array) -> Any:
        self._see(x)
        return self._product(x)

    def together(self, x: mx.array) -> Any:
        self._see(x)
        return self._product.together(x)

    def with_last_apart(self, x: mx.array) -> Any:
        self._see(x)
        return self._product.with_last_apart(x)


class LayerInput:
    """Gemma's input per layer: see description.PerLayerInput."""

    def __init__(self, parts: Parts, part: PerLayerInput) -> None:
        self._parts, self._activation = parts, part.activation
        self._gate, self._projection = parts.packer.linear(part.gate), parts.packer.linear(part.projection)
        self._post_norm = parts.vector(part.post_norm)

    def __call__(self, x: Residual, inputs: mx.array) -> None:
        gate = self._gate(x.normal(None)).astype(mx.float32)
        x.add(self._projection(self._parts.rounded(open_gate(gate, inputs, self._activation))), self._post_norm, 1.0)


# ---- token mixers ----------------------------------------------------------------------------------------------------


class AttentionPart:
    """Grouped-query attention. Sequences share the matmuls, and each attends by itself."""

    first = "_qkv"  # the product with x

    def __init__(self, parts: Parts, about: Attention) -> None:
        self._parts, self._about = parts, about
        self._qkv = parts.packer.joined([matrix for matrix in (about.q, about.k, about.v) if matrix is not None])
        self._output = parts.packer.linear(about.output)
        self._q_norm, self._k_norm = parts.vector_if(about.q_norm), parts.vector_if(about.k_norm)
        self._joint = self._q_norm is not None and self._q_norm.size != about.head_size  # norms over all heads
        self._sinks = parts.vector_if(about.sinks)
        frequencies, rope = (None, None) if about.rope is None else parts.ropes[about.rope]
        self._heads = Heads(
            about.heads,
            0 if about.k is None else about.kv_heads,
            about.head_size,
            frequencies,
            1.0 if rope is None else rope.scaling.magnitude,
            rope is not None and rope.adjacent,
            about.gated,
            about.v is None,
            None if self._joint else self._q_norm,
            None if self._joint else self._k_norm,
            about.v_norm,
        )

    def __call__(self, x: mx.array, step: Pass, layer: int) -> mx.array:
        about, v = self._about, None
        if self._joint:
            qkv = self._normalized(self._qkv.together(x))
        elif about.v is None:
            qkv = self._qkv.together(x)
        else:
            qkv, v = self._qkv.with_last_apart(x)
        q, kv = self._parts.kernels.rotate(qkv, self._heads, step.positions, self._parts.epsilon, v)
        for span in step.spans if about.k is not None else []:
            held = span.cache.keys[layer]
            span.cache.keys[layer] = held.with_rows(span.start, kv[:, :, span.rows], about.window)
        source = layer if about.shares is None else about.shares
        y = step.of_each(lambda span: self._attend(q[None, :, span.rows], span, source))
        if about.gated:
            gate = qkv[:, : 2 * y.shape[1]].reshape(len(x), about.heads, 2, -1)[:, :, 1].reshape(y.shape)
            y = y.astype(mx.float32) * mx.sigmoid(gate.astype(mx.float32))
        return self._output(y if y.dtype == self._parts.type else self._parts.rounded(y))

    def _normalized(self, qkv: mx.array) -> mx.array:
        q, *kv = mx.split(qkv, np.cumsum(self._qkv.sizes)[:-1].tolist(), axis=-1)
        parts = [self._parts.norm(q, self._q_norm)]
        if kv:
            parts += [self._parts.norm(kv[0], self._k_norm), *(part.astype(mx.float32) for part in kv[1:])]
        return self._parts.rounded(mx.concatenate(parts, axis=-1))

    def _attend(self, q: mx.array, span: Span, source: int) -> mx.array:
        """Queries [1, heads, count, head size] -> outputs [count, heads * head size]. A few attend one by one, so that
        each has the bits that it has alone."""
        if span.count > MATVEC_ROWS:
            return self._attend_to(q, span.cache.keys[source], span.start, span.count)
        held = span.cache.keys[source]
        rows = [self._attend_to(q[:, :, i : i + 1], held, span.start + i, 1) for i in range(span.count)]
        return rows[0] if len(rows) == 1 else mx.concatenate(rows)

    def _attend_to(self, q: mx.array, held: KeysAndValues, start: int, count: int) -> mx.array:
        about = self._about
        if about.temperature is not None:
            growth, length = about.temperature
            positions = np.arange(start, start + count) // length
            q = q * mx.array(1 + growth * np.log1p(positions)).astype(q.dtype)[:, None]
        keys, values = held.seen(start + count, count, about.window)
        mask = _mask(count, keys.shape[2], about.window)
        if about.cap:
            y = _capped(q, keys, values, about.scale, about.cap, mask)
        else:
            sinks = None if self._sinks is None else self._sinks.astype(q.dtype)
            y = mx.fast.scaled_dot_product_attention(q, keys, values, scale=about.scale, mask=mask, sinks=sinks)
        return y.swapaxes(1, 2).reshape(count, -1)  # y[0] would be a launch


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

    first = "_products"

    def __init__(self, parts: Parts, about: GatedDeltaNet) -> None:
        self._parts, self._about = parts, about
        self._products = parts.packer.joined([about.qkv, about.z, about.beta, about.alpha])
        self._convolution, self._output = CausalConvolution(parts, about.convolution), parts.packer.linear(about.output)
        self._decay, self._step = parts.vector(about.decay), parts.vector(about.step)
        self._norm = parts.vector(about.norm)

    def __call__(self, x: mx.array, step: Pass, layer: int) -> mx.array:
        about = self._about
        qkv, z, beta, alpha = (part.astype(mx.float32) for part in self._products(x))
        decay, beta = mx.exp(self._decay * _softplus(alpha + self._step)), mx.sigmoid(beta)
        out = step.of_each(lambda span: self._scan(span, layer, qkv[span.rows], decay[span.rows], beta[span.rows]))
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

    first = "_projection"

    def __init__(self, parts: Parts, about: Mamba2) -> None:
        self._parts, self._about = parts, about
        self._projection, self._output = parts.packer.linear(about.projection), parts.packer.linear(about.output)
        self._convolution = CausalConvolution(parts, about.convolution)
        self._step, self._decay, self._skip = (parts.vector(v) for v in (about.step, about.decay, about.skip))
        self._norm = parts.vector(about.norm)

    def __call__(self, x: mx.array, step: Pass, layer: int) -> mx.array:
        about, size = self._about, self._about.heads * self._about.head_size
        rows = self._projection(x).astype(mx.float32)
        z, mixed, steps = mx.split(rows, [size, size + about.convolution.channels], axis=-1)
        steps = _softplus(steps + self._step)
        out = step.of_each(lambda span: self._scan(span, layer, mixed[span.rows], steps[span.rows]))
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

    first = "_projection"

    def __init__(self, parts: Parts, about: ShortConvolution) -> None:
        self._parts = parts
        self._projection, self._output = parts.packer.linear(about.projection), parts.packer.linear(about.output)
        self._convolution = CausalConvolution(parts, about.convolution)

    def __call__(self, x: mx.array, step: Pass, layer: int) -> mx.array:
        b, c, inner = mx.split(self._projection(x).astype(mx.float32), 3, axis=-1)
        gated = b * inner
        return self._output(self._parts.rounded(c * step.of_each(lambda s: self._convolved(s, layer, gated[s.rows]))))

    def _convolved(self, span: Span, layer: int, rows: mx.array) -> mx.array:
        (tail,) = span.states.get(layer, (None,))
        y, tails = self._convolution(rows, tail, span.cuts)
        for after, kept in zip(span.after, tails, strict=True):
            after[layer] = (kept,)
        return y


# ---- feed-forward parts ----------------------------------------------------------------------------------------------


class DensePart:
    """down(activation(gate x) * up x)."""

    def __init__(self, parts: Parts, about: Dense) -> None:
        assert about.up is not None  # only encoders have no gate
        self._gate_up = parts.packer.gate_up(about.gate, about.up, about.activation)
        self._down = parts.packer.linear(about.down)

    def __call__(self, x: mx.array, residual: Residual) -> mx.array:
        return self._down(self._gate_up(x))


class MixturePart:
    """A mixture of experts. Which experts a row takes is computed on the GPU, and nothing waits for it."""

    def __init__(self, parts: Parts, about: Mixture) -> None:
        self._parts, self._about = parts, about
        self._router = RouterPart(parts, about.router)
        stacks = [about.gate] if about.up is None else [about.gate, about.up]
        self._gate_up = [parts.packer.experts(stack) for stack in stacks]
        self._down = parts.packer.experts(about.down)
        self._shared = None if about.shared is None else DensePart(parts, about.shared)
        self._shared_gate = parts.vector_if(about.shared_gate)

    def __call__(self, x: mx.array, residual: Residual) -> mx.array:
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
        self._bias, self._scale = parts.vector_if(about.selection_bias), parts.vector_if(about.expert_scale)

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Experts uint32 [rows, chosen] and their weights float32."""
        about, logits = self._about, self._matrix(x.astype(mx.float32))
        sigmoid = about.scores == "sigmoid"
        scores = mx.sigmoid(logits) if sigmoid else mx.softmax(logits, axis=-1)
        by = scores if self._bias is None else scores + self._bias
        ids = self.best(by)
        weights = mx.take_along_axis(scores, ids, axis=-1)
        if about.renormalized:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + (SMALLEST_SUM if sigmoid else 0))
        weights = weights * about.scale
        return ids, weights if self._scale is None else weights * self._scale[ids]

    def best(self, scores: mx.array) -> mx.array:
        """The experts of each row."""
        return mx.argsort(-self._of_groups(scores), axis=-1)[:, : self._about.chosen]

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

    def __call__(self, x: mx.array, residual: Residual) -> mx.array:
        norm = self._parts.norm
        routed, inner = residual.normal(self._router_norm), residual.normal(self._mixture_norm)
        mixed = norm(self._mixture.chosen(inner, routed), self._mixture_post_norm)
        return norm(self._dense(x, residual), self._dense_post_norm) + mixed


MIXERS: dict[type, Any] = {
    Attention: AttentionPart,
    GatedDeltaNet: DeltaNetPart,
    ShortConvolution: ShortConvolutionPart,
    Mamba2: Mamba2Part,
}
FEED_FORWARDS: dict[type, Any] = {Dense: DensePart, Mixture: MixturePart, DenseAndMixture: DenseAndMixturePart}
