"""Random LoRA adapters, as peft saves them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from llm_architectures import TOKENS
from transformers import AutoModelForCausalLM

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(model: Path, folder: Path, targets: Sequence[str], seed: int = 0, **more: Any) -> np.ndarray:
    """A random adapter as peft saves it. Returns the logits of peft's merged model."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), init_lora_weights=False, **more)
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    with torch.no_grad():
        return adapted.merge_and_unload()(torch.tensor([TOKENS])).logits[0].numpy()
