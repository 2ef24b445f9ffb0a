"""Writing checkpoints: billfish's own layout, compressed-tensors, MLX, GGUF.

plan      what becomes of each tensor, from headers, scales and offsets
target    how it is called and laid out there
source    what the input is, so that no output is made of two
engine    the bytes to disk, in such a way that being killed costs nothing
partial   the folder that they are collected in, and whether it is ours
lock      one writer for each output
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.gguf import Metadata
from billfish.checkpoints.names import EMBEDDING, is_gguf
from billfish.checkpoints.writers import compressed_tensors, mlx, native
from billfish.checkpoints.writers.base import Item, Target, json_bytes, safetensors_files
from billfish.checkpoints.writers.compressed_tensors import CompressedTensorsTarget
from billfish.checkpoints.writers.engine import Output, write
from billfish.checkpoints.writers.gguf import GgufTarget, gguf_file
from billfish.checkpoints.writers.mlx import MlxTarget
from billfish.checkpoints.writers.names import GgufFields, for_folders, for_gguf, typed
from billfish.checkpoints.writers.native import NativeTarget
from billfish.checkpoints.writers.plan import Remark, Settings, plan, refuse
from billfish.checkpoints.writers.source import Identity, identity, is_current
from billfish.checkpoints.writers.tokenizer import tokenizer_fields, tokenizer_files
from billfish.errors import BackendUnavailable, CheckpointError, ModelError, complaint
from billfish.version import __version__

TARGETS: dict[str, type[Target]] = {
    target.name: target for target in (NativeTarget, CompressedTensorsTarget, MlxTarget, GgufTarget)
}
# Files of a model's folder that are no weights: they are copied.
COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "LICENSE*", "README*", "NOTICE*")
REPLACED = ("config.json", "quantize_config.json", "hf_quant_config.json", "quant_config.json")
MAX_COMPANION_BYTES = 200_000_000
STRING_TYPE, UINT32_TYPE = 8, 4


@dataclass(frozen=True)
class Report:
    """What was written."""

    items: list[Item]
    notes: list[Remark]
    nbytes: int


def export(
    call: str,
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    settings: Settings,
    start: Callable[[int], Callable[[int, str], None]],
) -> Report:
    """Write a checkpoint to `out`. `start` is given the number of bytes left, and returns what is told of progress."""
    path, target, sources = Path(out), settings.target, identity(checkpoint.files)  # before anything is read
    checkpoint = for_gguf(checkpoint) if isinstance(target, GgufTarget) else for_folders(checkpoint)
    items, problems, notes = plan(checkpoint, settings)
    takes = f"what {target.name} holds as it is; --requantize quantizes these again, and loses something"
    refuse(call, problems, takes)
    if isinstance(target, GgufTarget) != (path.suffix == ".gguf"):
        takes = "a name that ends in .gguf for GGUF, and a folder for everything else"
        raise CheckpointError(complaint(call, "OUT", path.name, takes))
    output = _output(checkpoint, sources, path, items, settings, notes)
    write(call, path, output, start)
    return Report(items, notes, output.nbytes)


def _output(
    checkpoint: Checkpoint, sources: Identity, path: Path, items: list[Item], settings: Settings, notes: list[Remark]
) -> Output:
    """What is to be written; `notes` gets what is left out."""
    target = settings.target
    inputs = {
        "billfish": __version__,
        "sources": sources,
        "method": settings.quantization.method if settings.quantization else "",
        "requantize": settings.requantize,
    }
    unchanged = functools.partial(is_current, checkpoint.files, sources)
    if isinstance(target, GgufTarget):
        fields = {**_gguf_metadata(checkpoint), **_tokenizer_fields(checkpoint, notes)}
        file = gguf_file(target, path.name, items, fields, checkpoint.release)
        return Output([file], {}, False, inputs, unchanged)
    config = {k: v for k, v in checkpoint.config.items() if k not in ("quantization", "compression_config")}
    config.pop("quantization_config", None)
    metadata = {"format": "pt"}
    if isinstance(target, CompressedTensorsTarget):
        config["quantization_config"] = compressed_tensors.quantization_config(items)
    elif isinstance(target, MlxTarget):
        metadata = {"format": "mlx"}
        quantization = mlx.quantization_config(items)
        if quantization:
            config |= {"quantization": quantization, "quantization_config": quantization}
    else:
        config["quantization_config"] = native.quantization_config(items)
        metadata["billfish"] = json.dumps(config["quantization_config"])
    files, index = safetensors_files(target, items, metadata, checkpoint.release)
    small = {**_tokenizer(checkpoint, notes), **_companions(checkpoint, notes), **index}
    small["config.json"] = json_bytes(config)
    return Output(files, small, True, inputs, unchanged)


def _tokenizer(checkpoint: Checkpoint, notes: list[Remark]) -> dict[str, bytes]:
    """The tokenizer that a GGUF file holds, in files of its own."""
    if not is_gguf(checkpoint) or "tokenizer.ggml.model" not in checkpoint.metadata:
        return {}
    try:
        return tokenizer_files(checkpoint.metadata)
    except (ModelError, BackendUnavailable) as error:
        notes.append(Remark("tokenizer", f"left out: {error}"))
        return {}


def _tokenizer_fields(checkpoint: Checkpoint, notes: list[Remark]) -> GgufFields:
    """The tokenizer that lies beside a folder's weights, as GGUF has it."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    files = [name for name in ("tokenizer.json", "tokenizer.model") if (folder / name).is_file()]
    if not files or EMBEDDING not in checkpoint or is_gguf(checkpoint):
        return {}
    try:
        return typed(tokenizer_fields(folder, checkpoint.describe(EMBEDDING).shape[0]))
    except (ModelError, BackendUnavailable) as error:
        notes.append(Remark(files[0], f"left out: {error}"))
        return {}


def _companions(checkpoint: Checkpoint, notes: list[Remark]) -> dict[str, bytes]:
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    if not (folder / "config.json").is_file():  # a file in some folder, not a model's
        return {}
    found = {path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()}
    copied = {}
    for path in sorted(found):
        if path.name in REPLACED or path.name.endswith(".safetensors.index.json"):
            continue
        if not _belongs_to(path, folder):
            notes.append(Remark(path.name, "left out: a link that leads out of the model's folder"))
        elif path.stat().st_size > MAX_COMPANION_BYTES:
            notes.append(Remark(path.name, f"left out: larger than {MAX_COMPANION_BYTES / 1e6:.0f} MB"))
        else:
            copied[path.name] = path.read_bytes()
    return copied


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


def _gguf_metadata(checkpoint: Checkpoint) -> GgufFields:
    """The fields of a GGUF file as they are, or those that llama.cpp needs; of models that it does not know, or we do
    not, the architecture and the whole configuration."""
    if "general.architecture" in checkpoint.metadata and not isinstance(checkpoint.metadata, Metadata):
        return dict(checkpoint.metadata)
    if isinstance(checkpoint.metadata, Metadata):
        dropped = ("general.file_type", "general.quantization_version", "general.alignment")
        return {
            name: (checkpoint.metadata[name], *checkpoint.metadata.types(name))
            for name in checkpoint.metadata
            if name not in dropped and not name.startswith("split.")
        }
    architecture = str(checkpoint.config.get("model_type", "unknown"))
    config = json.dumps(checkpoint.config, sort_keys=True)
    return {
        "general.architecture": (architecture, STRING_TYPE, None),
        "billfish.config": (config, STRING_TYPE, None),
    }
