"""What a model is made of, from the metadata of its file, or what a config.json says in their words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.errors import ModelError, complaint

CALL = "llm.load"
LARGEST = 1e300  # of numbers in metadata: larger ones, and those that are none, are refused


@dataclass(frozen=True)
class Architecture:
    """What families of models differ in; all else they have in common, or say in their metadata."""

    rope: str = "halves"  # which numbers of a head rotate together: i and i + half, or "adjacent" 2i and 2i + 1
    biases: bool = False  # of the q, k and v products
    head_norms: bool = False  # RMSNorm of every head's q and k, before they rotate
    gate: str = "silu"  # what the gate of the feed-forward part goes through, or "gelu"
    scaled_embedding: bool = False  # embedding times sqrt(hidden)


# llama.cpp's converter reorders the rows of q and k of llama models, so that pairs are adjacent; the others' it leaves.
ARCHITECTURES = {
    "llama": Architecture(rope="adjacent"),
    "qwen2": Architecture(biases=True),
    "qwen3": Architecture(head_norms=True),
    "gemma": Architecture(gate="gelu", scaled_embedding=True),
}


@dataclass(frozen=True)
class Config:
    """The sizes of a model."""

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    context: int
    norm_epsilon: float
    rope_base: float
    rope_size: int
    rope_scale: float  # positions are divided by it

    @property
    def family(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    def rope_frequencies(self, factors: NDArray[np.float32] | None) -> NDArray[np.float64]:
        """The angle by which each pair rotates from one position to the next, [rope_size / 2]."""
        exponents = np.arange(0, self.rope_size, 2) / self.rope_size
        frequencies = self.rope_base**-exponents / self.rope_scale
        return frequencies if factors is None else frequencies / factors


def read_config(metadata: Mapping[str, Any], vocabulary: int) -> Config:
    """The configuration that GGUF's fields describe; raises if it is of a kind we do not run."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ModelError(complaint(CALL, "general.architecture", repr(architecture), f"{', '.join(ARCHITECTURES)}"))

    def number(name: str, default: float | None = None) -> float:
        value = metadata.get(f"{architecture}.{name}", default)
        if value is None:
            raise ModelError(complaint(CALL, f"{architecture}.{name}", "no such field", "a file that has it"))
        good = isinstance(value, (int, float)) and -LARGEST < value < LARGEST  # a NaN is neither
        _refuse(not good, name, repr(value), "a number")
        return value

    heads, hidden = int(number("attention.head_count")), int(number("embedding_length"))
    _refuse(heads < 1 or hidden < 1, "attention.head_count", f"{heads} heads of {hidden}", "positive sizes")
    head_size = int(number("attention.key_length", hidden // heads))
    experts, value_size = number("expert_count", 0), number("attention.value_length", head_size)
    _refuse(experts > 0, "expert_count", experts, "no mixture of experts")
    _refuse(value_size != head_size, "attention.value_length", value_size, f"{head_size}, the length of keys")
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    _refuse(scaling not in ("none", "linear"), "rope.scaling.type", repr(scaling), "'none' or 'linear'")
    config = Config(
        name=str(metadata.get("general.name", architecture)),
        architecture=architecture,
        layers=int(number("block_count")),
        hidden=hidden,
        heads=heads,
        kv_heads=int(number("attention.head_count_kv", heads)),
        head_size=head_size,
        feed_forward=int(number("feed_forward_length")),
        vocabulary=vocabulary,
        context=int(number("context_length")),
        norm_epsilon=float(number("attention.layer_norm_rms_epsilon")),
        rope_base=float(number("rope.freq_base", 10000.0)),
        rope_size=int(number("rope.dimension_count", head_size)),
        rope_scale=float(number("rope.scaling.factor", 1.0)) if scaling == "linear" else 1.0,
    )
    _refuse(config.layers < 1, "block_count", config.layers, "at least one layer, whose tensors tell all sizes")
    _refuse(config.kv_heads < 1 or heads % config.kv_heads != 0, "attention.head_count_kv", config.kv_heads,
            f"a divisor of {heads} heads")  # fmt: skip
    _refuse(head_size < 1 or head_size % 16 != 0, "attention.key_length", head_size, "a multiple of 16")
    _refuse(config.rope_size not in range(2, head_size + 1, 2), "rope.dimension_count", config.rope_size,
            f"an even number up to {head_size}")  # fmt: skip
    return config


def _refuse(condition: bool, name: str, got: object, takes: str) -> None:
    if condition:
        raise ModelError(complaint(CALL, name, got, takes))


def embedding_scale(config: Config) -> np.float32:
    """What the embedding of a token is multiplied with."""
    return np.float32(math.sqrt(config.hidden) if config.family.scaled_embedding else 1.0)
