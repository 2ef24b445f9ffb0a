"""A decoder under the names of transformers and mlx-lm, and under llama.cpp's: one translation, in both directions.

llama.cpp has names of its own, an order of rows of its own, and fields instead of a config.json. What it stores
otherwise is a view of the same file: weights only move, and no bit of a matrix changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.container import CALL
from billfish.checkpoints.entry import Description, Entry, Span, check_span
from billfish.checkpoints.gguf import Metadata
from billfish.checkpoints.hyperparameters import ARCHITECTURES, config_of, fields_of
from billfish.checkpoints.hyperparameters import UnknownModel as UnknownModel
from billfish.checkpoints.rotary import ROTARY_FACTORS as ROTARY_FACTORS
from billfish.checkpoints.rotary import llama3_factors, scaling_of, theta_of
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
GGUF_MODULES = {theirs: ours for ours, theirs in (TOP | LAYER).items()}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
INVERSE_FREQUENCIES = ".rotary_emb.inv_freq"  # old folders have it for each layer; it follows from the configuration
TAKES = "the tensors of a decoder with gated feed-forward blocks"


# ---- entries that differ ------------------------------------------------------------------------------------------


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


class Widened(Entry):
    """A vector in float32, as llama.cpp wants norms and biases, with a number added to each of its own."""

    def __init__(self, entry: Entry, added: int) -> None:
        about = entry.description
        super().__init__(replace(about, dtype="F32", nbytes=4 * int(np.prod(about.shape))), entry.parts)
        self.entry, self.added = entry, np.float32(added)

    def read(self, rows: Span | None, columns: Span | None) -> Array:
        vector = self.entry.read(rows, columns)
        assert isinstance(vector, np.ndarray)
        wide = vector.astype(np.float32)
        return wide + self.added if self.added else wide  # -0.0 stays what it is


class Computed(Entry):
    """A vector that no file has."""

    def __init__(self, name: str, layout: str, vector: NDArray[np.float32]) -> None:
        super().__init__(Description(name, layout, None, "F32", vector.shape, None, vector.nbytes), [])
        self.vector = vector

    def read(self, rows: Span | None, columns: Span | None) -> Array:
        start, stop = check_span("rows", rows, len(self.vector))
        return self.vector[start:stop]


# ---- checkpoints under other names --------------------------------------------------------------------------------


def is_gguf(checkpoint: Checkpoint) -> bool:
    """Whether it is a GGUF file, or a look at one under other names."""
    return isinstance(checkpoint.metadata, Metadata)


def is_gguf_name(name: str) -> bool:
    """Whether llama.cpp calls a tensor so."""
    return model_name(name) is not None or name == ROTARY_FACTORS


def by_model_names(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint under the names that models of transformers and mlx-lm have. Only GGUF has others, and an order of
    rows of its own; raises UnknownModel for one that we cannot translate."""
    if not is_gguf(checkpoint) or checkpoint.origins:
        return checkpoint
    fields = checkpoint.metadata
    if fields.get("general.architecture") not in ARCHITECTURES:
        got = f"architecture {fields.get('general.architecture')!r}"
        raise UnknownModel(complaint(CALL, str(checkpoint.path), got, " or ".join(ARCHITECTURES)))
    entries, origins = dict[str, Entry](), list[str]()
    for name in checkpoint:
        new = model_name(name)
        if new is not None:
            entries[new] = _translated(checkpoint.entry(name), name, new, fields, to_gguf=False)
            origins.append(name)
        elif name != ROTARY_FACTORS:  # which the configuration says
            raise UnknownModel(complaint(CALL, str(checkpoint.path), repr(name), TAKES))
    return checkpoint.view(entries, origins)


