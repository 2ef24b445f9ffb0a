"""A decoder's forward pass in plain NumPy, from the file's weights as the `gguf` package decodes them.

Written from the papers, with nothing of billfish.llm in it: one token sequence, all positions at once, float64.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Linear = Callable[[np.ndarray, np.ndarray], np.ndarray]


def exact(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x @ w.T


class Oracle:
    """`logits(tokens)`; `linear` computes the products, so that rounded activations can be put in its place."""

    def __init__(self, path: str | Path, linear: Linear = exact, dtype: Any = np.float64) -> None:
        reader = gguf.GGUFReader(path)
        self.field = {name: field.contents() for name, field in reader.fields.items() if "tokenizer" not in name}
        self.architecture = self.field["general.architecture"]
        self.weights = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(tuple(t.shape[::-1])).astype(dtype)
            for t in reader.tensors
        }
        self.linear = linear

    def about(self, name: str, default: Any = None) -> Any:
        return self.field.get(f"{self.architecture}.{name}", default)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        epsilon = float(self.about("attention.layer_norm_rms_epsilon"))
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * self.weights[name]

    def product(self, x: np.ndarray, name: str) -> np.ndarray:
        y = self.linear(x, self.weights[f"{name}.weight"])
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def rotated(self, x: np.ndarray) -> np.ndarray:
        """x [tokens, heads, size], each pair turned by position times its frequency, as complex numbers."""
        size = self.about("rope.dimension_count", x.shape[-1])
        frequency = self.about("rope.freq_base", 10000.0) ** (-np.arange(0, size, 2) / size)
        if "rope_freqs.weight" in self.weights:
            frequency = frequency / self.weights["rope_freqs.weight"]
        if self.about("rope.scaling.type") == "linear":
            frequency = frequency / self.about("rope.scaling.factor")
        turn = np.exp(1j * np.arange(len(x))[:, None] * frequency)[:, None, :]
        part, rest = x[..., :size], x[..., size:]
        if self.architecture == "llama":
            z = (part[..., 0::2] + 1j * part[..., 1::2]) * turn
            return np.concatenate([np.stack([z.real, z.imag], -1).reshape(part.shape), rest], -1).astype(x.dtype)
        z = (part[..., : size // 2] + 1j * part[..., size // 2 :]) * turn
        return np.concatenate([z.real, z.imag, rest], -1).astype(x.dtype)

    def attention(self, x: np.ndarray, layer: str) -> np.ndarray:
        heads = self.about("attention.head_count")
        kv_heads = self.about("attention.head_count_kv", heads)
        q, k, v = (self.product(x, f"{layer}.attn_{name}") for name in "qkv")
        q, k, v = q.reshape(len(x), heads, -1), k.reshape(len(x), kv_heads, -1), v.reshape(len(x), kv_heads, -1)
        if f"{layer}.attn_q_norm.weight" in self.weights:
            q, k = self.norm(q, f"{layer}.attn_q_norm.weight"), self.norm(k, f"{layer}.attn_k_norm.weight")
        q, k = self.rotated(q), np.repeat(self.rotated(k), heads // kv_heads, axis=1)
        q, k, v = (part.swapaxes(0, 1) for part in (q, k, np.repeat(v, heads // kv_heads, axis=1)))
        mixed = self.mix(q / np.sqrt(q.shape[-1]).astype(x.dtype), k, v)
        return self.product(mixed.swapaxes(0, 1).reshape(len(x), -1), f"{layer}.attn_output")

    def mix(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Values [heads, tokens, size], weighted by how well the keys of earlier tokens match."""
        scores = np.where(np.tri(q.shape[1], dtype=bool), q @ k.swapaxes(1, 2), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return weights @ v

    def feed_forward(self, x: np.ndarray, layer: str) -> np.ndarray:
        gate, up = self.product(x, f"{layer}.ffn_gate"), self.product(x, f"{layer}.ffn_up")
        if self.architecture == "gemma":
            gate = 0.5 * gate * (1 + np.tanh(float(np.sqrt(2 / np.pi)) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        return self.product(gate * up, f"{layer}.ffn_down")

    def hidden(self, tokens: list[int]) -> np.ndarray:
        x = self.weights["token_embd.weight"][tokens]
        if self.architecture == "gemma":
            x = x * np.sqrt(x.shape[-1]).astype(x.dtype)
        for i in range(self.about("block_count")):
            x = x + self.attention(self.norm(x, f"blk.{i}.attn_norm.weight"), f"blk.{i}")
            x = x + self.feed_forward(self.norm(x, f"blk.{i}.ffn_norm.weight"), f"blk.{i}")
        return self.norm(x, "output_norm.weight")

    def logits(self, tokens: list[int]) -> np.ndarray:
        return self.product(self.hidden(tokens), "output" if "output.weight" in self.weights else "token_embd")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def divergence(p_logits: np.ndarray, q_logits: np.ndarray) -> float:
    """The mean over positions of KL(p || q), in nats."""
    p, q = log_softmax(p_logits), log_softmax(q_logits)
    return float((np.exp(p) * (p - q)).sum(-1).mean())
