"""Small random models with experts, made with transformers, and the same models with decoded weights put in."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

import billfish as bf
from billfish.nn.torch.expert_layers import MarlinExperts, to_plain

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=16, moe_intermediate_size=32, num_experts=6, num_experts_per_tok=3
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
    "olmoe": lambda: OlmoeConfig(**SIZES, num_experts=5, num_experts_per_tok=2),
    "gpt_oss": lambda: GptOssConfig(**SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "granitemoe": lambda: GraniteMoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}


def random_model(name: str) -> Any:
    """A model whose experts are far from equal, with biases that count."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    for path, parameter in model.named_parameters():
        if parameter.ndim > 1 or "bias" in path:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def decoded(quantized: Any, plain: Any) -> Any:
    """The model `plain` with the weights that `quantized` stands for."""
    dense = copy.deepcopy(plain)
    for path, module in quantized.named_modules():
        if isinstance(module, MarlinExperts):
            to_plain(module, dense.get_submodule(path))
        elif isinstance(module, bf.MarlinLinear):
            dense.set_submodule(path, module.to_linear())
    return dense


def tokens() -> torch.Tensor:
    return torch.arange(22).reshape(2, 11) * 7 % 48


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


def assert_near(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert (a - b).abs().max() <= tolerance * b.abs().max()
