"""Gemma 1 to 3: norms multiply with 1 + w, the embedding is scaled by sqrt(hidden), gates go through GELU."""

from __future__ import annotations

import math
from typing import Any

from billfish.core.errors import CheckpointError, bad_argument
from billfish.models.architecture import (
    CAPS,
    FULL,
    POST_NORMS,
    SLIDING,
    WINDOW,
    Architecture,
    Config,
    Field,
)
from billfish.models.description import Attention, Block
from billfish.models.fields import CONFIG_CALL, Fields, number, positive, section
from billfish.models.rope import Rope

LOCAL_THETA = 10000.0  # of Gemma 3's layers with a window, where nothing is said


class Gemma(Architecture):
    """Gemma 1: GeGLU, scaled embedding."""

    gguf, model_type, transformers = "gemma", "gemma", "GemmaForCausalLM"
    norm_offset = 1  # folders have w, GGUF files have 1 + w
    unpublished_head = True
    hidden_acts = ("gelu_pytorch_tanh", "gelu")  # the first files say "gelu" and mean its approximation
    head_dim = 256
    activation = "gelu"

    def embedding_scale(self, hidden: int) -> float:
        return math.sqrt(hidden)


class Gemma2(Gemma):
    """Gemma 2: GeGLU, scaled embedding, post-norms, soft caps, sliding window in every other layer."""

    gguf, model_type, transformers = "gemma2", "gemma2", "Gemma2ForCausalLM"
    modules = Gemma.modules | POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
    settings = CAPS | WINDOW
    defaults = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}
    windows, window_step = True, 2
    logit_cap = 30.0
    wide_queries = 46  # layers of the model whose scores are divided by sqrt(hidden / heads), not sqrt(head size)

    def fields(self, config: Config) -> dict[str, Field]:
        scale = number("query_pre_attn_scalar", config.get("query_pre_attn_scalar", 256))
        without = CAPS if self.logit_cap else ()  # llama.cpp has caps of its own, unless a field says 0
        fields: dict[str, Field] = {name: 0.0 for name in without if config.get(name) is None}
        return {**fields, **super().fields(config), "attention.scale": float(scale**-0.5)}

    def config(self, fields: Fields, *about: Any) -> dict[str, Any]:
        config, scale = super().config(fields, *about), fields.get("attention.scale")
        config |= {name: None for name in CAPS if config.get(name) == 0}
        config["query_pre_attn_scalar"] = round(scale**-2) if scale else fields.get("attention.key_length")
        return {**config, "hidden_activation": self.hidden_acts[0]}

    def block(self, f: Fields, i: int) -> Block:
        return Block(
            self.mixer(f, i),
            self.feed_forward(f, i),
            mixer_norm=self.norm(f, i, "attn_norm"),
            feed_forward_norm=self.norm(f, i, "ffn_norm"),
            mixer_post_norm=self.norm(f, i, "post_attention_norm"),
            feed_forward_post_norm=self.norm(f, i, "post_ffw_norm"),
        )

    def mixer(self, f: Fields, i: int) -> Attention:
        return self.attention(f, i, window=self.window(f, i), scale=self.scale(f), cap=50.0)

    def scale(self, f: Fields) -> float | None:
        """Of scores, where the file does not say."""
        wide = self.layers(f) == self.wide_queries
        return (f.size("embedding_length") // f.size("attention.head_count")) ** -0.5 if wide else None


class Gemma3(Gemma2):
    """Gemma 3, text: as Gemma 2 with QK norm, a global layer in six, a RoPE base of its own in windows."""

    gguf, model_type, transformers = "gemma3", "gemma3_text", "Gemma3ForCausalLM"
    defaults = {"sliding_window": 4096}
    theta = 1e6
    rope_layers = FULL
    window_step = 6
    logit_cap = 0.0
    wide_queries = 62

    def fields(self, config: Config) -> dict[str, Field]:
        rule = section(section(config, "rope_parameters"), SLIDING)
        kind = rule.get("rope_type", "default")
        if kind != "default":
            raise CheckpointError(bad_argument(CONFIG_CALL, f"rope_parameters.{SLIDING}", repr(kind), "'default'"))
        local = rule.get("rope_theta") or config.get("rope_local_base_freq") or LOCAL_THETA
        return {**super().fields(config), "rope.freq_base_swa": float(positive("rope_local_base_freq", local))}

    def rope_settings(self, fields: Fields, rule: dict[str, Any]) -> dict[str, Any]:
        local = fields.get("rope.freq_base_swa", LOCAL_THETA)
        rules = {FULL: rule, SLIDING: {"rope_type": "default", "rope_theta": local}}
        return {"rope_parameters": rules, "rope_local_base_freq": local}

    def ropes(self, f: Fields) -> tuple[Rope, ...]:
        [everywhere] = super().ropes(f)
        return everywhere, Rope(everywhere.size, f.positive("rope.freq_base_swa", LOCAL_THETA), divisors=False)

    def mixer(self, f: Fields, i: int) -> Attention:
        window = self.window(f, i, required=False)
        return self.attention(f, i, head_norms="each", window=window, rope=1 if window else 0, scale=self.scale(f))
