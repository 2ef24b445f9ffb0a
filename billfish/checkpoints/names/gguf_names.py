"""A decoder under the names of transformers and mlx-lm, and under llama.cpp's: one translation, in both directions.

llama.cpp has names of its own, an order of rows of its own, and fields instead of a config.json; billfish.models says
which, for each architecture. What it stores otherwise is a view of the same file: weights only move, and no bit of a
matrix changes. Experts are stacks on both sides, see billfish.checkpoints.names.expert_stacks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.derived import Computed, Renamed, Widened
from billfish.checkpoints.entry import Description, Entry
from billfish.checkpoints.layouts.gguf import Metadata
from billfish.checkpoints.names.expert_stacks import by_stacks
from billfish.checkpoints.safetensors_files import CALL
from billfish.core.errors import CheckpointError, bad_argument, failure
from billfish.models import ARCHITECTURES, Architecture, of_config, of_gguf
from billfish.models import UnknownModel as UnknownModel
from billfish.models.architecture import EMBEDDING as EMBEDDING
from billfish.models.architecture import HEAD as HEAD
from billfish.models.architecture import LAYER, TOP, Field
from billfish.models.fields import Fields
from billfish.models.rope import FACTOR_TENSORS
from billfish.models.rope import ROTARY_FACTORS as ROTARY_FACTORS

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
    architecture = of_gguf(fields)
    if architecture is None:
        problem = f"{checkpoint.path} has the architecture {fields.get('general.architecture')!r}"
        raise UnknownModel(failure(CALL, problem, f"Supported are {', '.join(ARCHITECTURES)}."))
    entries, origins = dict[str, Entry](), list[str]()
    for name in checkpoint:
        new = model_name(name, architecture.gguf)
        if new is not None:
            entries[new] = _translated(checkpoint.entry(name), name, new, architecture, fields, to_gguf=False)
            origins.append(name)
        elif name not in FACTOR_TENSORS:  # which the configuration says
            raise UnknownModel(failure(CALL, f"{checkpoint.path} has an unknown tensor {name!r}", ONLY_DECODERS))
    view = checkpoint.view(entries, origins)
    stacked = by_stacks(view)  # where gate and up are one stack, they become two
    if stacked is not view:
        stacked.origins = {name: view.origins[origin] for name, origin in stacked.origins.items()}
    return stacked


def by_gguf_names(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint under llama.cpp's names, in its order of rows, its fields (numbers and strings) as metadata. GGUF
    files are as they are; raises UnknownModel for a model that we cannot translate."""
    if is_gguf(checkpoint):
        return checkpoint
    architecture = of_config(checkpoint.config, checkpoint.path)
    config = architecture.completed(checkpoint.config)
    fields, stacked = fields_of(architecture, config, checkpoint.path), by_stacks(checkpoint)
    entries, origins = dict[str, Entry](), list[str]()
    for name in stacked:
        if name.endswith(INVERSE_FREQUENCIES):
            continue
        new = gguf_name(name, architecture.gguf)
        if new is None:
            raise UnknownModel(failure(CALL, f"{checkpoint.path} has an unknown tensor {name!r}", ONLY_DECODERS))
        if new in entries:
            raise CheckpointError(failure(CALL, f"two tensors would be named {new}, one of them {name}"))
        entries[new] = _translated(stacked.entry(name), new, new, architecture, fields, to_gguf=True)
        origins.append(stacked.origins.get(name, name))
    if architecture.unpublished_head and HEAD in entries and config.get("tie_word_embeddings", True):
        del origins[list(entries).index(HEAD)], entries[HEAD]
    rope_size = fields[f"{architecture.gguf}.rope.dimension_count"]
    assert isinstance(rope_size, int)
    for name, factors in architecture.rule(config).factor_tensors(rope_size).items():
        entries[name] = Computed(name, "plain", factors)
        origins.append(name)
    view = checkpoint.view(entries, origins)
    view.metadata = fields
    return view


def fields_of(architecture: Architecture, config: Mapping[str, Any], path: Path) -> dict[str, Field]:
    """GGUF's fields for a config.json that is completed: all that a decoder must know."""
    name = Path(str(config.get("_name_or_path") or path)).name
    return {
        "general.architecture": architecture.gguf,
        "general.name": name.encode(errors="replace").decode(),  # of a path, which may be no UTF-8
        **{f"{architecture.gguf}.{field}": value for field, value in architecture.fields(config).items()},
    }


