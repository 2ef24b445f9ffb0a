"""A decoder under the names of transformers and mlx-lm, and under llama.cpp's: one translation, in both directions.

llama.cpp has names of its own, an order of rows of its own, and fields instead of a config.json; billfish.models says
which, for each architecture. What it stores otherwise is a view of the same file: weights only move, and no bit of a
matrix changes. Experts are stacks on both sides, see billfish.checkpoints.names.expert_stacks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.derived import Below, Computed, Joined, OneExpert, Renamed, Widened
from billfish.checkpoints.entry import Entry
from billfish.checkpoints.layouts.gguf import Metadata
from billfish.checkpoints.names.expert_stacks import by_stacks, stacks_in
from billfish.checkpoints.names.sentence_modules import RANK, sentence_fields, sentence_settings
from billfish.checkpoints.safetensors_files import CALL
from billfish.core.errors import CheckpointError, failure
from billfish.models import ARCHITECTURES, Architecture, of_config, of_gguf
from billfish.models import UnknownModel as UnknownModel
from billfish.models.architecture import EMBEDDING as EMBEDDING
from billfish.models.architecture import HEAD as HEAD
from billfish.models.architecture import IMAGES, LAYER, TEXT_PREFIXES, TOP, Field
from billfish.models.difference import Numbers, Order
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
        new, together = _folder_name(name, architecture, fields), _together(architecture, name)
        if new is not None and new in entries and len(together) > 1:
            continue
        if new is not None and len(together) > 1:
            entries[new] = _joined([_at(checkpoint, part) for part in together], together, new, architecture, fields)
            origins.append(name)
        elif new is not None:
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
    text = text_config(checkpoint.config)
    architecture = of_config(text, checkpoint.path)
    config = architecture.completed(text)
    fields = fields_of(architecture, config, checkpoint.path)
    stacked = by_stacks(_text_only(checkpoint, architecture.prefixes(config["num_hidden_layers"])))
    entries, origins = dict[str, Entry](), list[str]()
    for name in stacked:
        if name.endswith(INVERSE_FREQUENCIES):
            continue
        known = gguf_name(name, architecture.gguf)
        if known is None:
            raise UnknownModel(failure(CALL, f"{checkpoint.path} has an unknown tensor {name!r}", ONLY_DECODERS))
        for new in _together(architecture, _own_name(architecture, known, fields)):
            if new in entries:
                raise CheckpointError(failure(CALL, f"two tensors would be named {new}, one of them {name}"))
            entries[new] = _translated(stacked.entry(name), new, new, architecture, fields, to_gguf=True)
            origins.append(stacked.origins.get(name, name))
    if architecture.unpublished_head and HEAD in entries and config.get("tie_word_embeddings", True):
        del origins[list(entries).index(HEAD)], entries[HEAD]
    rope_size = fields.get(f"{architecture.gguf}.rope.dimension_count")
    if isinstance(rope_size, int):  # else positions do not rotate
        for name, factors in architecture.rule(config).factor_tensors(rope_size).items():
            entries[name] = Computed(name, "plain", factors)
            origins.append(name)
    fields |= sentence_fields(checkpoint.folder, checkpoint.config, architecture.gguf)
    if "cls.output.weight" in entries:
        fields[f"{architecture.gguf}.pooling_type"] = RANK
        fields[f"{architecture.gguf}.classifier.labels"] = entries["cls.output.weight"].description.shape[0]
    view = checkpoint.view(entries, origins)
    view.metadata = fields
    return view


def column_orders(checkpoint: Checkpoint) -> dict[str, Order]:
    """For matrices whose columns GGUF has in another order than folders: which column of the other side each is."""
    if is_gguf(checkpoint) or "general.architecture" in checkpoint.metadata:
        architecture, fields = of_gguf(checkpoint.metadata), checkpoint.metadata
    else:
        try:
            text = text_config(checkpoint.config)
            architecture = of_config(text, checkpoint.path)
            fields = fields_of(architecture, architecture.completed(text), checkpoint.path)
        except CheckpointError:  # a model that nothing is known of
            return {}
    if architecture is None or not architecture.reordered_columns:
        return {}
    own, orders = Fields(fields, architecture.gguf), dict[str, Order]()
    for name in checkpoint:
        known = name if is_gguf_name(name) else gguf_name(name, architecture.gguf)
        if known is None or not _within_layer(known).startswith(architecture.reordered_columns):
            continue
        order = architecture.difference(own, _within_layer(known), checkpoint.describe(name).shape).columns
        if order is not None:
            orders[name] = order if known == name else np.argsort(order)
    return orders


def gguf_parts(name: str, shape: Sequence[int], fields: Mapping[str, Any]) -> list[str]:
    """The tensors of GGUF that hold what a tensor holds, under GGUF's name or a folder's. [] for one that GGUF has no
    name for. A matrix of an expert is in the stack of all experts.

    fields: of the model, as GGUF has them. An architecture that we do not know is an error."""
    if is_gguf_name(name):
        return [name]
    architecture = _known(fields)
    known = [gguf_name(each, architecture.gguf) for each in _stacks_in(name, shape)[0] or (name,)]
    if None in known:
        return []
    own = [_own_name(architecture, each, fields) for each in known if each]
    return [part for each in own for part in _together(architecture, each)]


def of_gguf_parts(name: str, shape: Sequence[int], parts: Mapping[str, Entry], fields: Mapping[str, Any]) -> Entry:
    """A tensor [*shape] under GGUF's name or a folder's, made of those that :func:`gguf_parts` tells."""
    (first, *others), architecture = parts.values(), _known(fields)
    stacks, expert = _stacks_in(name, shape)
    if [*parts] == [name]:
        return first
    if expert is not None:
        return OneExpert(first, name, expert)
    if len(stacks) > 1:
        return Joined(name, first, others[0], in_turn=architecture.expert_files == "gpt_oss")
    if len(parts) > 1:
        return _joined([first, *others], [*parts], name, architecture, fields)
    return _translated(first, next(iter(parts)), name, architecture, fields, to_gguf=False)


def fields_of(architecture: Architecture, config: Mapping[str, Any], path: Path) -> dict[str, Field]:
    """GGUF's fields for a config.json that is completed: all that a decoder must know."""
    name = Path(str(config.get("_name_or_path") or path)).name
    return {
        "general.architecture": architecture.gguf,
        "general.name": name.encode(errors="replace").decode(),  # of a path, which may be no UTF-8
        **{f"{architecture.gguf}.{field}": value for field, value in architecture.fields(config).items()},
    }


