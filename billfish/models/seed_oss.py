"""Seed-OSS: a Llama with biases of q, k and v."""

from __future__ import annotations

from billfish.models.architecture import Architecture
from billfish.models.description import Block
from billfish.models.fields import Fields


class SeedOss(Architecture):
    """Seed-OSS 36B: QKV biases."""

    gguf, model_type, transformers = "seed_oss", "seed_oss", "SeedOssForCausalLM"
    modules = {name: module for name, module in Architecture.modules.items() if name != "ffn_norm"} | {
        "post_attention_norm": "post_attention_layernorm"
    }
    biases = {"attention_bias": "attn_q", "attention_out_bias": "attn_output", "mlp_bias": "ffn_up"}
    head_dim = 128

    def block(self, f: Fields, i: int) -> Block:
        return Block(
            self.mixer(f, i),
            self.feed_forward(f, i),
            mixer_norm=self.norm(f, i, "attn_norm"),
            feed_forward_norm=self.norm(f, i, "post_attention_norm"),  # before the feed-forward part
        )
