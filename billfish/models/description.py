"""What a model is made of: blocks of a token mixer and a feed-forward part, with every tensor named.

An architecture makes one of these (`Architecture.model`), and each device executes it. Names of tensors are GGUF's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from billfish.models.rope import Rope

Bias = Literal["required", "allowed", "none"]
# Of a feed-forward part: those of core/mixture.py, and GELU by its own formula instead of that with tanh.
Activation = Literal["silu", "gelu", "clamped_silu", "gelu_erf"]
Pooling = Literal["mean", "cls", "last", "rank"]  # what makes one vector of a text's hidden states, or scores


@dataclass(frozen=True)
class Vector:
    """A tensor of one axis. name: with its suffix. factor: what its numbers are multiplied with. stored: its shape in
    GGUF, where that has an axis of length 1 beside it."""

    name: str
    size: int
    factor: float = 1.0
    stored: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerNorm(Vector):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias. The vector is the weight; where a Vector alone stands for
    a norm, that is RMSNorm. of_residual: what it gives is the residual stream, too, as behind the parts of BERT."""

    bias: Vector | None = None
    of_residual: bool = False


@dataclass(frozen=True)
class Matrix:
    """A matrix [rows, columns]. It is `name`.weight in the file, or some of its rows: from `first` on, or `chosen`."""

    name: str
    rows: int
    columns: int
    bias: Bias = "allowed"
    first: int = 0
    joined: int = 0  # rows of the file's matrix, where that holds other matrices, too; 0: it does not
    chosen: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """In the file."""
        return self.joined or self.rows, self.columns


@dataclass(frozen=True)
class Stack:
    """The matrices [rows, columns] of all experts."""

    name: str
    experts: int
    rows: int
    columns: int
    bias: Bias = "allowed"

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.experts, self.rows, self.columns


@dataclass(frozen=True)
class Convolution:
    """A causal convolution over the last `taps` tokens, each channel for itself: `name`.weight [channels, taps]. It
    is never quantized."""

    name: str
    channels: int
    taps: int
    bias: Bias = "none"


# ---- token mixers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention. Scores are `scale` q k; a cap c makes them c tanh(s / c)."""

    heads: int
    kv_heads: int
    head_size: int
    q: Matrix
    output: Matrix
    k: Matrix | None  # None: the layer attends to the keys and values of layer `shares`
    v: Matrix | None  # None beside k: values are keys before their norm and rotation
    scale: float
    rope: int | None = 0  # index into Model.ropes; None: no positions
    window: int = 0  # positions a token attends to, its own the last; 0: all
    cap: float = 0.0
    q_norm: Vector | None = None  # of each head; of all heads together where it is as long as they are
    k_norm: Vector | None = None
    v_norm: bool = False  # RMSNorm of each value head, without weights
    sinks: Vector | None = None  # for each head, one more score in its softmax, without a value
    temperature: tuple[float, int] | None = None  # (a, n): scores at position p are multiplied by 1 + a ln(1 + p // n)
    gated: bool = False  # q has rows of a gate behind those of each head; the output is multiplied with its sigmoid
    shares: int | None = None  # an earlier layer
    bidirectional: bool = (
        False  # tokens see those behind them, too: with a window, up to window / 2 away on either side
    )


@dataclass(frozen=True)
class GatedDeltaNet:
    """Linear attention with a state S [key size, value size] per value head, updated by the gated delta rule:

    q, k, v = SiLU(convolution(qkv x)), q and k of length 1, q / sqrt(key size)
    S *= exp(decay softplus(alpha x + step)); S += k (sigmoid(beta x) (v - S^T k))^T; out = S^T q

    and last output(norm(out) * SiLU(z x)).
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    tiled: bool  # value head i goes with key head i % key_heads; else neighbours share a key head
    qkv: Matrix
    z: Matrix
    beta: Matrix
    alpha: Matrix
    convolution: Convolution
    decay: Vector
    step: Vector
    norm: Vector  # of each value head
    output: Matrix

    @property
    def state_numbers(self) -> int:
        """Float32 numbers that a sequence keeps: the states, and the last inputs of the convolution."""
        return self.value_heads * self.key_size * self.value_size + _tail(self.convolution)


@dataclass(frozen=True)
class ShortConvolution:
    """Two gates around a causal convolution: out(c * conv(b * x)), with b, c and x rows of one product."""

    projection: Matrix
    convolution: Convolution
    output: Matrix

    @property
    def state_numbers(self) -> int:
        return _tail(self.convolution)


@dataclass(frozen=True)
class Mamba2:
    """A selective state space with a state S [state size, head size] per head. Rows of the projection are those of z,
    of x, b and c, which go through SiLU(convolution), and of the steps, one for each head:

    t = softplus(steps + step); S = exp(decay t) S + b (t x)^T; out = S^T c + skip x

    and last output(norm(out * SiLU(z))). Heads of a group share b and c.
    """

    heads: int
    head_size: int
    state_size: int
    groups: int
    projection: Matrix
    convolution: Convolution
    step: Vector
    decay: Vector
    skip: Vector
    norm: Vector
    output: Matrix

    @property
    def state_numbers(self) -> int:
        return self.heads * self.state_size * self.head_size + _tail(self.convolution)


def _tail(convolution: Convolution) -> int:
    return (convolution.taps - 1) * convolution.channels


Mixer = Attention | GatedDeltaNet | ShortConvolution | Mamba2

# ---- feed-forward parts --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dense:
    """down(activation(gate x) * up x); without `up`, down(activation(gate x))."""

    size: int
    gate: Matrix
    up: Matrix | None
    down: Matrix
    activation: Activation = "silu"


@dataclass(frozen=True)
class Router:
    """How a token chooses experts: those with the largest scores. Of equal scores the lower index goes first.

    A score is what `scores` makes of a logit. `selection_bias` is added for the choice alone. Of `groups` of
    neighbours, only the `groups_used` with the largest sums of their two best scores are chosen from.
    """

    matrix: Matrix
    chosen: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalized: bool = True  # the weights of a token's experts sum to 1
    scale: float = 1.0  # of all weights
    selection_bias: Vector | None = None
    expert_scale: Vector | None = None  # of each expert's weight
    groups: int = 1
    groups_used: int = 1


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts. Each is a gated feed-forward part of `size`. Beside the chosen ones there may be one for
    all tokens, times the sigmoid of a product with `shared_gate` where there is one."""

    experts: int
    size: int
    router: Router
    gate: Stack
    up: Stack | None  # None: `gate` has the rows of both, all gate rows first
    down: Stack
    activation: Activation = "silu"
    shared: Dense | None = None
    shared_gate: Vector | None = None


