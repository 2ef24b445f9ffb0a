"""What a model is made of, from the metadata of its file, or what a config.json says in their words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from billfish.core.errors import ModelError, bad_argument, failure
from billfish.llm.architectures import ARCHITECTURES as ARCHITECTURES
from billfish.llm.architectures import Architecture, Windows
from billfish.llm.rotary_embedding import Scaling, yarn_magnitude

CALL = "llm.load"
LARGEST = 1e300  # of numbers in metadata: larger ones, and those that are none, are refused
SCALINGS = ("none", "linear", "yarn", "longrope")
SOFTMAX_GATES = (1, 3)  # llama.cpp's numbers for a softmax before or behind the choice of experts


@dataclass(frozen=True)
class LayerKind:
    """What layers of one model may differ in."""

    window: int = 0  # positions that a token sees, its own the last; 0: all
    rotation: int = 0  # 0: as the model's; 1: with the local base; -1: not at all


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of every layer."""

    count: int
    chosen: int  # by each token
    feed_forward: int  # rows of an expert's gate
    shared: int  # rows of the gate of the expert for all tokens; 0: there is none
    renormalized: bool
    scale: float  # of all routing weights


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
    rope_scaling: Scaling
    local_base: float  # of rotations in layers with a window; 0: they rotate as the others
    window: int  # positions that a token sees in layers with a window; 0: no layer has one
    window_pattern: int | tuple[bool, ...]  # every so many-th layer has no window (0: all have one), or which have one
    query_scale: float
    embedding_scale: float
    residual_scale: float  # of what attention and feed-forward part give
    logit_scale: float  # logits are divided by it
    attention_cap: float
    logit_cap: float
    experts: Experts | None

    @property
    def family(self) -> Architecture:
        return ARCHITECTURES[self.architecture]

    def kind(self, layer: int) -> LayerKind:
        pattern = self.window_pattern
        narrow = pattern[layer] if isinstance(pattern, tuple) else pattern == 0 or (layer + 1) % pattern != 0
        window = self.window if narrow else 0
        if self.family.unrotated and (layer + 1) % self.family.unrotated == 0:
            return LayerKind(window, -1)
        return LayerKind(window, 1 if window and self.local_base else 0)

    @property
    def features(self) -> list[str]:
        """What the model has beyond a Llama's parts: a device may not know all of it."""
        c, kinds = self, [self.kind(i) for i in range(self.layers)]
        has = {
            "experts": c.experts is not None,
            "sliding windows": any(kind.window for kind in kinds),
            "attention sinks": c.family.sinks,
            "soft caps": c.attention_cap > 0 or c.logit_cap > 0,
            "norms behind attention and feed-forward part": c.family.post_norms,
            "norms over all heads": c.family.head_norms == "all",
            "layers that rotate differently": any(kind.rotation for kind in kinds),
            "rotations with a magnitude": c.rope_scaling.magnitude != 1,
            "queries with a scale of their own": not math.isclose(c.query_scale, c.head_size**-0.5, rel_tol=1e-6),
            "scaled residuals or logits": c.residual_scale != 1 or c.logit_scale != 1,
        }
        return [name for name, there in has.items() if there]


