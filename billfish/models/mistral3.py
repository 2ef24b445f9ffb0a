"""Ministral 3 and what Mistral built on it: a Llama whose scores grow past the trained context."""

from __future__ import annotations

from typing import Any

from billfish.models.architecture import Config, Field
from billfish.models.description import Attention
from billfish.models.fields import Fields, positive
from billfish.models.llama import Llama
from billfish.models.rope import ORIGINAL

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Ministral3(Llama):
    """Ministral 3 3B, 8B and 14B, text: attention scaled by the position."""

    gguf, model_type, transformers = "mistral3", "ministral3", "Ministral3ForCausalLM"
    defaults = {"rms_norm_eps": 1e-5, "rope_parameters": ROPE}
    head_dim = 128
    theta = 1e6

    def fields(self, config: Config) -> dict[str, Field]:
        fields, rule = super().fields(config), self.rule(config).numbers
        if rule.get("mscale") == 1 and rule.get("mscale_all_dim"):  # which llama.cpp has a field for
            fields.pop("rope.scaling.attn_factor", None)
            fields["rope.scaling.yarn_log_multiplier"] = float(rule["mscale_all_dim"])
        if rule.get("llama_4_scaling_beta"):
            growth = positive("rope_parameters.llama_4_scaling_beta", rule["llama_4_scaling_beta"])
            fields["attention.temperature_scale"] = float(growth)
        return fields

    def rope_settings(self, fields: Fields, rule: dict[str, Any]) -> dict[str, Any]:
        shared, growth = fields.get("rope.scaling.yarn_log_multiplier"), fields.get("attention.temperature_scale")
        if shared:
            rule |= {"mscale": 1.0, "mscale_all_dim": shared}
            rule.pop("attention_factor", None)
        rule["llama_4_scaling_beta"] = growth or 0.0
        return {"rope_parameters": rule, "rope_scaling": rule}

    def mixer(self, f: Fields, i: int) -> Attention:
        growth = f.number("attention.temperature_scale", 0)
        length = f.size("rope.scaling.original_context_length", f.number("context_length"))
        return self.attention(f, i, temperature=(growth, length) if growth else None)
