"""A LoRA adapter of a small model, as peft saves it, without peft."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from llm_models import Small
from safetensors.numpy import save_file

MODULE = "base_model.model.model.layers.0.mlp.up_proj"


def write_small_adapter(folder: Path, small: Small, rank: int = 4) -> None:
    """For the first layer's `up_proj`, strong enough to change answers."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 16 * rank, "target_modules": ["up_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    shapes = {"lora_A": (rank, small.hidden), "lora_B": (small.feed_forward, rank)}
    arrays = {f"{MODULE}.{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(arrays, folder / "adapter_model.safetensors")
