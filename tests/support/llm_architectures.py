"""Small random models, a row for each architecture, whose settings all matter: windows are shorter than the text, soft
caps bite, positions pass the context of the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from llm_folders import write_random
from safetensors.numpy import load_file, save_file

EXPERTS = {"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 3}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "rope_theta": 10000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "long_factor": [1.0 + 0.25 * i for i in range(8)],
    "short_factor": [1.0] * 8,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
# The architecture in GGUF, the type of model in transformers, and its settings.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("llama", "mixtral", EXPERTS),
    "llama3": ("llama", "llama", {"rope_parameters": LLAMA3}),
    "qwen3-yarn": ("qwen3", "qwen3", {"rope_parameters": YARN}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", {**EXPERTS, "moe_intermediate_size": 64, "norm_topk_prob": True}),
    "qwen3moe-sums": ("qwen3moe", "qwen3_moe", {**EXPERTS, "moe_intermediate_size": 64, "norm_topk_prob": False}),
    "qwen2moe": (
        "qwen2moe",
        "qwen2_moe",
        {**EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96, "head_dim": 16},
    ),
    "olmoe": ("olmoe", "olmoe", {**EXPERTS, "head_dim": 16}),
    "granitemoe": ("granitemoe", "granitemoe", {**EXPERTS, **MULTIPLIERS, "head_dim": 16}),
    "gpt-oss": (
        "gpt-oss",
        "gpt_oss",
        {**EXPERTS, "sliding_window": 7, "rope_parameters": {**YARN, "truncate": False}, "num_hidden_layers": 3},
    ),
    "gemma2": (
        "gemma2",
        "gemma2",
        {
            "sliding_window": 7,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 3,
        },
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 24,
            "rope_parameters": GEMMA3_ROPE,
            "num_hidden_layers": 3,
        },
    ),
    "phi3": ("phi3", "phi3", {"sliding_window": 7, "pad_token_id": 2}),
    "phi3-longrope": ("phi3", "phi3", {"rope_parameters": LONGROPE, "head_dim": 16, "pad_token_id": 2}),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 5}),
    "olmo2": ("olmo2", "olmo2", {"head_dim": 16}),
    "olmo3": (
        "olmo2",
        "olmo3",
        {
            "sliding_window": 7,
            "num_hidden_layers": 5,
            "head_dim": 16,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "glm4moe": (
        "glm4moe",
        "glm4_moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_nextn_predict_layers": 0,
            "num_hidden_layers": 3,
        },
    ),
    "glm4moe-air": (
        "glm4moe",
        "glm4_moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "n_shared_experts": 2,
            "num_nextn_predict_layers": 0,
        },
    ),
    "ernie4_5": ("ernie4_5", "ernie4_5", {"use_bias": True}),
    "seed_oss": ("seed_oss", "seed_oss", {"attention_out_bias": True}),
    "minimax-m2": (
        "minimax-m2",
        "minimax_m2",
        {**EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "ministral3": (
        "mistral3",
        "ministral3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}},
    ),
}
GEMMA4 = {
    "sliding_window": 7,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "final_logit_softcapping": 3.0,
}
MODELS |= {
    "gemma4": (  # as E2B
        "gemma4",
        "gemma4_text",
        GEMMA4
        | {
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 96,
        },
    ),
    "gemma4-moe": (  # as 26B-A4B
        "gemma4",
        "gemma4_text",
        GEMMA4
        | {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
        },
    ),
    "gemma4-unified": ("gemma4", "gemma4_unified_text", GEMMA4),  # as 12B
}
DELTA_NET = {  # value heads come in another order in GGUF
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_hidden_layers": 4,
    "initializer_range": 0.1,  # with larger numbers, transformers' own float32 differs by more from float64
}
SHARED = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
SHORT_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "head_dim": 16}
MAMBA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "shared_intermediate_size": 64,
    "initializer_range": 0.1,
}
MODELS |= {
    "qwen35": ("qwen35", "qwen3_5_text", DELTA_NET),
    "qwen35-pattern": (
        "qwen35",
        "qwen3_5_text",
        DELTA_NET
        | {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "tie_word_embeddings": True,
        },
    ),
    "qwen35moe": ("qwen35moe", "qwen3_5_moe_text", DELTA_NET | EXPERTS | SHARED),
    "qwen3next": ("qwen3next", "qwen3_next", DELTA_NET | EXPERTS | SHARED),
    "lfm2": ("lfm2", "lfm2", SHORT_CONVOLUTIONS),
    "lfm2moe": (
        "lfm2moe",
        "lfm2_moe",
        SHORT_CONVOLUTIONS | EXPERTS | {"moe_intermediate_size": 64, "num_dense_layers": 1},
    ),
    "granitehybrid": ("granitehybrid", "granitemoehybrid", MAMBA | {"num_local_experts": 0} | MULTIPLIERS),
    "granitehybrid-moe": (
        "granitehybrid",
        "granitemoehybrid",
        MAMBA | EXPERTS | MULTIPLIERS | {"position_embedding_type": "rope", "mamba_conv_bias": False},
    ),
}
RECURRENT = ("qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe", "granitehybrid", "granitehybrid-moe")
TOKENS = [3 + (7 * i * i + 3 * i) % 64 for i in range(48)]
POSITIONS = [0, 5, 17, 31, 47]  # whose logits of llama.cpp vectors/architectures.safetensors holds
# What differs in models for llama.cpp. It cuts the ramp of YaRN to whole pairs for gpt-oss too, has no windows for Phi
# 3, one scale of scores for all Gemma 2 and 3, and no place for some biases and sizes. It renormalizes all qwen3moe.
LLAMA_CPP: dict[str, dict[str, Any]] = {
    name: {} for name in MODELS if name not in ("qwen3moe-sums", "gemma4-unified")
} | {
    "olmoe": {"num_key_value_heads": 4},
    "gpt-oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "phi3": {"sliding_window": None, "head_dim": 16},
    "ernie4_5": {"use_bias": False},
    "seed_oss": {"attention_out_bias": False},
    "qwen35-pattern": {"linear_key_head_dim": 32},
    "granitehybrid-moe": {"mamba_conv_bias": True},
}


def write_model(folder: Path, name: str, **more: Any) -> None:
    """One of MODELS as transformers saves it."""
    write_random(folder, MODELS[name][1], **(MODELS[name][2] | more))


def write_mtp_model(folder: Path, **more: Any) -> None:
    """A qwen35 with an MTP block: a layer of attention, as the last one of the model, with numbers of its own."""
    write_model(folder, "qwen35", **{"max_position_embeddings": 256, **more})
    arrays, rng = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    block = {name.replace("model.layers.3.", "mtp.layers.0."): a for name, a in arrays.items() if ".layers.3." in name}
    block |= {
        f"mtp.{name}.weight": arrays["model.norm.weight"][:] * 0
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    hidden = len(arrays["model.norm.weight"])
    block["mtp.fc.weight"] = np.zeros((hidden, 2 * hidden), np.float32)
    block = {name: (a + 0.1 * rng.standard_normal(a.shape)).astype(np.float32) for name, a in block.items()}
    save_file(arrays | block, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(settings))


_ENCODER = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {  # as MODELS
    "bert": ("bert", "bert", _ENCODER),
    "modernbert": ("modern-bert", "modernbert", _ENCODER | {"num_hidden_layers": 4, "local_attention": 16}),
    "modernbert-biases": (
        "modern-bert",
        "modernbert",
        _ENCODER
        | {"local_attention": 10, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True},
    ),
}
