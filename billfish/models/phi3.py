"""Phi 3 and 4: a Llama whose q, k and v are one matrix in files, and gate and up another."""

from __future__ import annotations

from typing import Any

from billfish.models.architecture import WINDOW, Architecture
from billfish.models.description import Attention, FeedForward
from billfish.models.fields import Fields, refuse


class Phi3(Architecture):
    """Phi 3, 3.5 and 4, dense: fused QKV and gate_up, sliding window."""

    gguf, model_type, transformers = "phi3", "phi3", "Phi3ForCausalLM"
    modules = Architecture.modules | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    settings = WINDOW
    defaults = {"rms_norm_eps": 1e-5}
    partial_rotation = True
    windows, window_step = True, 0

    def config(self, fields: Fields, *about: Any) -> dict[str, Any]:
        config = super().config(fields, *about)
        return config if config.get("sliding_window") else {**config, "sliding_window": None}

    def mixer(self, f: Fields, i: int) -> Attention:
        return self.attention(f, i, window=self.window(f, i, required=False), joined=True)

    def feed_forward(self, f: Fields, i: int) -> FeedForward:
        count = f.size("expert_count", 0)
        refuse(count != 0, "expert_count", count, f"0: {self.gguf} has no experts")
        return self.dense(f, i, f.size("feed_forward_length"), joined=True)
