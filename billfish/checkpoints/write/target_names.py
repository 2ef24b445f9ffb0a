"""A checkpoint as its target names it, with the configuration where the target looks for it: between GGUF and folders.

The translation itself is that of billfish.checkpoints.names.gguf_names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.gguf_header import ARRAY, BOOL, STRING, UINT32
from billfish.checkpoints.names.gguf_names import (
    EMBEDDING,
    UnknownModel,
    by_gguf_names,
    by_model_names,
    is_gguf,
    model_config,
)

INT32, FLOAT32 = 5, 6
GgufFields = dict[str, tuple[Any, int, int | None]]  # value, type, and type of the items of a list


def for_folders(checkpoint: Checkpoint) -> Checkpoint:
    """A GGUF file as transformers and mlx-lm name it, with a config.json. Other checkpoints as they are."""
    try:
        view = by_model_names(checkpoint)
    except UnknownModel:
        return checkpoint
    if view is checkpoint or EMBEDDING not in checkpoint:
        return checkpoint
    view.config = model_config(checkpoint)
    return view


def for_gguf(checkpoint: Checkpoint) -> Checkpoint:
    """A model's folder as llama.cpp names it, with the fields it reads, but for the tokenizer's. Other checkpoints as
    they are."""
    if is_gguf(checkpoint):
        return checkpoint
    try:
        view = by_gguf_names(checkpoint)
    except UnknownModel:
        return checkpoint
    view.metadata = typed(view.metadata)
    return view


def typed(fields: Mapping[str, Any]) -> GgufFields:
    """Fields with the types that llama.cpp expects of them."""
    return {name: (value, *_type(value)) for name, value in fields.items()}


def _type(value: Any) -> tuple[int, int | None]:
    if isinstance(value, list):
        item = _type(value[0])[0] if value else STRING
        return ARRAY, INT32 if item == UINT32 else item  # such as the kinds of tokens
    return {bool: BOOL, int: UINT32, float: FLOAT32, str: STRING}[type(value)], None
