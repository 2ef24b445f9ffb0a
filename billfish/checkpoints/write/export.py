"""Writing checkpoints: billfish's own layout, compressed-tensors, MLX, GPTQ, AWQ, plain arrays, GGUF.

selection        which tensors are quantized, and to which format
plan             what becomes of each tensor, from headers, scales and offsets
recast           whether another format holds the same weights, bit for bit
target           what a layout has to say to be written; the layouts themselves: billfish.checkpoints.layouts
tokenizer_files  a tokenizer as GGUF's fields, or as files of a folder
resumable_writer the bytes to disk, in such a way that being killed costs nothing
lock             one writer for each output
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.entry import Description
from billfish.checkpoints.gguf_header import STRING, UINT32, Fields, typed
from billfish.checkpoints.layouts.awq import AwqTarget
from billfish.checkpoints.layouts.compressed_tensors import CompressedTensorsTarget
from billfish.checkpoints.layouts.gguf import GgufTarget, Metadata, gguf_file
from billfish.checkpoints.layouts.gptq import Gptq2Target, GptqTarget
from billfish.checkpoints.layouts.mlx import MlxTarget
from billfish.checkpoints.layouts.native import NativeTarget
from billfish.checkpoints.layouts.plain import PlainTarget
from billfish.checkpoints.mixes import FILE_TYPES, Mix
from billfish.checkpoints.names.expert_stacks import by_mlx_stacks, by_transformers_stacks, one_by_one
from billfish.checkpoints.names.gguf_names import (
    EMBEDDING,
    UnknownModel,
    by_gguf_names,
    by_model_names,
    is_gguf,
    is_gguf_name,
    is_of_images,
    model_config,
)
from billfish.checkpoints.names.sentence_modules import MODULES, sentence_fields, sentence_settings
from billfish.checkpoints.reports import ConversionReport, Done, Remark, Written
from billfish.checkpoints.safetensors_files import TYPES
from billfish.checkpoints.tokenizer.gguf_tokenizer import problem_of
from billfish.checkpoints.write.plan import OutputSettings, Plan, plan, refuse
from billfish.checkpoints.write.resumable_writer import Identity, Output, check_free, identity, is_current, write
from billfish.checkpoints.write.target import (
    ExpertNames,
    Item,
    Target,
    json_bytes,
    safetensors_file,
    safetensors_files,
)
from billfish.checkpoints.write.tokenizer_files import fields_without_tokenizer, tokenizer_fields, tokenizer_files
from billfish.core.errors import BackendUnavailable, CheckpointError, ModelError, failure, readable
from billfish.core.files import read_whole
from billfish.core.progress import OnProgress
from billfish.core.version import __version__
from billfish.models import MODEL_TYPES

TARGETS: dict[str, type[Target]] = {
    target.name: target
    for target in (
        NativeTarget,
        CompressedTensorsTarget,
        MlxTarget,
        GptqTarget,
        Gptq2Target,
        AwqTarget,
        PlainTarget,
        GgufTarget,
    )
}
ARRANGED: dict[ExpertNames, Callable[[Checkpoint], Checkpoint]] = {
    "as they are": lambda checkpoint: checkpoint,
    "one by one": one_by_one,
    "mlx stacks": by_mlx_stacks,
    "transformers stacks": by_transformers_stacks,
}
# Files of a model's folder that are no weights: they are copied.
COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "LICENSE*", "README*", "NOTICE*")
REPLACED = (MODULES, "config.json", "quantize_config.json", "hf_quant_config.json", "quant_config.json")
# What the configuration and GGUF's fields of a tokenizer are made of.
CONFIGURATION = ("config.json", "quantize_config.json", "hf_quant_config.json")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
LINK = "a link that leads out of the model's folder"
MAX_COMPANION_BYTES = 200_000_000
QUANTIZATION_VERSION = 2  # of ggml's blocks
FILES = (".gguf", ".safetensors")  # an output of such a name is one file, any other a folder
# Whoever names an output so means a file, and not a folder. Others, such as ".5B", belong to the names of models.
OTHER_FILES = (
    *(".bin", ".ckpt", ".dat", ".ggml", ".gz", ".h5", ".json", ".npy", ".npz", ".onnx", ".pickle", ".pkl", ".pt"),
    *(".pth", ".tar", ".tflite", ".txt", ".zip"),
)


def export(
    call: str, checkpoint: Checkpoint, path: Path, settings: OutputSettings, progress: bool | OnProgress
) -> ConversionReport:
    """Write a checkpoint to `path`."""
    target, sources = settings.target, identity(checkpoint.files)  # before anything is read
    _check_path(call, checkpoint, path, settings)
    checkpoint, planned = _planned(call, checkpoint, settings)
    refuse(call, planned, settings)
    output = _output(checkpoint, sources, path, planned, settings)
    write(call, path, output, progress, settings.overwrite)
    return _report(checkpoint, path, planned, target, output)


def check_export(call: str, checkpoint: Checkpoint, path: Path, settings: OutputSettings) -> list[tuple[str, Item]]:
    """Raises what `export` would raise before it writes. Whoever computes for long beforehand asks here first.

    Returns the tensors that would be quantized, each with its name in the source.
    """
    _check_path(call, checkpoint, path, settings)
    check_free(call, path, path.suffix not in FILES, settings.overwrite)
    arranged, planned = _planned(call, checkpoint, settings)
    refuse(call, planned, settings)
    items = [item for item in planned.items if item.name in planned.quantized]
    return [(arranged.origins.get(item.name, item.name), item) for item in items]


def _planned(call: str, checkpoint: Checkpoint, settings: OutputSettings) -> tuple[Checkpoint, Plan]:
    """The checkpoint under the target's names, and what becomes of its tensors."""
    if isinstance(settings.target, GgufTarget):
        named = _named_for_gguf(call, checkpoint, settings)
        left = [name for name in checkpoint if is_of_images(name) and name not in named]
        planned = plan(named, settings)
        planned.notes += [
            Remark(name, "left out: of images or sound, for which llama.cpp has another file") for name in left
        ]
        return named, planned
    checkpoint = ARRANGED[settings.target.expert_names](_for_folders(checkpoint))
    return checkpoint, plan(checkpoint, settings)


