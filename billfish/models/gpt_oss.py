"""gpt-oss: biases everywhere, attention sinks, a window in every other layer, experts with a clamped SwiGLU."""

from __future__ import annotations

from typing import Any

from billfish.models.architecture import WINDOW, Architecture, Config, Field, expert_modules, expert_settings
from billfish.models.description import Attention, Block, FeedForward
from billfish.models.fields import Fields
from billfish.models.rope import ORIGINAL

ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    ORIGINAL: 4096,
}


class GptOss(Architecture):
    """gpt-oss 20b and 120b: biases, attention sinks, sliding window in every other layer, MoE with clamped SwiGLU."""

    gguf, model_type, transformers = "gpt-oss", "gpt_oss", "GptOssForCausalLM"
    modules = (
        Architecture.modules | expert_modules("mlp", "router") | {"post_attention_norm": "post_attention_layernorm"}
    )
    parameters = {"attn_sinks.weight": "self_attn.sinks"}
    expert_files = "gpt_oss"
    settings = expert_settings() | WINDOW
    defaults = {"sliding_window": 128, "rms_norm_eps": 1e-5, "rope_parameters": ROPE}
    fixed = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
    head_dim = 64
    theta = 150000.0
    whole_ramp = False
    windows, window_step = True, 2
    activation = "clamped_silu"

    def fields(self, config: Config) -> dict[str, Field]:
        return {**super().fields(config), "expert_feed_forward_length": config["intermediate_size"]}

    def config(self, fields: Fields, *about: Any) -> dict[str, Any]:
        size = fields.get("expert_feed_forward_length") or fields.get("feed_forward_length")
        return {**super().config(fields, *about), "intermediate_size": size}

    def block(self, f: Fields, i: int) -> Block:
        return Block(
            self.mixer(f, i),
            self.feed_forward(f, i),
            mixer_norm=self.norm(f, i, "attn_norm"),
            feed_forward_norm=self.norm(f, i, "post_attention_norm"),  # before the experts, whatever its name says
        )

    def mixer(self, f: Fields, i: int) -> Attention:
        window = self.window(f, i)
        return self.attention(f, i, qkv_bias="required", output_bias="required", window=window, sinks=True)

    def feed_forward(self, f: Fields, i: int) -> FeedForward:
        return self.mixture(f, i, renormalized=True, bias="required")
