"""Granite 3 with experts: a Llama whose embedding, scores, residuals and logits have multipliers."""

from __future__ import annotations

from billfish.models.architecture import Architecture, expert_modules, expert_settings
from billfish.models.description import FeedForward
from billfish.models.fields import Fields


class GraniteMoe(Architecture):
    """Granite 3.0 and 3.1 MoE: MoE, multipliers of embedding, scores, residuals and logits."""

    gguf, model_type, transformers = "granitemoe", "granitemoe", "GraniteMoeForCausalLM"
    reordered = adjacent = True
    modules = Architecture.modules | expert_modules("block_sparse_moe", "router.layer")
    expert_files = "granite"
    settings = expert_settings() | {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    defaults = {"attention_multiplier": 1.0}

    def feed_forward(self, f: Fields, i: int) -> FeedForward:
        return self.mixture(f, i, renormalized=True)
