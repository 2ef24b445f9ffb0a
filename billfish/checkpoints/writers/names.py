"""Between GGUF and everything else: llama.cpp has names, an order of rows, and places for hyperparameters of its own.

For decoders of the architectures that billfish.checkpoints.names knows, a checkpoint is looked at under the names of
its target, and what its configuration says goes where the target looks for it. Weights only move; no bit of them
changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.container import read_json, section
from billfish.checkpoints.entry import Entry, Span
from billfish.checkpoints.names import (
    LAYER,
    ROTARY_FACTORS,
    TOP,
    Renamed,
    UnknownModel,
    by_model_names,
    heads_of,
    is_gguf,
    row_order,
)
from billfish.errors import CheckpointError, complaint
from billfish.extras import require
from billfish.storage import Array

# Architectures of llama.cpp, with the model types and classes of transformers that have them.
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ARCHITECTURE_OF = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Our name of a size, and llama.cpp's.
SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
# How llama.cpp cuts text into words, by the architecture and the size of the vocabulary.
WORDS = {("llama", 128256): "llama-bpe", ("llama", 49152): "smollm"}
EMBEDDING = "model.embed_tokens.weight"
GgufFields = dict[str, tuple[Any, int, int | None]]


class Widened(Entry):
    """A vector in float32, as llama.cpp wants norms and biases."""

    def __init__(self, entry: Entry) -> None:
        about = entry.description
        super().__init__(replace(about, dtype="F32", nbytes=4 * int(np.prod(about.shape))), entry.parts)
        self.entry = entry

    def read(self, rows: Span | None, columns: Span | None) -> Array:
        vector = self.entry.read(rows, columns)
        assert isinstance(vector, np.ndarray)
        return vector.astype(np.float32)


def for_folders(checkpoint: Checkpoint) -> Checkpoint:
    """A GGUF file as transformers and mlx-lm name it, with a config.json. Other checkpoints as they are."""
    try:
        view = by_model_names(checkpoint)
    except UnknownModel:
        return checkpoint
    if view is checkpoint or EMBEDDING not in view:
        return checkpoint
    fields, architecture = checkpoint.metadata, checkpoint.metadata["general.architecture"]
    if any(name.startswith(f"{architecture}.rope.scaling.") for name in fields) or ROTARY_FACTORS in checkpoint:
        got = f"{architecture} with scaled rotary positions"
        takes = "a model without, or --to gguf: that scaling is not translated"
        raise CheckpointError(complaint("convert", str(checkpoint.path), got, takes))
    view.config = _config(architecture, fields, view)
    return view


def for_gguf(checkpoint: Checkpoint) -> Checkpoint:
    """A model's folder as llama.cpp names it, with the fields it reads. Other checkpoints as they are."""
    config = checkpoint.config
    architecture = ARCHITECTURE_OF.get(str(config.get("model_type")))
    needed = (config.get(name) for name in list(SIZES)[:4])
    if is_gguf(checkpoint) or architecture is None or not all(isinstance(size, int) and size > 0 for size in needed):
        return checkpoint
    scaling = config.get("rope_scaling") or section(config, "rope_parameters")
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type", "default")) != "default":
        got = f"rotary positions scaled by {scaling!r}"
        raise CheckpointError(complaint("convert", str(checkpoint.path), got, "a model without: it is not translated"))
    theirs = {ours: name for name, ours in TOP.items()} | {ours: name for name, ours in LAYER.items()}
    entries: dict[str, Entry] = {}
    for name in checkpoint:
        module, _, kind = name.rpartition(".")
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        known = theirs.get(match[2] if match else module)
        if known is None:
            return checkpoint
        new = f"blk.{match[1]}.{known}.{kind}" if match else f"{known}.{kind}"
        order = row_order(checkpoint, name, heads_of(config, architecture, new), to_gguf=True)
        renamed: Entry = Renamed(checkpoint.entry(name), new, order)
        vector = renamed.description.format is None and len(renamed.description.shape) == 1
        entries[new] = Widened(renamed) if vector else renamed
    view = checkpoint.view(entries, list(checkpoint))
    view.metadata = _fields(checkpoint, architecture)
    return view


# ---- configuration ------------------------------------------------------------------------------------------------


def _config(architecture: str, fields: Mapping[str, Any], view: Checkpoint) -> dict[str, Any]:
    config: dict[str, Any] = {"architectures": [CLASSES[architecture]], "model_type": architecture}
    config |= {ours: fields[f"{architecture}.{n}"] for ours, n in SIZES.items() if f"{architecture}.{n}" in fields}
    config["vocab_size"] = view.describe(EMBEDDING).shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in view
    for name in ("bos", "eos", "pad"):
        if f"tokenizer.ggml.{name}_token_id" in fields:
            config[f"{name}_token_id"] = fields[f"tokenizer.ggml.{name}_token_id"]
    if "rope_theta" in config:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return {**config, "hidden_act": "silu", "torch_dtype": "float16"}


def _fields(checkpoint: Checkpoint, architecture: str) -> GgufFields:
    """The fields of a GGUF file, gathered by the `gguf` library's own writer."""
    gguf = require("gguf", "checkpoints")
    writer, config = gguf.GGUFWriter(None, architecture), checkpoint.config
    folder = checkpoint.folder
    writer.add_name(str(config.get("_name_or_path") or (folder or checkpoint.path).name))
    theta = config.get("rope_theta") or section(config, "rope_parameters").get("rope_theta")
    for ours, value in ({**config, "rope_theta": theta} | _derived(config)).items():
        if ours in SIZES and isinstance(value, (int, float)):
            add = writer.add_float32 if isinstance(value, float) or ours == "rope_theta" else writer.add_uint32
            add(f"{architecture}.{SIZES[ours]}", value)
    head = _derived(config)["head_dim"]
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    if isinstance(config.get("vocab_size"), int):
        writer.add_vocab_size(config["vocab_size"])
    if folder is not None:
        _add_tokenizer(gguf, writer, folder, architecture, config)
    return {
        name: (field.value, int(field.type), None if field.sub_type is None else int(field.sub_type))
        for name, field in writer.kv_data[0].items()
    }


def _derived(config: Mapping[str, Any]) -> dict[str, int]:
    heads = int(config["num_attention_heads"])
    return {
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or int(config["hidden_size"]) // heads,
    }


def _add_tokenizer(gguf: Any, writer: Any, folder: Path, architecture: str, config: Mapping[str, Any]) -> None:
    """Byte-level BPE, as nearly all models of these architectures have; others are left out, which the caller tells."""
    try:
        columns = zip(*gguf.vocab.BpeVocab(folder).all_tokens(), strict=True)
        tokens, _, kinds = (list(column) for column in columns)
        for token in read_json(folder / "tokenizer.json").get("added_tokens", []):
            # The library takes all of these for control tokens, but those that are in the vocabulary as well for none.
            kinds[token["id"]] = gguf.TokenType.CONTROL if token.get("special") else gguf.TokenType.USER_DEFINED
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return
    missing = int(config.get("vocab_size", 0)) - len(tokens)  # rows of the embedding that no token uses
    tokens += [f"[PAD{len(tokens) + i}]" for i in range(missing)]
    kinds += [gguf.TokenType.UNUSED] * missing
    writer.add_tokenizer_model("gpt2")
    default = "qwen2" if architecture.startswith("qwen") else "default"
    writer.add_tokenizer_pre(WORDS.get((architecture, len(tokens)), default))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=len(tokens)).add_to_gguf(writer, quiet=True)
