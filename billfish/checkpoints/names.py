"""llama.cpp's names for the parts of a decoder, and its order of rows, beside those of transformers and mlx-lm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.container import CALL
from billfish.checkpoints.entry import Entry, Span, check_span
from billfish.checkpoints.gguf import Metadata
from billfish.errors import CheckpointError, complaint
from billfish.storage import Array
from billfish.tensor import QuantizedTensor

# The modules of a decoder with gated feed-forward blocks.
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROTARY_FACTORS = "rope_freqs.weight"  # follows from the configuration, which the other side has


class UnknownModel(CheckpointError):
    """A GGUF file whose tensors we have no other names for."""


class Renamed(Entry):
    """A tensor under another name, with its rows in another order."""

    def __init__(self, entry: Entry, name: str, order: NDArray[np.int64] | None = None) -> None:
        super().__init__(replace(entry.description, name=name), entry.parts)
        self.entry, self.order = entry, order

    def read(self, rows: Span | None, columns: Span | None) -> QuantizedTensor | Array:
        if self.order is None:
            return self.entry.read(rows, columns)
        start, stop = check_span("rows", rows, len(self.order))
        chosen = self.order[start:stop]
        first = int(chosen.min())  # rows move inside of their head, so that whole heads cost no more than themselves
        part = self.entry.read((first, int(chosen.max()) + 1), columns)
        return part.take_rows(chosen - first) if isinstance(part, QuantizedTensor) else part[chosen - first]

    def permutation(self) -> NDArray[np.int64] | None:
        return self.entry.permutation()


def is_gguf(checkpoint: Checkpoint) -> bool:
    """Whether it is a GGUF file, or a look at one under other names."""
    return isinstance(checkpoint.metadata, Metadata)


def is_gguf_name(name: str) -> bool:
    """Whether llama.cpp calls a tensor so."""
    module = name.rpartition(".")[0]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    return match[2] in LAYER if match else module in TOP or name == ROTARY_FACTORS


def by_model_names(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint under the names that models of transformers and mlx-lm have. Only GGUF has others, and an order of
    rows of its own; raises UnknownModel for one that we cannot translate."""
    if not is_gguf(checkpoint) or checkpoint.origins:
        return checkpoint
    fields = checkpoint.metadata
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        got = f"architecture {architecture!r}"
        raise UnknownModel(complaint(CALL, str(checkpoint.path), got, " or ".join(ARCHITECTURES)))
    names = {}
    for name in checkpoint:
        module, _, kind = name.rpartition(".")
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
        known = LAYER.get(match[2]) if match else TOP.get(module)
        if known is not None:
            names[name] = f"model.layers.{match[1]}.{known}.{kind}" if match else f"{known}.{kind}"
        elif name != ROTARY_FACTORS:
            takes = "the tensors of a decoder with gated feed-forward blocks"
            raise UnknownModel(complaint(CALL, str(checkpoint.path), repr(name), takes))
    orders = {name: row_order(checkpoint, name, heads_of(fields, architecture, name), to_gguf=False) for name in names}
    entries = {new: Renamed(checkpoint.entry(name), new, orders[name]) for name, new in names.items()}
    return checkpoint.view(entries, list(names))


def gguf_name(name: str) -> str | None:
    """llama.cpp's name of a tensor, from its own or the one that models of transformers have; None for any other."""
    theirs = {ours: name for name, ours in (TOP | LAYER).items()}
    if re.fullmatch(rf"({'|'.join(TOP)}|blk\.\d+\.\w+)\.(weight|bias)", name) or name == ROTARY_FACTORS:
        return name
    match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
    if not match or match[2] not in theirs:
        return None
    return f"{f'blk.{match[1]}.' if match[1] else ''}{theirs[match[2]]}.{match[3]}"


def heads_of(about: Mapping[str, Any], architecture: str, name: str) -> int:
    """How many heads a matrix has whose rows llama.cpp orders in its own way; 0 for every other one.

    It rotates neighbours where transformers rotates the halves of a head, but for its architecture "llama" only: row
    (head, half, i) of transformers is its row (head, i, half). `about` is its metadata, or a config.json.
    """
    module = name.split(".")[-2]
    if architecture != "llama" or module not in ("attn_q", "attn_k"):
        return 0
    keys = ["num_attention_heads", f"{architecture}.attention.head_count"]
    if module == "attn_k":
        keys = ["num_key_value_heads", f"{architecture}.attention.head_count_kv", *keys]
    heads = next((about[key] for key in keys if about.get(key)), 0)
    if not isinstance(heads, int) or heads < 1:
        takes = "the number of heads, the same in all layers"
        raise CheckpointError(complaint(CALL, keys[0], repr(heads), takes))
    return heads


def row_order(checkpoint: Checkpoint, name: str, heads: int, to_gguf: bool) -> NDArray[np.int64] | None:
    """Which rows of a matrix come where on the other side, see `heads_of`."""
    if not heads:
        return None
    shape = checkpoint.describe(name).shape
    n = shape[0] if shape else 0
    if n % (2 * heads) or n == 0:
        raise CheckpointError(complaint(CALL, name, f"{n} rows for {heads} heads", "an even number for each"))
    half = n // heads // 2
    return np.arange(n).reshape((heads, 2, half) if to_gguf else (heads, half, 2)).swapaxes(1, 2).ravel()
