"""A decoder in torch, of the description that all devices execute: for training, which needs gradients.

Hidden states are [tokens, hidden], in float32. Matrices are asked for when a layer runs, so that they may depend on
what is trained. A layer is computed again for its gradients: between layers, only hidden states are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from billfish.core.errors import ModelError, failure
from billfish.core.tensor import QuantizedTensor
from billfish.llm.model_weights import ModelTensors
from billfish.models.description import Attention, Block, Dense, LayerNorm, Matrix, Vector
from billfish.ops.matmul import dequantize

CALL = "tune"
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]  # which give the same bits in every run
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_erf": functional.gelu,
}


class TorchHead:
    """The last norm and the LM head of a model."""

    def __init__(self, tensors: ModelTensors, device: torch.device) -> None:
        self.tensors, self.config, self.device = tensors, tensors.config, device
        self._vectors: dict[Vector, Tensor] = {}
        self._head = self.floats(tensors.matrix(self.config.head))

    def floats(self, tensor: Any) -> Tensor:
        """A tensor of the model in float32, on the device."""
        plain = dequantize(tensor) if isinstance(tensor, QuantizedTensor) else np.asarray(tensor).astype(np.float32)
        return torch.from_numpy(np.ascontiguousarray(plain, np.float32)).to(self.device)

    def _vector(self, vector: Vector) -> Tensor:
        if vector not in self._vectors:
            self._vectors[vector] = self.floats(self.tensors.vector(vector))
        return self._vectors[vector]

    def _norm(self, x: Tensor, vector: Vector | None) -> Tensor:
        if vector is None:
            return x
        if isinstance(vector, LayerNorm):
            bias = None if vector.bias is None else self._vector(vector.bias)
            return functional.layer_norm(x, (x.shape[-1],), self._vector(vector), bias, self.config.norm_epsilon)
        return functional.rms_norm(x, (x.shape[-1],), self._vector(vector), self.config.norm_epsilon)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of hidden states [m, hidden]: [m, vocabulary]."""
        scores = functional.linear(self._norm(hidden, self.config.final_norm), self._head) / self.config.logit_scale
        return _capped(scores, self.config.logit_cap)