def in_folder(name: str, numbers: Numbers, fields: Mapping[str, Any]) -> Numbers:
    """Numbers of one of GGUF's tensors as a folder has them: Gemma's norms are without the 1 that GGUF adds."""
    architecture = of_gguf(fields)
    assert architecture is not None
    difference = architecture.difference(Fields(fields, architecture.gguf), _within_layer(name), numbers.shape)
    return numbers if difference.values is None else difference.values.to_folder(numbers)


def model_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config.json of a GGUF file whose architecture we know."""
    architecture = of_gguf(checkpoint.metadata)
    assert architecture is not None
    factors = {name: np.asarray(checkpoint[name]) for name in FACTOR_TENSORS if name in checkpoint}
    vocabulary = checkpoint.describe(EMBEDDING).shape[0]
    config = architecture.config(Fields(checkpoint.metadata, architecture.gguf), vocabulary, checkpoint, factors)
    return config | sentence_settings(checkpoint.metadata, architecture.gguf)


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
    name = _text_name(name)
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


def module_name(name: str, architecture: str) -> str:
    """The name in a folder of a matrix under any of its names, in one spelling. Several matrices of GGUF may have the
    same: a folder has them as one."""
    known = model_name(name, architecture) if is_gguf_name(name) else None
    return _one_spelling(_text_name(known or name))


def is_part(name: str, architecture: str) -> bool:
    """Whether a folder has several matrices of GGUF as one, and `name` is one of them or that one."""
    layer = re.fullmatch(r"model\.layers\.\d+\.(.+)\.weight", module_name(name, architecture))
    if not architecture or layer is None:
        return False
    return [_one_spelling(module) for module in _modules(architecture).values()].count(layer[1]) > 1


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
    last = () if architecture else (TOP,)
    return {ours: theirs for table in (*reversed(tables), *last) for ours, theirs in table.items()}


def _one_spelling(module: str) -> str:
    """A module's name as transformers 5 has it in memory; its files keep older ones."""
    return module.replace("block_sparse_moe.", "mlp.").replace("router.layer", "router")


def _known(fields: Mapping[str, Any]) -> Architecture:
    architecture = of_gguf(fields)
    assert architecture is not None
    return architecture


def _stacks_in(name: str, shape: Sequence[int]) -> tuple[tuple[str, ...], int | None]:
    """As `stacks_in`, but ((), None) for a matrix that is only called as stacks are: Granite's shared expert."""
    stacks, expert = stacks_in(name)
    return (stacks, expert) if expert is not None or len(shape) > 2 else ((), None)