def _check_path(call: str, checkpoint: Checkpoint, path: Path, settings: OutputSettings) -> None:
    """Raises for a name that the target is not written to, and for an output that would replace its own input."""
    target, suffix = settings.target, path.suffix if path.suffix in FILES else ""
    lower = path.suffix.lower()
    is_file = lower in OTHER_FILES or bool(difflib.get_close_matches(lower, FILES))
    if suffix not in target.suffixes or (not suffix and is_file):
        kinds = {"": "a folder"} | {suffix: f"a name that ends in {suffix}" for suffix in FILES}
        needs = " or ".join(kinds[known] for known in target.suffixes)
        what = f"a {path.suffix} file" if suffix or is_file else "a folder"
        raise CheckpointError(failure(call, f"the output {path} is {what}", f"The layout {target.name} needs {needs}."))
    out = path.resolve()
    inputs = [file.path.resolve() for file in checkpoint.files]
    if settings.overwrite and any(out in (file, *file.parents) for file in inputs):
        raise CheckpointError(f"{call}: {readable(path)} is where the input is. Choose another output.")


def _named_for_gguf(call: str, checkpoint: Checkpoint, settings: OutputSettings) -> Checkpoint:
    """As llama.cpp names it; raises if it has no names for it, unless the names may stay."""
    view = _for_gguf(checkpoint)
    translated = view is not checkpoint or is_gguf(checkpoint)
    if not translated and not settings.raw_names and not all(map(is_gguf_name, checkpoint)):
        kind = checkpoint.config.get("model_type")
        problem = f"GGUF has no names for the tensors of {checkpoint.path} (model_type {kind!r})"
        fix = (
            f"Supported are {', '.join(MODEL_TYPES)}, with all sizes in config.json."
            " --raw-names (raw_names=True) keeps the tensor names, in a file that only bf.load reads."
        )
        raise CheckpointError(failure(call, problem, fix))
    return view


def _for_folders(checkpoint: Checkpoint) -> Checkpoint:
    """A GGUF file as transformers and mlx-lm name it, with a config.json. Other checkpoints as they are."""
    try:
        view = by_model_names(checkpoint)
    except UnknownModel:
        return checkpoint
    if view is checkpoint or EMBEDDING not in checkpoint:
        return checkpoint
    view.config = model_config(checkpoint)
    return view


def _for_gguf(checkpoint: Checkpoint) -> Checkpoint:
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


def _report(checkpoint: Checkpoint, path: Path, planned: Plan, target: Target, output: Output) -> ConversionReport:
    tensors = []
    for item in planned.items:
        about = checkpoint.describe(item.name)
        nbytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in target.all_specs(item).values())
        done: Done = "quantized" if item.name in planned.quantized else _move(about, item)
        tensors.append(Written(item.name, about.kind, item.kind, math.prod(item.shape), about.nbytes, nbytes, done))
    return ConversionReport(path, target.name, tuple(tensors), planned.left, tuple(planned.notes), output.nbytes)


