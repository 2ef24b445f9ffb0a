"""The tokenizer of a GGUF file as the files that transformers and mlx-lm look for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from billfish.checkpoints.writers.base import json_bytes
from billfish.tokenizer import Tokenizer


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json; raises ModelError for a kind of tokenizer that we do not know."""
    tokenizer = Tokenizer(metadata)
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # GGUF's names and transformers'
    named = {theirs: tokenizer.named(metadata, ours) for ours, theirs in roles.items()}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config["add_bos_token"] = tokenizer.starts_with_bos
    config |= {f"{role}_token": tokenizer.pieces[token] for role, token in named.items() if token is not None}
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if length is not None:
        config["model_max_length"] = length
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return {"tokenizer.json": tokenizer.to_json().encode(), "tokenizer_config.json": json_bytes(config)}