class TorchDecoder(TorchHead):
    """A model of attention and dense feed-forward layers.

    weights: gives a matrix [rows, columns] of a layer in float32, on the device.
    computed: is called for each layer in a forward pass, and again when it is computed for its gradients.
    """

    def __init__(
        self,
        tensors: ModelTensors,
        weights: Callable[[Matrix], Tensor],
        device: torch.device,
        computed: Callable[[], object] = lambda: None,
    ) -> None:
        check_supported(tensors)
        super().__init__(tensors, device)
        self._weights, self._computed = weights, computed
        self._biases: dict[Matrix, Tensor | None] = {}
        self._ropes = [
            (torch.tensor(tensors.frequencies(rope), dtype=torch.float64), rope) for rope in self.config.ropes
        ]
        self._angles: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by rope and tokens: windows have few lengths
        self._embedding = tensors.table(self.config.embedding)

    def _multiply(self, x: Tensor, matrix: Matrix) -> Tensor:
        if matrix not in self._biases:
            bias = self.tensors.bias(matrix)
            self._biases[matrix] = None if bias is None else self.floats(bias)
        return functional.linear(x, self._weights(matrix), self._biases[matrix])

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """What the last norm gets, of a text from its beginning."""
        table = self._embedding
        rows = table.take_rows(list(tokens)) if isinstance(table, QuantizedTensor) else table[list(tokens)]
        x = self.floats(rows) * self.config.embedding_scale
        x.requires_grad_()  # so that the first layer, too, is computed again instead of kept
        for block in self.config.blocks:
            x = checkpoint(self._block, block, x, use_reentrant=False)
        return x

    def _block(self, block: Block, x: Tensor) -> Tensor:
        mixer, part = block.mixer, block.feed_forward
        assert isinstance(mixer, Attention)
        assert isinstance(part, Dense)
        self._computed()
        made = self._attend(mixer, self._norm(x, block.mixer_norm))
        x = x + block.residual_scale * self._norm(made, block.mixer_post_norm)
        made = self._feed_forward(part, self._norm(x, block.feed_forward_norm))
        return x + block.residual_scale * self._norm(made, block.feed_forward_post_norm)

    def _feed_forward(self, part: Dense, x: Tensor) -> Tensor:
        opened = ACTIVATIONS[part.activation](self._multiply(x, part.gate))
        return self._multiply(opened if part.up is None else opened * self._multiply(x, part.up), part.down)

    def _attend(self, part: Attention, x: Tensor) -> Tensor:
        assert part.k is not None
        assert part.v is not None
        tokens = len(x)
        q = self._heads(self._multiply(x, part.q), part.heads, part.q_norm, part.rope)
        k = self._heads(self._multiply(x, part.k), part.kv_heads, part.k_norm, part.rope)
        v = self._multiply(x, part.v).view(tokens, part.kv_heads, -1).transpose(0, 1)
        # Not repeat_interleave: on a GPU, its gradient adds up in any order.
        k, v = (each[:, None].expand(-1, part.heads // part.kv_heads, -1, -1).flatten(0, 1) for each in (k, v))
        place = torch.arange(tokens, device=x.device)
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance < (part.window or tokens))
        if part.cap:
            scores = _capped(q @ k.transpose(1, 2) * part.scale, part.cap)
            mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        else:
            whole = {"is_causal": True} if not part.window or part.window >= tokens else {"attn_mask": seen}
            with sdpa_kernel(ATTENTION):
                attend = functional.scaled_dot_product_attention
                mixed = attend(q[None], k[None], v[None], scale=part.scale, **whole)[0]
        return self._multiply(mixed.transpose(0, 1).reshape(tokens, -1), part.output)

    def _heads(self, x: Tensor, heads: int, norm: Vector | None, rope: int | None) -> Tensor:
        """[heads, tokens, head size], normalized and rotated."""
        size = x.shape[-1] // heads
        if norm is not None and norm.size != size:
            x = self._norm(x, norm)
        each = x.view(len(x), heads, size)
        if norm is not None and norm.size == size:
            each = self._norm(each, norm)
        return (each if rope is None else self._rotated(each, rope)).transpose(0, 1)

    def _rotated(self, x: Tensor, number: int) -> Tensor:
        frequencies, rope = self._ropes[number]
        if (number, len(x)) not in self._angles:
            angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
            both = (rope.scaling.magnitude * each for each in (angles.cos(), angles.sin()))
            cos, sin = (each.float().to(x.device)[:, None] for each in both)
            self._angles[number, len(x)] = cos, sin
        cos, sin = self._angles[number, len(x)]
        turned, rest = x[..., : rope.size], x[..., rope.size :]
        a, b = (turned[..., 0::2], turned[..., 1::2]) if rope.adjacent else turned.chunk(2, -1)
        parts = a * cos - b * sin, a * sin + b * cos
        together = torch.stack(parts, -1).flatten(-2) if rope.adjacent else torch.cat(parts, -1)
        return torch.cat((together, rest), -1)


def check_supported(tensors: ModelTensors) -> None:
    """Raises for a model that has other parts than attention and dense feed-forward layers."""
    config = tensors.config
    strange = "an encoder" if config.encoder else "embeddings per layer" if config.per_layer_embedding else ""
    for block in config.blocks:
        mixer, part = block.mixer, block.feed_forward
        if not isinstance(mixer, Attention):
            strange = f"layers of the kind {type(mixer).__name__}"
        elif mixer.sinks or mixer.temperature or mixer.gated or mixer.shares is not None or mixer.v_norm:
            strange = "attention with sinks, gates, temperatures or shared keys"
        elif not isinstance(part, Dense):
            strange = "experts"
        elif part.activation not in ACTIVATIONS or block.output_scale or isinstance(block.mixer_norm, LayerNorm):
            strange = "layers with scales, norms or activations of their own"
    if strange:
        fix = "It trains models of attention and dense feed-forward layers, such as Llama, Qwen 3 and Gemma 2."
        raise ModelError(failure(CALL, f"{config.architecture} has {strange}, which cannot be trained here", fix))


def _capped(scores: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(scores / cap) if cap else scores
