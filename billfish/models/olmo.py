"""OLMo: RMSNorm of q and k over all heads together."""

from __future__ import annotations

from billfish.models.architecture import NORMALIZED, Architecture, expert_modules, expert_settings
from billfish.models.description import Attention, FeedForward
from billfish.models.fields import Fields


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