def by_gguf_names(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint under llama.cpp's names, in its order of rows, its fields (numbers and strings) as metadata. GGUF
    files are as they are; raises UnknownModel for a model that we cannot translate."""
    if is_gguf(checkpoint):
        return checkpoint
    config, fields = checkpoint.config, fields_of(checkpoint.config, checkpoint.path)
    entries, origins = dict[str, Entry](), list[str]()
    for name in checkpoint:
        if name.endswith(INVERSE_FREQUENCIES):
            continue
        new = gguf_name(name)
        if new is None:
            raise UnknownModel(complaint(CALL, str(checkpoint.path), repr(name), TAKES))
        entries[new] = _translated(checkpoint.entry(name), new, new, fields, to_gguf=True)
        origins.append(name)
    architecture = str(fields["general.architecture"])
    if architecture == "gemma" and HEAD in entries and config.get("tie_word_embeddings", True):
        del origins[list(entries).index(HEAD)], entries[HEAD]  # a copy of the embedding, which llama.cpp refuses
    kind, rule = scaling_of(config)
    if kind == "llama3":
        factors = llama3_factors(int(fields[f"{architecture}.rope.dimension_count"]), theta_of(config), rule)
        entries[ROTARY_FACTORS] = Computed(ROTARY_FACTORS, "plain", factors)
        origins.append(ROTARY_FACTORS)
    view = checkpoint.view(entries, origins)
    view.metadata = fields
    return view


def model_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config.json of a GGUF file whose architecture we know."""
    factors = checkpoint.get(ROTARY_FACTORS)
    assert not isinstance(factors, QuantizedTensor)
    vocabulary = checkpoint.describe(EMBEDDING).shape[0]
    return config_of(checkpoint.metadata, vocabulary, HEAD not in checkpoint, factors)


def model_name(name: str) -> str | None:
    """The name in transformers of a tensor of GGUF; None if it has none."""
    module, _, kind = name.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    known = LAYER.get(match[2]) if match else TOP.get(module)
    if known is None:
        return None
    return f"model.layers.{match[1]}.{known}.{kind}" if match else f"{known}.{kind}"


def gguf_name(name: str) -> str | None:
    """The name in GGUF of a tensor of transformers; None if it has none."""
    module, _, kind = name.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    known = GGUF_MODULES.get(match[2] if match else module)
    if known is None or (known in LAYER) != bool(match):
        return None
    return f"blk.{match[1]}.{known}.{kind}" if match else f"{known}.{kind}"


def _translated(entry: Entry, gguf: str, new: str, fields: Mapping[str, Any], to_gguf: bool) -> Entry:
    """A tensor for the other side, where it is called `new`; `gguf` is its name in GGUF."""
    architecture = fields["general.architecture"]
    order = row_order(entry.description, heads_of(fields, architecture, gguf), to_gguf)
    renamed = Renamed(entry, new, order)
    vector = entry.description.format is None and len(entry.description.shape) == 1
    # Gemma multiplies with 1 + w: its folders have w, its GGUF files the sum.
    shifted = architecture == "gemma" and gguf.endswith("_norm.weight")
    if shifted:
        return Widened(renamed, 1 if to_gguf else -1)
    return Widened(renamed, 0) if vector and to_gguf else renamed


def heads_of(fields: Mapping[str, Any], architecture: str, name: str) -> int:
    """How many heads a matrix has whose rows llama.cpp orders in its own way; 0 for every other one.

    It rotates neighbours where transformers rotates the halves of a head, but for its architecture "llama" only: row
    (head, half, i) of transformers is its row (head, i, half).
    """
    module = name.split(".")[-2]
    if architecture != "llama" or module not in ("attn_q", "attn_k"):
        return 0
    keys = [f"{architecture}.attention.head_count"]
    if module == "attn_k":
        keys = [f"{architecture}.attention.head_count_kv", *keys]
    heads = next((fields[key] for key in keys if fields.get(key)), 0)
    if not isinstance(heads, int) or heads < 1:
        takes = "the number of heads, the same in all layers"
        raise CheckpointError(complaint(CALL, keys[0], repr(heads), takes))
    return heads


def row_order(about: Description, heads: int, to_gguf: bool) -> NDArray[np.int64] | None:
    """Which rows of a matrix come where on the other side, see `heads_of`."""
    if not heads:
        return None
    n = about.shape[0] if about.shape else 0
    if n % (2 * heads) or n == 0:
        raise CheckpointError(complaint(CALL, about.name, f"{n} rows for {heads} heads", "an even number for each"))
    half = n // heads // 2
    return np.arange(n).reshape((heads, 2, half) if to_gguf else (heads, half, 2)).swapaxes(1, 2).ravel()