@dataclass(frozen=True)
class DenseAndMixture:
    """A dense part and experts side by side, each with norms of its own. The router's is apart from the experts'. The
    norm of the block is the dense part's."""

    dense: Dense
    mixture: Mixture
    dense_post_norm: Vector
    router_norm: Vector
    mixture_norm: Vector
    mixture_post_norm: Vector


FeedForward = Dense | Mixture | DenseAndMixture

# ---- the model -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PerLayerInput:
    """x += post_norm(projection(activation(gate x) * e)): e is the layer's part of PerLayerEmbedding."""

    gate: Matrix
    projection: Matrix
    post_norm: Vector
    activation: Activation = "silu"


@dataclass(frozen=True)
class PerLayerEmbedding:
    """For each token and layer `size` numbers: (norm(projection_scale projection(x)) + scale embedding) / sqrt(2),
    where x is the scaled embedding of the model."""

    size: int
    embedding: Matrix
    projection: Matrix
    norm: Vector
    scale: float
    projection_scale: float


@dataclass(frozen=True)
class Classifier:
    """Scores of a text [rows of output]: output(norm(activation(dense x))), where x is the hidden state that `pooling`
    chooses. Without dense, activation and norm are none."""

    output: Matrix
    dense: Matrix | None = None
    activation: Literal["tanh", "gelu_erf"] = "tanh"
    norm: LayerNorm | None = None
    pooling: Pooling = "cls"


@dataclass(frozen=True)
class Encoder:
    """What a model has that reads a text at once, from both sides. It makes vectors, not answers, and its head is not
    used. The first norm is that of embeddings: their sum with a row of `positions` for each token, and one of
    `token_types`, the second of which is for the second text of a pair."""

    positions: Matrix | None = None
    token_types: Matrix | None = None
    classifier: Classifier | None = None


@dataclass(frozen=True)
class Block:
    """x += scale post_norm(mixer(norm(x))), then the same with the feed-forward part. A norm that is None is left out.
    Last, x is multiplied with the number `output_scale`."""

    mixer: Mixer
    feed_forward: FeedForward
    mixer_norm: Vector | None
    feed_forward_norm: Vector | None
    mixer_post_norm: Vector | None = None
    feed_forward_post_norm: Vector | None = None
    residual_scale: float = 1.0
    per_layer_input: PerLayerInput | None = None
    output_scale: Vector | None = None


@dataclass(frozen=True)
class MtpBlock:
    """Multi-token prediction: of the hidden state behind a token (after the last norm) and of the next token, the token
    behind that one. x = projection([norm(embedding), norm(hidden state)]); head(norm(block(x))), with the model's head.
    """

    projection: Matrix
    embedding_norm: Vector
    hidden_norm: Vector
    block: Block
    norm: Vector


@dataclass(frozen=True)
class Model:
    """A language model: a decoder, or an encoder."""

    name: str
    architecture: str
    hidden: int
    vocabulary: int
    context: int
    norm_epsilon: float
    blocks: tuple[Block, ...]
    ropes: tuple[Rope, ...]
    final_norm: Vector
    embedding: Matrix
    head: Matrix  # often the embedding
    embedding_scale: float = 1.0
    logit_scale: float = 1.0  # logits are divided by it
    logit_cap: float = 0.0  # c, where logits become c tanh(s / c); 0: none
    per_layer_embedding: PerLayerEmbedding | None = None
    encoder: Encoder | None = None
    pooling: Pooling = "mean"  # of vectors of texts
    normalized: bool = True  # these vectors have length 1
    draft_blocks: int = 0  # behind the others in a file: they predict a second token, and are not in `blocks`
    mtp: MtpBlock | None = None  # the first of them, where the file has it and it can be run
    unused: tuple[str, ...] = ()  # tensors that a file may have, and that nothing is computed with

    @property
    def layers(self) -> int:
        return len(self.blocks)

    def source(self, layer: int) -> int | None:
        """The layer whose keys and values a layer attends to, if they are another's."""
        mixer = self.blocks[layer].mixer
        return mixer.shares if isinstance(mixer, Attention) else None

    @property
    def has_experts(self) -> bool:
        return any(not isinstance(block.feed_forward, Dense) for block in self.blocks)


def tensors_in(part: Any) -> Iterator[Vector | Matrix | Stack | Convolution]:
    """All tensors of a part of a description, in the order of its fields."""
    if isinstance(part, (Vector, Matrix, Stack, Convolution)):
        yield part
        if isinstance(part, LayerNorm) and part.bias is not None:
            yield part.bias
    elif isinstance(part, tuple):
        for each in part:
            yield from tensors_in(each)
    elif is_dataclass(part):
        for field in fields(part):
            yield from tensors_in(getattr(part, field.name))
