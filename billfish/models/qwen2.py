"""Qwen 1.5 to 2.5: a Llama with biases of q, k and v."""

from __future__ import annotations

from billfish.models.architecture import EXPERT_SIZE, NORMALIZED, Architecture, expert_modules, expert_settings
from billfish.models.description import Attention, FeedForward
from billfish.models.fields import Fields, refuse

SHARED_SIZE = "expert_shared_feed_forward_length"


class Qwen2(Architecture):
    """Qwen 1.5, 2 and 2.5: QKV biases."""

    gguf, model_type, transformers = "qwen2", "qwen2", "Qwen2ForCausalLM"

    def mixer(self, f: Fields, i: int) -> Attention:
        return self.attention(f, i, qkv_bias="required")


class Qwen2Moe(Qwen2):
    """Qwen 1.5 and 2 MoE: QKV biases, MoE with a gated shared expert."""

    gguf, model_type, transformers = "qwen2moe", "qwen2_moe", "Qwen2MoeForCausalLM"
    modules = (
        Qwen2.modules
        | expert_modules("mlp", "gate", shared="shared_expert")
        | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
    )
    settings = (
        expert_settings("num_experts") | NORMALIZED | EXPERT_SIZE | {"shared_expert_intermediate_size": SHARED_SIZE}
    )
    defaults = {"norm_topk_prob": False}
    fixed = {"decoder_sparse_step": 1, "mlp_only_layers": []}

    def feed_forward(self, f: Fields, i: int) -> FeedForward:
        size = f.size(SHARED_SIZE, f.get("feed_forward_length"))
        refuse(size % 16 != 0 or size < 0, SHARED_SIZE, size, "a multiple of 16")
        return self.mixture(f, i, renormalized=False, shared=self.dense(f, i, size, "_shexp"), shared_gate=True)
