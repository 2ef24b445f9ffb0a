"""Small random models of transformers, one for each architecture whose files we translate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

EXPERTS, HIDDEN, INNER, LAYERS = 4, 64, 32, 2
SIZES = {
    "vocab_size": 96,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
MOE = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}
# gguf's name of an architecture: transformers' classes of model and configuration, and settings.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("MixtralForCausalLM", "MixtralConfig", LOCAL),
    "qwen3moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**MOE, "head_dim": 16}),
    "qwen2moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**MOE, "shared_expert_intermediate_size": 48}),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {"num_experts": EXPERTS, "num_experts_per_tok": 2}),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", LOCAL),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {**LOCAL, "head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {"head_dim": 16}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"head_dim": 16}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {}),
}
WITH_EXPERTS = ("llama", "qwen3moe", "qwen2moe", "olmoe", "granitemoe", "gpt-oss")


def model(architecture: str) -> Any:
    """One with weights that differ from each other, norms and biases too."""
    kind, config, settings = MODELS[architecture]
    made = getattr(transformers, kind)(getattr(transformers, config)(**SIZES, **settings))
    generator = torch.Generator().manual_seed(sum(map(ord, architecture)))
    with torch.no_grad():
        for parameter in made.parameters():
            # Numbers of few bits, so that Gemma's 1 + w loses nothing.
            parameter.copy_(torch.randint(-64, 64, parameter.shape, generator=generator) / 256)
    return made.eval()


def experts(made: Any, architecture: str, layer: int) -> dict[str, torch.Tensor]:
    """gate and up [E, I, H], down [E, H, I], as the model itself multiplies with them."""
    block = getattr(made.model.layers[layer], "block_sparse_moe", None) or made.model.layers[layer].mlp
    joint, down = block.experts.gate_up_proj.detach(), block.experts.down_proj.detach()
    if architecture == "gpt-oss":
        joint, down = joint.transpose(1, 2), down.transpose(1, 2)
        return {"gate": joint[:, ::2], "up": joint[:, 1::2], "down": down}
    return {"gate": joint[:, :INNER], "up": joint[:, INNER:], "down": down}


def gpt_oss_folder(folder: Path) -> tuple[Any, dict[str, np.ndarray]]:
    """A small gpt-oss as it is published, its experts MXFP4; and the model of these weights as transformers decodes
    them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    made, rng = model("gpt-oss"), np.random.default_rng(0)
    arrays = {name: tensor.numpy() for name, tensor in made.state_dict().items()}
    with torch.no_grad():
        for layer in range(LAYERS):
            for projection in ("gate_up_proj", "down_proj"):
                name = f"model.layers.{layer}.mlp.experts.{projection}"
                experts, k, n = arrays.pop(name).shape
                blocks = rng.integers(0, 256, (experts, n, k // 32, 16), dtype=np.uint8)
                scales = rng.integers(118, 124, (experts, n, k // 32), dtype=np.uint8)
                arrays |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
                decoded = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
                made.get_parameter(name).copy_(decoded)
    made.config.quantization_config = {"quant_method": "mxfp4"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(json.loads(made.config.to_json_string()), default=str))
    save_file(arrays, folder / "model.safetensors")
    return made, arrays
