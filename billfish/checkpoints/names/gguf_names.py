"""A decoder under the names of transformers and mlx-lm, and under llama.cpp's: one translation, in both directions.

llama.cpp has names of its own, an order of rows of its own, and fields instead of a config.json. What it stores
otherwise is a view of the same file: weights only move, and no bit of a matrix changes. Experts are stacks on both
sides, see billfish.checkpoints.names.expert_stacks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.derived import Computed, Renamed, Widened
from billfish.checkpoints.entry import Description, Entry
from billfish.checkpoints.layouts.gguf import Metadata
from billfish.checkpoints.names.config_fields import completed
from billfish.checkpoints.names.expert_stacks import by_stacks
from billfish.checkpoints.names.hyperparameters import ARCHITECTURES, config_of, fields_of
from billfish.checkpoints.names.hyperparameters import UnknownModel as UnknownModel
from billfish.checkpoints.names.rope_scaling import FACTOR_TENSORS, factor_tensors
from billfish.checkpoints.names.rope_scaling import ROTARY_FACTORS as ROTARY_FACTORS
from billfish.checkpoints.safetensors_files import CALL
from billfish.core.errors import CheckpointError, bad_argument, failure

# The modules of a decoder with gated feed-forward blocks: llama.cpp's names, and those of transformers.
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


def _experts(block: str, router: str) -> dict[str, str]:
    """The modules of a feed-forward block with experts."""
    stacks = {f"ffn_{part}_exps": f"{block}.experts.{part}_proj" for part in ("gate", "up", "down")}
    return {"ffn_gate_inp": f"{block}.{router}", **stacks}


SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
TWO_NORMS = {  # of Gemma: before and after each block
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# What an architecture has beside these modules, or under other names.
OWN: dict[str, dict[str, str]] = {
    "llama": _experts("block_sparse_moe", "gate"),
    "qwen3moe": _experts("mlp", "gate"),
    "qwen2moe": {**_experts("mlp", "gate"), **SHARED, "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
    "olmoe": _experts("mlp", "gate"),
    "granitemoe": _experts("block_sparse_moe", "router.layer"),
    "gpt-oss": {
        **_experts("mlp", "router"),
        "post_attention_norm": "post_attention_layernorm",  # before the experts, whatever its name says
        "attn_sinks": "self_attn.sinks",
    },
    "gemma2": TWO_NORMS,
    "gemma3": TWO_NORMS,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
# Architectures whose heads rotate neighbours in llama.cpp, where transformers rotates halves.
NEIGHBOURS = ("llama", "granitemoe", "smollm3")
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
SINKS = "self_attn.sinks"  # a parameter of its own in transformers, and no `.weight` of a module
INVERSE_FREQUENCIES = ".rotary_emb.inv_freq"  # old folders have it for each layer; it follows from the configuration
ONLY_DECODERS = "Supported are language models: decoders with gated feed-forward blocks."


# ---- checkpoints under other names --------------------------------------------------------------------------------


def is_gguf(checkpoint: Checkpoint) -> bool:
    """Whether it is a GGUF file, or a look at one under other names."""
    return isinstance(checkpoint.metadata, Metadata)


def is_gguf_name(name: str) -> bool:
    """Whether llama.cpp calls a tensor so."""
    return model_name(name) is not None or name in FACTOR_TENSORS


def by_model_names(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint under the names that models of transformers and mlx-lm have. Only GGUF has others, and an order of
    rows of its own; raises UnknownModel for one that we cannot translate."""
    if not is_gguf(checkpoint) or checkpoint.origins:
        return checkpoint
    fields = checkpoint.metadata
    if fields.get("general.architecture") not in ARCHITECTURES:
        problem = f"{checkpoint.path} has the architecture {fields.get('general.architecture')!r}"
        raise UnknownModel(failure(CALL, problem, f"Supported are {', '.join(ARCHITECTURES)}."))
    entries, origins = dict[str, Entry](), list[str]()
    for name in checkpoint:
        new = model_name(name, str(fields["general.architecture"]))
        if new is not None:
            entries[new] = _translated(checkpoint.entry(name), name, new, fields, to_gguf=False)
            origins.append(name)
        elif name not in FACTOR_TENSORS:  # which the configuration says
            raise UnknownModel(failure(CALL, f"{checkpoint.path} has an unknown tensor {name!r}", ONLY_DECODERS))
    return checkpoint.view(entries, origins)


