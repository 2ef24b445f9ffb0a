"""GLM 4.5 to 4.7 with experts: a sigmoid router with a bias for the choice, a shared expert, leading dense layers."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from billfish.models.architecture import EXPERT_SIZE, NORMALIZED, Architecture, Config, Field, expert_modules
from billfish.models.description import Attention, Block, FeedForward
from billfish.models.fields import Fields, number, refuse

MTP = ("eh_proj", "embed_tokens", "enorm", "hnorm")  # of layers behind the last, which predict a second token


class Glm4Moe(Architecture):
    """GLM 4.5, 4.6 and 4.7 (and Air): partial RoPE, MoE with sigmoid router, shared expert, leading dense layers."""

    gguf, model_type, transformers = "glm4moe", "glm4_moe", "Glm4MoeForCausalLM"
    modules = (
        {name: module for name, module in Architecture.modules.items() if name != "ffn_norm"}
        | expert_modules("mlp", "gate", shared="shared_experts")
        | {"post_attention_norm": "post_attention_layernorm"}
        | {f"nextn.{name}": name for name in MTP}
        | {"nextn.shared_head_head": "shared_head.head", "nextn.shared_head_norm": "shared_head.norm"}
    )
    parameters = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
    biases = {"attention_bias": "attn_q"}
    settings = (
        {"num_experts_per_tok": "expert_used_count", "n_routed_experts": "expert_count"}
        | NORMALIZED
        | EXPERT_SIZE
        | {
            "n_shared_experts": "expert_shared_count",
            "routed_scaling_factor": "expert_weights_scale",
            "first_k_dense_replace": "leading_dense_block_count",
            "num_nextn_predict_layers": "nextn_predict_layers",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        }
    )
    defaults = {
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
    }
    partial_rotation = True

    def fields(self, config: Config) -> dict[str, Field]:
        fields, behind = super().fields(config), number("num_nextn_predict_layers", config["num_nextn_predict_layers"])
        return {**fields, "block_count": config["num_hidden_layers"] + int(behind), "expert_gating_func": 2}

    def config(self, fields: Fields, vocabulary: int, tensors: Container[str], *about: Any) -> dict[str, Any]:
        return {
            **super().config(fields, vocabulary, tensors, *about),
            "num_hidden_layers": self.layers(fields),
            "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        }

    def block(self, f: Fields, i: int) -> Block:
        return Block(
            self.mixer(f, i),
            self.feed_forward(f, i),
            mixer_norm=self.norm(f, i, "attn_norm"),
            feed_forward_norm=self.norm(f, i, "post_attention_norm"),  # before the feed-forward part
        )

    def mixer(self, f: Fields, i: int) -> Attention:
        return self.attention(f, i, head_norms="each" if f.has("blk.0.attn_q_norm.weight") else "")

    def feed_forward(self, f: Fields, i: int) -> FeedForward:
        if i < f.size("leading_dense_block_count", 0):
            return self.dense(f, i, f.size("feed_forward_length"))
        shared = f.size("expert_shared_count", 0) * f.size("expert_feed_forward_length")
        refuse(shared < 0, "expert_shared_count", shared, "a number from 0 on")
        return self.mixture(
            f,
            i,
            renormalized=True,
            scores="sigmoid",
            selection_bias=True,
            grouped=True,
            shared=self.dense(f, i, shared, "_shexp") if shared else None,
        )
