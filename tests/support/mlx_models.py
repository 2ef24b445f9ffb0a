"""SmolLM2 as its GGUF file has it, in mlx-lm's own model code with our layers."""

from __future__ import annotations

from typing import Any

from mlx_lm.models import llama

import billfish as bf
from billfish.checkpoints.names.gguf_names import by_model_names


def smollm2() -> tuple[Any, Any, list[str]]:
    """The model, the report of `load_into`, and its vocabulary."""
    weights = by_model_names(bf.load(bf.llm.default_model()))
    fields = weights.metadata
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=fields["llama.embedding_length"],
        num_hidden_layers=fields["llama.block_count"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=fields["llama.rope.freq_base"],
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        tie_word_embeddings=True,
    )
    model = llama.Model(arguments)
    return model, bf.load_into(model, weights), fields["tokenizer.ggml.tokens"]
