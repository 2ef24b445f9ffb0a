"""MiniMax M2: RMSNorm of q and k over all heads, partial rotation, a sigmoid router with a bias for the choice."""

from __future__ import annotations

from typing import Any

from billfish.models.architecture import Architecture, Config, Field, expert_modules, expert_settings
from billfish.models.description import Attention, FeedForward
from billfish.models.fields import Fields


class MiniMaxM2(Architecture):
    """MiniMax M2 and M2.1: QK norm over all heads, partial RoPE, MoE with sigmoid router."""

    gguf, model_type, transformers = "minimax-m2", "minimax_m2", "MiniMaxM2ForCausalLM"
    modules = Architecture.modules | expert_modules("block_sparse_moe", "gate")
    parameters = {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}
    expert_files = "mixtral"
    settings = expert_settings()
    head_dim = 128
    theta = 5e6
    partial_rotation = True

    def completed(self, config: Config) -> dict[str, Any]:
        whole = super().completed(config)
        head_size, rotated = whole.get("head_dim") or self.head_dim, whole.get("rotary_dim")  # the last of old folders
        if isinstance(rotated, int) and isinstance(head_size, int):
            whole.setdefault("partial_rotary_factor", rotated / head_size)
        return whole

    def fields(self, config: Config) -> dict[str, Field]:
        fields = super().fields(config)
        return {**fields, "expert_feed_forward_length": fields["feed_forward_length"], "expert_gating_func": 2}

    def mixer(self, f: Fields, i: int) -> Attention:
        return self.attention(f, i, head_norms="all")

    def feed_forward(self, f: Fields, i: int) -> FeedForward:
        return self.mixture(f, i, renormalized=True, scores="sigmoid", selection_bias=True)