def by_gguf_names(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint under llama.cpp's names, in its order of rows, its fields (numbers and strings) as metadata. GGUF
    files are as they are; raises UnknownModel for a model that we cannot translate."""
    if is_gguf(checkpoint):
        return checkpoint
    config = completed(checkpoint.config)
    fields = fields_of(config, checkpoint.path)
    architecture, stacked = str(fields["general.architecture"]), by_stacks(checkpoint)
    entries, origins = dict[str, Entry](), list[str]()
    for name in stacked:
        if name.endswith(INVERSE_FREQUENCIES):
            continue
        new = gguf_name(name, architecture)
        if new is None:
            raise UnknownModel(failure(CALL, f"{checkpoint.path} has an unknown tensor {name!r}", ONLY_DECODERS))
        if new in entries:
            raise CheckpointError(failure(CALL, f"two tensors would be named {new}, one of them {name}"))
        entries[new] = _translated(stacked.entry(name), new, new, fields, to_gguf=True)
        origins.append(stacked.origins.get(name, name))
    if architecture.startswith("gemma") and HEAD in entries and config.get("tie_word_embeddings", True):
        del origins[list(entries).index(HEAD)], entries[HEAD]  # a copy of the embedding, which llama.cpp refuses
    rope_size = fields[f"{architecture}.rope.dimension_count"]
    assert isinstance(rope_size, int)
    for name, factors in factor_tensors(config, rope_size).items():
        entries[name] = Computed(name, "plain", factors)
        origins.append(name)
    view = checkpoint.view(entries, origins)
    view.metadata = fields
    return view


def model_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config.json of a GGUF file whose architecture we know."""
    factors = {name: np.asarray(checkpoint[name]) for name in FACTOR_TENSORS if name in checkpoint}
    vocabulary = checkpoint.describe(EMBEDDING).shape[0]
    return config_of(checkpoint.metadata, vocabulary, HEAD not in checkpoint, factors)


def model_name(name: str, architecture: str = "") -> str | None:
    """The name in transformers of a tensor of GGUF; None if it has none. Without an architecture, that of a llama or of
    the first architecture that has such a tensor."""
    module, _, kind = name.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    known = _modules(architecture).get(match[2]) if match else TOP.get(module)
    if known is None:
        return None
    if match is None:
        return f"{known}.{kind}"
    return f"model.layers.{match[1]}.{known}" + ("" if known == SINKS else f".{kind}")


def gguf_name(name: str, architecture: str = "") -> str | None:
    """The name in GGUF of a tensor of transformers, with experts as stacks; None if it has none. Architectures as in
    :func:`model_name`."""
    name = f"{name}.weight" if name.endswith(SINKS) else name
    module, _, kind = name.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if match is None:
        top = next((ours for ours, theirs in TOP.items() if theirs == module), None)
        return top and f"{top}.{kind}"
    known = _gguf_modules(architecture).get(_one_spelling(match[2]))
    return known and f"blk.{match[1]}.{known}.{kind}"


@functools.cache
def _modules(architecture: str) -> dict[str, str]:
    """The modules of a layer, by llama.cpp's names."""
    if architecture:
        return LAYER | OWN.get(architecture, {})
    return {ours: theirs for table in (*reversed(OWN.values()), LAYER) for ours, theirs in table.items()}


@functools.cache
def _gguf_modules(architecture: str) -> dict[str, str]:
    """The same by the names of transformers."""
    if architecture:
        return {_one_spelling(theirs): ours for ours, theirs in _modules(architecture).items()}
    tables = (*reversed(OWN.values()), LAYER)
    return {_one_spelling(theirs): ours for table in tables for ours, theirs in table.items()}


def _one_spelling(module: str) -> str:
    """A module's name as transformers 5 has it in memory; its files keep older ones."""
    return module.replace("block_sparse_moe.", "mlp.").replace("router.layer", "router")


def _translated(entry: Entry, gguf: str, new: str, fields: Mapping[str, Any], to_gguf: bool) -> Entry:
    """A tensor for the other side, where it is called `new`; `gguf` is its name in GGUF."""
    architecture, about = fields["general.architecture"], entry.description
    renamed = Renamed(entry, new, row_order(about, heads_of(fields, architecture, gguf), to_gguf))
    if about.format is not None:
        return renamed
    # Gemma multiplies with 1 + w: its folders have w, its GGUF files the sum.
    if architecture.startswith("gemma") and gguf.endswith("_norm.weight"):
        return Widened(renamed, 1 if to_gguf else -1)
    if gguf.endswith("ffn_gate_inp_shexp.weight"):  # a matrix of one row, which is a vector in GGUF
        return Widened(renamed, shape=about.shape[1:] if to_gguf else (1, *about.shape))
    exact = len(about.shape) == 1 or gguf.endswith((".bias", "ffn_gate_inp.weight"))
    return Widened(renamed) if exact and to_gguf else renamed


def heads_of(fields: Mapping[str, Any], architecture: str, name: str) -> int:
    """How many heads a matrix has whose rows llama.cpp orders in its own way; 0 for every other one.

    It rotates neighbours where transformers rotates the halves of a head, in some architectures: row (head, half, i) of
    transformers is its row (head, i, half).
    """
    module = name.split(".")[-2]
    if architecture not in NEIGHBOURS or module not in ("attn_q", "attn_k"):
        return 0
    keys = [f"{architecture}.attention.head_count"]
    if module == "attn_k":
        keys = [f"{architecture}.attention.head_count_kv", *keys]
    heads = next((fields[key] for key in keys if fields.get(key)), 0)
    if not isinstance(heads, int) or heads < 1:
        expected = "one number of heads for all layers"
        raise CheckpointError(bad_argument(CALL, keys[0], repr(heads), expected))
    return heads


def row_order(about: Description, heads: int, to_gguf: bool) -> NDArray[np.int64] | None:
    """Which rows of a matrix come where on the other side, see `heads_of`."""
    if not heads:
        return None
    n = about.shape[0] if about.shape else 0
    if n % (2 * heads) or n == 0:
        raise CheckpointError(failure(CALL, f"{about.name} has {n} rows for {heads} heads, not an even number each"))
    half = n // heads // 2
    return np.arange(n).reshape((heads, 2, half) if to_gguf else (heads, half, 2)).swapaxes(1, 2).ravel()
