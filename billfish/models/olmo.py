"""OLMo: RMSNorm of q and k over all heads together."""

from __future__ import annotations

from typing import Any

from billfish.core.errors import CheckpointError, bad_argument
from billfish.models.architecture import (
    FULL,
    NORMALIZED,
    POST_NORMS,
    SLIDING,
    WINDOW,
    Architecture,
    Config,
    expert_modules,
    expert_settings,
)
from billfish.models.description import Attention, Block, FeedForward
from billfish.models.fields import CONFIG_CALL, Fields, section
from billfish.models.rope import Rope

PRE_NORMS = ("attn_norm", "ffn_norm")


class Olmoe(Architecture):
    """OLMoE 1B-7B: QK norm over all heads, MoE."""

    gguf, model_type, transformers = "olmoe", "olmoe", "OlmoeForCausalLM"
    modules = Architecture.modules | expert_modules("mlp", "gate")
    settings = expert_settings("num_experts") | NORMALIZED
    defaults = {"norm_topk_prob": False, "rms_norm_eps": 1e-5}
    fixed = {"clip_qkv": None}

    def mixer(self, f: Fields, i: int) -> Attention:
        return self.attention(f, i, head_norms="all")

    def feed_forward(self, f: Fields, i: int) -> FeedForward:
        return self.mixture(f, i, renormalized=False)


class Olmo2(Architecture):
    """OLMo 2: QK norm over all heads, post-norms without pre-norms."""

    gguf, model_type, transformers = "olmo2", "olmo2", "Olmo2ForCausalLM"
    modules = {name: module for name, module in Architecture.modules.items() if name not in PRE_NORMS} | POST_NORMS
    biases = {"attention_bias": "attn_q"}
    defaults = {"rms_norm_eps": 1e-5}

    def block(self, f: Fields, i: int) -> Block:
        return Block(
            self.mixer(f, i),
            self.feed_forward(f, i),
            mixer_norm=None,
            feed_forward_norm=None,
            mixer_post_norm=self.norm(f, i, "post_attention_norm"),
            feed_forward_post_norm=self.norm(f, i, "post_ffw_norm"),
        )

    def mixer(self, f: Fields, i: int) -> Attention:
        return self.attention(f, i, head_norms="all")


class Olmo3(Olmo2):
    """OLMo 3: as OLMo 2 with a sliding window, global in every fourth layer."""

    model_type, transformers = "olmo3", "Olmo3ForCausalLM"
    settings = WINDOW
    defaults = {"rms_norm_eps": 1e-5, "sliding_window": 4096}
    theta = 500000.0
    rope_layers = FULL
    windows, window_step = True, 4

    def matches(self, fields: Fields) -> bool:
        return bool(fields.get("attention.sliding_window"))

    def check(self, config: Config) -> None:
        super().check(config)
        rule = section(section(config, "rope_parameters"), SLIDING)
        theta, own = self.rule(config).theta, rule.get("rope_theta", self.rule(config).theta)
        if rule.get("rope_type", "default") != "default" or own != theta:
            expected = f"the base {theta} of the other layers, not scaled, because GGUF has no field for it"
            raise CheckpointError(bad_argument(CONFIG_CALL, f"rope_parameters.{SLIDING}", repr(rule), expected))

    def rope_settings(self, fields: Fields, rule: dict[str, Any]) -> dict[str, Any]:
        narrow = {"rope_type": "default", "rope_theta": rule["rope_theta"]}
        return {"rope_parameters": {FULL: rule, SLIDING: narrow}}

    def ropes(self, f: Fields) -> tuple[Rope, ...]:
        [everywhere] = super().ropes(f)
        return everywhere, Rope(everywhere.size, everywhere.base, divisors=False)

    def mixer(self, f: Fields, i: int) -> Attention:
        window = self.window(f, i)
        return self.attention(f, i, head_norms="all", window=window, rope=1 if window else 0)