class Fields:
    """The metadata of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata, self.architecture = metadata, architecture

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self.architecture}.{name}", default)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if value is None:
            raise ModelError(failure(CALL, f"the model has no field {self.architecture}.{name}"))
        good = isinstance(value, (int, float)) and -LARGEST < value < LARGEST  # a NaN is neither
        refuse(not good, name, repr(value), "a number")
        return value

    def size(self, name: str, default: float | None = None) -> int:
        return int(self.number(name, default))

    def positive(self, name: str, default: float | None = None) -> float:
        value = float(self.number(name, default))
        refuse(value <= 0, name, value, "a positive number")
        return value

    def cap(self, name: str, default: float) -> float:
        """c of what becomes c tanh(s / c); 0 for none."""
        value = float(self.number(name, default))
        refuse(value < 0, name, value, "a positive number, or 0 for none")
        return value


def read_config(metadata: Mapping[str, Any], vocabulary: int) -> Config:
    """The configuration that GGUF's fields describe; raises if it is of a kind we do not run."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        problem = f"the architecture {architecture!r} is not supported"
        raise ModelError(failure(CALL, problem, f"Supported are {', '.join(ARCHITECTURES)}."))
    fields, family = Fields(metadata, architecture), ARCHITECTURES[architecture]
    heads, hidden = fields.size("attention.head_count"), fields.size("embedding_length")
    refuse(heads < 1 or hidden < 1, "attention.head_count", f"{heads} heads of {hidden}", "positive sizes")
    head_size = fields.size("attention.key_length", hidden // heads)
    value_size = fields.number("attention.value_length", head_size)
    refuse(value_size != head_size, "attention.value_length", value_size, f"{head_size}, the key length")
    causal = fields.get("attention.causal", True)
    refuse(not causal, "attention.causal", causal, "true (causal attention)")
    layers = fields.size("block_count")
    refuse(layers < 1, "block_count", layers, "at least one layer")
    experts = _experts(fields, family)
    kv_heads = fields.size("attention.head_count_kv", heads)
    refuse(kv_heads < 1 or heads % kv_heads != 0, "attention.head_count_kv", kv_heads, f"a divisor of {heads} heads")
    refuse(head_size < 1 or head_size % 16 != 0, "attention.key_length", head_size, "a multiple of 16")
    rope_size = fields.size("rope.dimension_count", head_size)
    refuse(rope_size not in range(2, head_size + 1, 2), "rope.dimension_count", rope_size,
           f"an even number up to {head_size}")  # fmt: skip
    query_size = hidden // heads if layers == family.wide_queries else head_size
    rope_base = fields.positive("rope.freq_base", 10000.0)
    return Config(
        name=str(metadata.get("general.name", architecture)),
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        feed_forward=fields.size("feed_forward_length", experts.feed_forward if experts else None),
        vocabulary=vocabulary,
        context=fields.size("context_length"),
        norm_epsilon=float(fields.number("attention.layer_norm_rms_epsilon")),
        rope_base=rope_base,
        rope_size=rope_size,
        rope_scaling=_scaling(fields, family, rope_base),
        local_base=_local_base(fields, family.windows),
        window=_window(fields, family.windows),
        window_pattern=_pattern(fields, family.windows, layers),
        query_scale=fields.positive("attention.scale", query_size**-0.5),
        embedding_scale=fields.positive("embedding_scale", math.sqrt(hidden) if family.scaled_embedding else 1.0),
        residual_scale=fields.positive("residual_scale", 1.0),
        logit_scale=fields.positive("logit_scale", 1.0),
        attention_cap=fields.cap("attn_logit_softcapping", family.caps[0]),
        logit_cap=fields.cap("final_logit_softcapping", family.caps[1]),
        experts=experts,
    )


def _scaling(fields: Fields, family: Architecture, base: float) -> Scaling:
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear"))  # the last is of old files
    kind = fields.get("rope.scaling.type", "none" if factor is None else "linear")
    refuse(kind not in SCALINGS, "rope.scaling.type", repr(kind), f"one of {', '.join(SCALINGS)}")
    magnitude = fields.positive("rope.scaling.attn_factor", 1.0)
    if kind == "linear":
        old = fields.positive("rope.scale_linear", 1.0)
        return Scaling(kind, fields.positive("rope.scaling.factor", old), magnitude=magnitude)
    original = fields.size("rope.scaling.original_context_length", fields.number("context_length"))
    refuse(original < 1, "rope.scaling.original_context_length", original, "a positive number")
    if kind != "yarn":
        return Scaling(kind, original=original, magnitude=magnitude)
    for name, only in (("yarn_ext_factor", 1), ("yarn_log_multiplier", 0)):
        value = fields.number(f"rope.scaling.{name}", only)
        refuse(value != only, f"rope.scaling.{name}", value, f"{only}")
    refuse(base <= 1, "rope.freq_base", base, "a number above 1 for YaRN")
    factor = fields.positive("rope.scaling.factor")
    return Scaling(
        kind,
        factor,
        original,
        fields.positive("rope.scaling.yarn_beta_fast", 32.0),
        fields.positive("rope.scaling.yarn_beta_slow", 1.0),
        family.whole_ramp,
        fields.positive("rope.scaling.yarn_attn_factor", yarn_magnitude(factor) * magnitude),
    )


def _local_base(fields: Fields, windows: Windows | None) -> float:
    if windows is None or not windows.local_base:
        return 0.0
    return fields.positive("rope.freq_base_swa", windows.local_base)


def _window(fields: Fields, windows: Windows | None) -> int:
    if windows is None:
        return 0
    name = "attention.sliding_window"
    window = fields.size(name, None if windows.required else 0)
    expected = "the length of a window" if windows.required else "the length of a window, or 0 for none"
    refuse(window < int(windows.required), name, window, expected)
    return window


def _pattern(fields: Fields, windows: Windows | None, layers: int) -> int | tuple[bool, ...]:
    name = "attention.sliding_window_pattern"
    pattern = fields.get(name, 0 if windows is None else windows.step)
    if isinstance(pattern, int):
        refuse(pattern < 0, name, pattern, "a number of layers, or a list")
        return pattern
    listed = pattern if isinstance(pattern, (list, tuple, np.ndarray)) else []
    refuse(
        len(listed) != layers,
        name,
        f"{len(listed)} layers",
        f"{layers}, or the step of full attention",
    )
    return tuple(bool(entry) for entry in listed)


def _experts(fields: Fields, family: Architecture) -> Experts | None:
    routing, count = family.routing, fields.size("expert_count", 0)
    if routing is None or (count == 0 and not routing.required):
        refuse(count != 0, "expert_count", count, f"0: {fields.architecture} has no experts")
        return None
    refuse(count < 1, "expert_count", count, "at least one expert")
    chosen = fields.size("expert_used_count")
    refuse(not 1 <= chosen <= count, "expert_used_count", chosen, f"1 to {count}, the number of experts")
    groups = fields.number("expert_group_count", 1)
    refuse(groups > 1, "expert_group_count", groups, "1: groups of experts are not supported")
    gating = fields.number("expert_gating_func", SOFTMAX_GATES[0])
    refuse(gating not in SOFTMAX_GATES, "expert_gating_func", gating, "1 or 3 (softmax)")
    usual = fields.get("feed_forward_length")
    feed_forward = fields.size("expert_feed_forward_length", usual)
    shared = fields.size("expert_shared_feed_forward_length", usual) if routing.shared else 0
    for name, size in (("expert_feed_forward_length", feed_forward), ("expert_shared_feed_forward_length", shared)):
        refuse(size % 16 != 0 or size < 0, name, size, "a multiple of 16")
    return Experts(
        count=count,
        chosen=chosen,
        feed_forward=feed_forward,
        shared=shared,
        renormalized=bool(fields.get("expert_weights_norm", routing.renormalized)),
        scale=fields.positive("expert_weights_scale", 1.0),
    )


def refuse(condition: bool, name: str, value: object, expected: str) -> None:
    if condition:
        raise ModelError(bad_argument(CALL, name, value, expected))