def _move(about: Description, item: Item) -> Done:
    """What became of a tensor that was not quantized."""
    if about.kind == item.kind:
        return "copied"
    if item.format is not None:
        return "moved"
    return "cast" if about.format is None else "decoded"


def _output(checkpoint: Checkpoint, sources: Identity, path: Path, planned: Plan, settings: OutputSettings) -> Output:
    """What is to be written; the plan's notes get what is left out."""
    target, items, notes = settings.target, planned.items, planned.notes
    statistics = settings.quantization.statistics if settings.quantization else None
    on_disk = bool(checkpoint.files)  # what is in memory is never the same again
    inputs = {
        "billfish": __version__,
        "sources": sources if on_disk else secrets.token_hex(),
        "method": settings.quantization.method if settings.quantization else "",
        "requantize": settings.requantize,
        "rotation": settings.rotation,
        "statistics": statistics.digest if statistics else "",
        "gptq": settings.quantization.gptq_device.partition(":")[0] if settings.quantization else "",
    }
    unchanged = functools.partial(is_current, checkpoint.files, sources)
    config = _config(checkpoint, notes)
    if isinstance(target, GgufTarget):
        mix = settings.quantization.mix if settings.quantization else None
        described = _file_type(checkpoint, items, mix)
        tokenizer = _tokenizer_fields(checkpoint, settings.raw_names, notes)
        fields = {**_gguf_metadata(checkpoint, config), **tokenizer, **described}
        file = gguf_file(target, path.name, items, fields, checkpoint.release)
        return Output([file], {}, False, inputs, unchanged, on_disk)
    quantization = ("quantization", "quantization_config", "compression_config")
    config = {k: v for k, v in config.items() if k not in quantization}
    metadata = target.metadata(items)
    if path.suffix in FILES:
        file = safetensors_file(target, path.name, items, metadata, checkpoint.release)
        notes += [Remark(name, "left out: the output is one file") for name in _companions(checkpoint, [])]
        return Output([file], {}, False, inputs, unchanged, on_disk)
    if settings.dtype is not None:
        config |= dict.fromkeys({"torch_dtype", "dtype"} & config.keys() or {"torch_dtype"}, settings.dtype.name)
    files, index = safetensors_files(target, items, metadata, checkpoint.release)
    small = {**_tokenizer(checkpoint, notes), **_companions(checkpoint, notes), **index, **target.further_files(items)}
    small["config.json"] = json_bytes(config | target.config(items))
    return Output(files, small, True, inputs, unchanged, on_disk)


def _config(checkpoint: Checkpoint, notes: list[Remark]) -> dict[str, Any]:
    """The configuration, unless a part of it lies elsewhere; the notes get what is left out."""
    if checkpoint.folder is None or is_gguf(checkpoint):
        return checkpoint.config
    foreign = _foreign(CONFIGURATION, checkpoint.folder)
    notes += [Remark(name, f"left out: {LINK}") for name in foreign]
    if foreign or not (checkpoint.folder / MODULES).is_file():
        return {} if foreign else checkpoint.config
    try:
        fields = sentence_fields(checkpoint.folder, checkpoint.config, "")
    except CheckpointError as error:
        notes.append(Remark(MODULES, f"left out: {error}"))
        return checkpoint.config
    return {**checkpoint.config, **sentence_settings(fields, "")}


def _tokenizer(checkpoint: Checkpoint, notes: list[Remark]) -> dict[str, bytes]:
    """The tokenizer that a GGUF file holds, in files of its own."""
    if not is_gguf(checkpoint) or problem_of(checkpoint.metadata):
        return {}
    try:
        return tokenizer_files(checkpoint.metadata)
    except (ModelError, BackendUnavailable) as error:
        notes.append(Remark("tokenizer", f"left out: {error}"))
        return {}


