"""Folders that a language model runs from: random models of transformers, and tokenizers to go with any weights."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from llm_models import TEMPLATE
from transformers import AutoConfig, AutoModelForCausalLM

CONTROL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "head_dim": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def write_random(folder: Path, model_type: str, dtype: torch.dtype = torch.float32, **more: Any) -> None:
    """A random model as transformers saves it, with a tokenizer. Its numbers depend on their names alone, not on how
    transformers begins."""
    config = AutoConfig.for_model(model_type, **(SIZES | {"initializer_range": 0.2} | more))
    model = AutoModelForCausalLM.from_config(config)
    randomize(model, config.initializer_range)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder)


def randomize(model: Any, scale: float = 0.2) -> None:
    """Give all parameters and buffers numbers that matter, by their names."""
    parameters, state = dict(model.named_parameters()), model.state_dict()
    buffers = sorted(set(state) - {name for name, _ in model.named_parameters(remove_duplicate=False)})
    for name, numbers in parameters.items():
        is_vector = numbers.ndim == 1 or name.endswith("bias")  # norms and biases begin as ones or zeros
        numbers.data = _vector(name, numbers) if is_vector else scale * _noise(name, numbers.shape)
    for name in buffers:  # as those of routers
        state[name].copy_(_vector(name, state[name]))


def _noise(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return torch.from_numpy(rng.standard_normal(shape, np.float32))


def _vector(name: str, numbers: torch.Tensor) -> torch.Tensor:
    """Noise around what all numbers begin as, around logarithms of rates from 1 to 16, or around 0."""
    usual = torch.full_like(numbers, numbers.ravel()[0].item() if len(numbers.unique()) == 1 else 0)
    if name.endswith("A_log"):
        usual = torch.linspace(1, 16, len(numbers)).log()
    return usual + 0.3 * _noise(name, numbers.shape)


def in_transformers(
    folder: Path, tokens: list[int], loader: Any = AutoModelForCausalLM, **arguments: Any
) -> np.ndarray:
    """The logits of transformers [tokens, vocabulary], in float32."""
    model = loader.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **arguments)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def write_tokenizer(folder: Path, **about: Any) -> None:
    """Byte-level, cut as GPT-2: 4 control tokens, 64 characters and "ab"; 69 tokens, fewer than rows of the embedding.

    about: more for tokenizer_config.json; None leaves a setting out.
    """
    parts = tokenizers.pre_tokenizers
    pieces = [*CONTROL, *(chr(ord("@") + i) for i in range(63)), "Ġ", "ab"]
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, [("a", "b")]))
    encoder.pre_tokenizer = parts.ByteLevel(add_prefix_space=False)
    encoder.decoder = tokenizers.decoders.ByteLevel()
    encoder.add_special_tokens(CONTROL)
    encoder.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE, **about}
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))


def edit(file: Path, **settings: Any) -> None:
    """Other settings in a JSON file, which may be new; None removes one."""
    config = (json.loads(file.read_text()) if file.exists() else {}) | settings
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