def _translated(
    entry: Entry, gguf: str, new: str, architecture: Architecture, fields: Mapping[str, Any], to_gguf: bool
) -> Entry:
    """A tensor for the other side, where it is called `new`; `gguf` is its name in GGUF."""
    about = entry.description
    difference = architecture.difference(Fields(fields, architecture.gguf), _within_layer(gguf), about.shape)
    rows, columns = difference.rows, difference.columns
    if not to_gguf:
        rows, columns = (None if order is None else np.argsort(order) for order in (rows, columns))
    if about.format is not None:
        return Renamed(entry, new, rows, columns)
    shape, values = difference.shape(about.shape, to_gguf), difference.values
    function = None if values is None else values.to_gguf if to_gguf else values.to_folder
    precise = (".bias", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
    exact = to_gguf and (len(about.shape) == 1 or gguf.endswith(precise))
    if not exact and function is None and shape == about.shape:
        return Renamed(entry, new, rows, columns)
    if to_gguf:  # rows are those of GGUF's shape
        return Renamed(Widened(entry, function, shape), new, rows, columns)
    return Widened(Renamed(entry, new, rows, columns), function, shape)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that is of the language model, in models that take images, too."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    whole = {name: config[name] for name in ("tie_word_embeddings",) if config.get(name) is not None}
    return {**text, **whole}


def is_of_images(name: str) -> bool:
    """Whether a tensor of a folder is of a part for images or sound, which GGUF has a file of its own for."""
    return name.startswith(IMAGES)


def _text_name(name: str) -> str:
    """The name that a tensor of the language model has in folders without other parts."""
    prefix = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), None)
    return name if prefix is None else TEXT_PREFIXES[prefix] + name.removeprefix(prefix)


def _text_only(checkpoint: Checkpoint, prefixes: Mapping[str, str]) -> Checkpoint:
    """The tensors of the language model, under the names that they have without other parts."""
    entries, origins = dict[str, Entry](), list[str]()
    for name in checkpoint:
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is None:
            new = name
        elif prefixes[prefix]:
            new = prefixes[prefix] + name.removeprefix(prefix)
        else:
            continue
        entries[new] = checkpoint.entry(name) if new == name else Renamed(checkpoint.entry(name), new)
        origins.append(checkpoint.origins.get(name, name))
    if list(entries) == list(checkpoint):
        return checkpoint
    view = checkpoint.view(entries, origins)
    view.config = dict(text_config(checkpoint.config))
    return view


def _folder_name(name: str, architecture: Architecture, fields: Mapping[str, Any]) -> str | None:
    """The name in transformers of a tensor of GGUF, that of a block for drafts as folders have it."""
    new, own = model_name(name, architecture.gguf), Fields(fields, architecture.gguf)
    if new is not None and new.startswith("model.layers."):
        new = architecture.layer_prefix + new.removeprefix("model.layers.")
    if new is None or not own.get("nextn_predict_layers"):
        return new
    for theirs, ours in architecture.prefixes(architecture.layers(own)).items():
        if re.match(r"model\.layers\.\d", ours) and new.startswith(ours):
            return theirs + new.removeprefix(ours)
    return new


def _together(architecture: Architecture, name: str) -> list[str]:
    """The tensors of GGUF that folders have as one with `name`, in their order there."""
    layer, module, kind = _parts_of(name)
    together = next((modules for modules in architecture.joined if module in modules), (module,))
    return [f"{layer}{each}{kind}" for each in together]


def _own_name(architecture: Architecture, name: str, fields: Mapping[str, Any]) -> str:
    layer, module, kind = _parts_of(name)
    return f"{layer}{architecture.own_name(Fields(fields, architecture.gguf), module)}{kind}" if layer else name


def _parts_of(name: str) -> tuple[str, str, str]:
    """ "blk.N.", the module, and what the tensor is of it: ".weight", ".bias" or nothing."""
    within = _within_layer(name)
    module, dot, kind = within.rpartition(".")
    return name.removesuffix(within), module or within, f"{dot}{kind}" if dot else ""


def _at(checkpoint: Checkpoint, name: str) -> Entry:
    if name not in checkpoint:
        raise CheckpointError(failure(CALL, f"{checkpoint.path} has no tensor {name}"))
    return checkpoint.entry(name)


def _joined(
    entries: list[Entry], names: list[str], new: str, architecture: Architecture, fields: Mapping[str, Any]
) -> Entry:
    """Matrices of GGUF as the one that a folder has for them."""
    own = Fields(fields, architecture.gguf)
    differences = [
        architecture.difference(own, _within_layer(name), entry.description.shape)
        for name, entry in zip(names, entries, strict=True)
    ]
    rows = [difference.rows for difference in differences if difference.rows is not None]
    return Renamed(Below(new, entries), new, np.argsort(np.concatenate(rows)))


def _within_layer(name: str) -> str:
    return re.sub(r"^blk\.\d+\.", "", name)