def _tokenizer_fields(checkpoint: Checkpoint, raw_names: bool, notes: list[Remark]) -> Fields:
    """The tokenizer that lies beside a folder's weights, as GGUF has it. No program runs a file that lacks it, so a
    tokenizer that cannot be translated is an error, unless `raw_names` asks for a file that no program runs."""
    folder = checkpoint.folder
    if folder is None or EMBEDDING not in checkpoint or is_gguf(checkpoint):
        return {}
    files = [name for name in ("tokenizer.json", "tokenizer.model") if (folder / name).is_file()]
    if not files:
        return typed(fields_without_tokenizer(folder, checkpoint.describe(EMBEDDING).shape[0]))
    try:
        for name in _foreign(TOKENIZER, folder):
            raise ModelError(failure("convert", f"{name} is {LINK}", "Copy the file into the folder."))
        architecture, *_ = checkpoint.metadata.get("general.architecture", ("",))
        return typed(tokenizer_fields(folder, checkpoint.describe(EMBEDDING).shape[0], architecture))
    except (ModelError, BackendUnavailable) as error:
        if not raw_names:
            without = "--raw-names (raw_names=True) writes a file without a tokenizer, which only bf.load reads."
            raise CheckpointError(f"{error} {without}") from error
        notes.append(Remark(files[0], f"left out: {error}"))
        return {}


def _companions(checkpoint: Checkpoint, notes: list[Remark]) -> dict[str, bytes]:
    folder = checkpoint.folder
    if folder is None or not (folder / "config.json").is_file():  # in memory, or a file in some folder, not a model's
        return {}
    found = {path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()}
    copied = {}
    for path in sorted(found):
        if path.name in REPLACED or path.name.endswith(".safetensors.index.json"):
            continue
        if not _belongs_to(path, folder):
            notes.append(Remark(path.name, f"left out: {LINK}"))
        elif path.stat().st_size > MAX_COMPANION_BYTES:
            notes.append(Remark(path.name, f"left out: larger than {MAX_COMPANION_BYTES / 1e6:.0f} MB"))
        else:
            copied[path.name] = read_whole(path, MAX_COMPANION_BYTES)
    return copied


def _foreign(names: Iterable[str], folder: Path) -> list[str]:
    """Those files of a folder that are not the model's own."""
    return [name for name in names if (folder / name).is_file() and not _belongs_to(folder / name, folder)]


def _belongs_to(path: Path, folder: Path) -> bool:
    """Whether a file is the model's own. A downloaded folder may have a README that is a link to somebody's keys, and
    outputs are published.

    Hugging Face's cache is an exception: `models--NAME/snapshots/REVISION` has nothing but links to
    `models--NAME/blobs`. That folder belongs to the same model, and only the cache writes to it.
    """
    target, home = path.resolve(), folder.resolve()
    if target.is_relative_to(home):
        return True
    for above in home.parents:
        if above.name == "snapshots" and above.parent.name.startswith("models--"):
            return target.parent == above.parent / "blobs"
    return False


def _gguf_metadata(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Fields:
    """The fields of a GGUF file as they are, or those that llama.cpp needs; of models that it does not know, or we do
    not, the architecture and the whole configuration."""
    if "general.architecture" in checkpoint.metadata and not isinstance(checkpoint.metadata, Metadata):
        return dict(checkpoint.metadata)
    if isinstance(checkpoint.metadata, Metadata):
        if "general.architecture" not in checkpoint.metadata:
            problem = f"{checkpoint.path} is not a model: it has no general.architecture (an imatrix file has none)"
            raise CheckpointError(failure("convert", problem))
        dropped = ("general.file_type", "general.quantization_version", "general.alignment")
        return {
            name: (checkpoint.metadata[name], *checkpoint.metadata.types(name))
            for name in checkpoint.metadata
            if name not in dropped and not name.startswith("split.")
        }
    architecture = str(config.get("model_type", "unknown"))
    return {
        "general.architecture": (architecture, STRING, None),
        "billfish.config": (json.dumps(config, sort_keys=True), STRING, None),
    }


def _file_type(checkpoint: Checkpoint, items: Sequence[Item], mix: Mix | None) -> Fields:
    """`general.file_type`, what llama.cpp calls such a file: by the mix that was asked for, or as it was called if no
    tensor has changed, or by the format or type that most weights have."""
    number = checkpoint.metadata.get("general.file_type")
    if mix is not None:
        number = mix.file_type
    elif number is None or any(_changed(checkpoint, item) for item in items):
        weights: Counter[str] = Counter()
        for item in items:
            weights[item.dtypes[""].name if item.format is None else item.format.name] += math.prod(item.shape)
        number = next((FILE_TYPES.get(kind) for kind, _ in weights.most_common(1)), None)
    fields: Fields = {}
    if number is not None:
        fields["general.file_type"] = (number, UINT32, None)
    if any(item.format for item in items):
        fields["general.quantization_version"] = (QUANTIZATION_VERSION, UINT32, None)
    return fields


def _changed(checkpoint: Checkpoint, item: Item) -> bool:
    about = checkpoint.describe(item.name)
    return about.format is not item.format or (item.format is None and TYPES[about.dtype][1] != item.dtypes[""])
