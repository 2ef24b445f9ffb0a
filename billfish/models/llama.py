"""Llama, and what is built like it: Mistral, and Mixtral with experts."""

from __future__ import annotations

from billfish.models.architecture import Architecture, expert_modules, expert_settings
from billfish.models.description import FeedForward
from billfish.models.fields import Fields


class Llama(Architecture):
    """Llama 1 to 3.3, SmolLM2 and many more."""

    gguf, model_type, transformers = "llama", "llama", "LlamaForCausalLM"
    reordered = adjacent = True
    biases = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}


class Mistral(Llama):
    """Mistral 7B, Nemo, Small."""

    model_type, transformers = "mistral", "MistralForCausalLM"
    defaults = {"sliding_window": 4096}

    def matches(self, fields: Fields) -> bool:
        return False  # GGUF does not tell it from a Llama


class Mixtral(Llama):
    """Mixtral 8x7B and 8x22B: MoE."""

    model_type, transformers = "mixtral", "MixtralForCausalLM"
    modules = Llama.modules | expert_modules("block_sparse_moe", "gate")
    expert_files = "mixtral"
    settings = expert_settings()
    defaults = {"rms_norm_eps": 1e-5}
    theta = 1e6

    def matches(self, fields: Fields) -> bool:
        return bool(fields.get("expert_count", 0))

    def feed_forward(self, f: Fields, i: int) -> FeedForward:
        return self.mixture(f, i, renormalized=True)
