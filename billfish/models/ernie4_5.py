"""ERNIE 4.5, dense: a Llama whose rotary pairs are adjacent in folders, too."""

from __future__ import annotations

from billfish.models.architecture import Architecture


class Ernie45(Architecture):
    """ERNIE 4.5 0.3B: adjacent rotary pairs."""

    gguf, model_type, transformers = "ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM"
    adjacent = True
    biases = {"use_bias": "attn_q"}
    defaults = {"rms_norm_eps": 1e-5}
    head_dim = 128
    theta = 500000.0