def model_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config.json of a GGUF file whose architecture we know."""
    architecture = of_gguf(checkpoint.metadata)
    assert architecture is not None
    factors = {name: np.asarray(checkpoint[name]) for name in FACTOR_TENSORS if name in checkpoint}
    vocabulary = checkpoint.describe(EMBEDDING).shape[0]
    return architecture.config(Fields(checkpoint.metadata, architecture.gguf), vocabulary, checkpoint, factors)


def model_name(name: str, architecture: str = "") -> str | None:
    """The name in transformers of a tensor of GGUF; None if it has none. Without an architecture, that of a llama or of
    the first architecture that has such a tensor."""
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if layer is not None and layer[2] in _parameters(architecture):
        return f"model.layers.{layer[1]}.{_parameters(architecture)[layer[2]]}"
    module, _, kind = (layer[2] if layer else name).rpartition(".")
    known = (_modules if layer else _top)(architecture).get(module)
    if known is None:
        return None
    return f"model.layers.{layer[1]}.{known}.{kind}" if layer else f"{known}.{kind}"


def gguf_name(name: str, architecture: str = "") -> str | None:
    """The name in GGUF of a tensor of transformers, with experts as stacks; None if it has none. Architectures as in
    :func:`model_name`."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if layer is None:
        module, _, kind = name.rpartition(".")
        top = next((ours for ours, theirs in _top(architecture).items() if theirs == module), None)
        return top and f"{top}.{kind}"
    parameters, name = _parameters(architecture), _one_spelling(layer[2])
    own = next((ours for ours, theirs in parameters.items() if _one_spelling(theirs) == name), None)
    if own is not None:
        return f"blk.{layer[1]}.{own}"
    module, _, kind = layer[2].rpartition(".")
    known = _gguf_modules(architecture).get(_one_spelling(module))
    return known and f"blk.{layer[1]}.{known}.{kind}"


@functools.cache
def _parameters(architecture: str) -> dict[str, str]:
    """Tensors of a layer that are no weight or bias of a module, by llama.cpp's names."""
    tables = [each.parameters for each in Architecture.known if architecture in ("", each.gguf)]
    return {ours: theirs for table in tables for ours, theirs in table.items()}


@functools.cache
def _modules(architecture: str) -> dict[str, str]:
    """The modules of a layer, by llama.cpp's names. Where no architecture is named, a Llama's go first."""
    tables = [each.modules for each in Architecture.known if architecture in ("", each.gguf)]
    last = () if architecture else (LAYER,)
    return {ours: theirs for table in (*reversed(tables), *last) for ours, theirs in table.items()}


@functools.cache
def _gguf_modules(architecture: str) -> dict[str, str]:
    """The same by the names of transformers."""
    tables = [each.modules for each in Architecture.known if architecture in ("", each.gguf)]
    last = () if architecture else (LAYER,)
    return {_one_spelling(theirs): ours for table in (*reversed(tables), *last) for ours, theirs in table.items()}


@functools.cache
def _top(architecture: str) -> dict[str, str]:
    """The modules outside of layers, by llama.cpp's names."""
    tables = [each.top for each in Architecture.known if architecture in ("", each.gguf)]
    return {ours: theirs for table in (*reversed(tables), TOP) for ours, theirs in table.items()}


def _one_spelling(module: str) -> str:
    """A module's name as transformers 5 has it in memory; its files keep older ones."""
    return module.replace("block_sparse_moe.", "mlp.").replace("router.layer", "router")


def _translated(
    entry: Entry, gguf: str, new: str, architecture: Architecture, fields: Mapping[str, Any], to_gguf: bool
) -> Entry:
    """A tensor for the other side, where it is called `new`; `gguf` is its name in GGUF."""
    about = entry.description
    renamed = Renamed(entry, new, row_order(about, heads_of(fields, architecture, gguf), to_gguf))
    if about.format is not None:
        return renamed
    if architecture.norm_offset and gguf.endswith("_norm.weight"):
        return Widened(renamed, architecture.norm_offset if to_gguf else -architecture.norm_offset)
    if gguf.endswith("ffn_gate_inp_shexp.weight"):  # a matrix of one row, which is a vector in GGUF
        return Widened(renamed, shape=about.shape[1:] if to_gguf else (1, *about.shape))
    exact = len(about.shape) == 1 or gguf.endswith((".bias", "ffn_gate_inp.weight"))
    return Widened(renamed) if exact and to_gguf else renamed


def heads_of(fields: Mapping[str, Any], architecture: Architecture, name: str) -> int:
    """How many heads a matrix has whose rows llama.cpp orders in its own way; 0 for every other one.

    It rotates neighbours where transformers rotates the halves of a head, in some architectures: row (head, half, i) of
    transformers is its row (head, i, half).
    """
    module = name.split(".")[-2]
    if not architecture.reordered or module not in ("attn_q", "attn_k"):
        return 0
    keys = [f"{architecture.gguf}.attention.head_count"]
    if module == "attn_k":
        keys = [f"{architecture.gguf}.attention.head_count_kv", *keys]
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
