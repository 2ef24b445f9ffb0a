"""Qwen 3: a Llama with RMSNorm of each head's q and k."""

from __future__ import annotations

from typing import Any

from billfish.models.architecture import EXPERT_SIZE, NORMALIZED, Architecture, expert_modules, expert_settings
from billfish.models.description import Attention, FeedForward
from billfish.models.fields import Fields


class Qwen3(Architecture):
    """Qwen 3, dense: QK norm."""

    gguf, model_type, transformers = "qwen3", "qwen3", "Qwen3ForCausalLM"
    head_dim = 128

    def mixer(self, f: Fields, i: int) -> Attention:
        return self.attention(f, i, head_norms="each")


class Qwen3Moe(Qwen3):
    """Qwen 3 MoE (30B-A3B, 235B-A22B, Coder): QK norm, MoE."""

    gguf, model_type, transformers = "qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM"
    modules = Qwen3.modules | expert_modules("mlp", "gate")
    settings = expert_settings() | NORMALIZED | EXPERT_SIZE
    defaults = {"norm_topk_prob": False}
    fixed = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    head_dim = 0

    def config(self, fields: Fields, *about: Any) -> dict[str, Any]:
        return {"norm_topk_prob": True, **super().config(fields, *about)}  # as llama.cpp has it where nothing is said

    def feed_forward(self, f: Fields, i: int) -> FeedForward:
        return self.mixture(f, i, renormalized=True)
