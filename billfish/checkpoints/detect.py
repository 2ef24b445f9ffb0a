"""What a path holds, told by content: GGUF or safetensors by the first bytes, layouts by the arrays of each module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from billfish.checkpoints.entry import Entry
from billfish.checkpoints.layouts import (
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8_blocks,
    gptq,
    mlx,
    modelopt,
    native,
    plain,
)
from billfish.checkpoints.layouts.gguf import open_gguf
from billfish.checkpoints.safetensors_files import (
    CALL,
    MappedFile,
    Stored,
    damaged,
    open_shards,
    read_config,
    shards,
)
from billfish.core.errors import CheckpointError, failure
from billfish.core.files import open_regular, parse_json
from billfish.core.format_tag import ABOUT
from billfish.models.fields import section

# What torch.save writes, now and before 1.6. To read a pickle is to run it.
PICKLES = {b"PK\x03\x04": "a zip archive, probably a PyTorch checkpoint", b"\x80\x02": "a pickle"}

Found = tuple[list[MappedFile], dict[str, Entry], Mapping[str, Any], dict[str, Any]]


def open_path(path: Path) -> Found:
    """Files, entries, metadata and configuration of a checkpoint."""
    try:
        if path.is_dir():
            return _open_folder(path)
        with open_regular(path) as file:
            head = file.read(9)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            name = re.sub("^(https?):/(?!/)", r"\1://", str(path))  # Path takes a slash away
            raise CheckpointError(failure(CALL, f"no such file or folder: {name}", no_download(path))) from None
        raise CheckpointError(failure(CALL, f"cannot open {path}: {error.strerror}")) from None
    if head[:4] == b"GGUF":
        return *open_gguf(path), {}
    if head[8:9] == b"{":
        return _open_safetensors({path: None}, path.parent)
    if head.startswith(tuple(PICKLES)):
        raise damaged(path, f"is {contents(head)}", instead_of_pickle(path))
    if not head:
        raise damaged(path, "is an empty file", "Download it again.")
    raise damaged(path, f"is {contents(head)}", "Expected a GGUF or safetensors file, or a folder with one.")


def instead_of_pickle(path: Path) -> str:
    """What to do with a pickle."""
    code = f'bf.save(torch.load("{path}", weights_only=True), "{path.with_suffix(".safetensors")}")'
    return f"billfish does not read pickles, because they can run code. Convert it to safetensors: {code}"


def no_download(path: Path) -> str:
    """How to get a model, which may have been named as on the Hugging Face Hub."""
    known = re.fullmatch(r"https?:/+huggingface\.co/([\w.-]+/[\w.-]+)(?:/.*)?", str(path))
    if known is None and path.suffix not in (".gguf", ".safetensors"):
        known = re.fullmatch(r"([\w.-]+/[\w.-]+)", str(path))
    name = "ORG/NAME" if known is None else known[1]
    return f"billfish does not download models. Run: hf download {name} --local-dir DIR"


def contents(head: bytes) -> str:
    """What a file is, in words, from its first 9 bytes."""
    kinds = {b"GGUF": "a GGUF file", **PICKLES, b"\x89HDF": "an HDF5 file"}
    named = next((kind for magic, kind in kinds.items() if head.startswith(magic)), None)
    if named is None and head[8:9] == b"{":
        return "a safetensors file"
    return named or ("an empty file" if not head else f"a file of unknown type, which begins with {head!r}")


def _open_folder(folder: Path) -> Found:
    files = shards(folder)
    if files:
        return _open_safetensors(files, folder)
    models = [p for p in sorted(folder.glob("*.gguf")) if "-00001-of-" in p.name or "-of-" not in p.name]
    if len(models) == 1:
        return *open_gguf(models[0]), read_config(folder)
    pickles = sorted(path for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind))
    if not models and pickles:
        raise damaged(folder, f"holds its weights in pickles, such as {pickles[0].name}", instead_of_pickle(pickles[0]))
    if models:
        raise damaged(folder, f"holds {len(models)} GGUF files", f"Name one of them, such as {models[0].name}.")
    raise damaged(folder, "holds no *.safetensors and no *.gguf file")


def _open_safetensors(files: Mapping[Path, set[str] | None], folder: Path) -> Found:
    mapped, stored, metadata = open_shards(files)
    config = read_config(folder)
    return mapped, recognise(stored, config, metadata), metadata, config


# ---- which arrays belong together --------------------------------------------------------------------------------


class WeightSettings:
    """What configuration and metadata say about weights. Each part is looked up once for all modules."""

    def __init__(self, config: dict[str, Any], metadata: Mapping[str, str]) -> None:
        self._metadata = metadata
        self.about = section(config, "quantization_config") or section(config, "compression_config")
        self.mlx = section(config, "quantization") or section(config, "quantization_config")
        self.compressed = compressed_tensors.weights_of(self.about)

    @cached_property
    def native(self) -> dict[str, Any]:
        if self.about.get("quant_method") == "billfish":
            return self.about
        try:
            settings = parse_json(self._metadata.get("billfish", "{}").encode())
        except (ValueError, RecursionError):
            settings = None
        if not isinstance(settings, dict):
            raise CheckpointError(failure(CALL, "the metadata field 'billfish' is not a JSON object"))
        return settings


def recognise(stored: Mapping[str, Stored], config: dict[str, Any], metadata: Mapping[str, str]) -> dict[str, Entry]:
    """Entries by name: each module's arrays taken together where a layout knows them, all others as they are."""
    settings = WeightSettings(config, metadata)
    bitsandbytes.refuse_other_types(stored, settings.about)
    entries: dict[str, Entry] = {}
    for name in stored:
        entry = _recognise(name, stored, settings)
        if entry is not None:
            known = entry.description.name
            if known in entries or (known in stored and known not in entry.parts):
                raise CheckpointError(failure(CALL, f"two tensors are named {known}"))
            entries[known] = entry
    taken = frozenset[str]().union(*(entry.parts for entry in entries.values()))
    for name, array in stored.items():
        if name not in taken:
            entries[name] = plain.recognise(array, stored)
    return entries


def _recognise(name: str, stored: Mapping[str, Stored], settings: WeightSettings) -> Entry | None:
    """The entry that begins with this array, if one does."""
    module, dot, suffix = name.rpartition(".")

    def parts(names: tuple[str, ...]) -> dict[str, Stored]:
        return {n: stored[module + dot + n] for n in names if module + dot + n in stored}

    if suffix == "qweight":
        found = parts(gptq.PARTS)
        shapes = {part: stored.shape for part, stored in found.items()}
        if "qzeros" not in found or any(len(shapes.get(part, ())) != 2 for part in ("qweight", "scales")):
            problem = f"{name} has the arrays {shapes}"
            raise CheckpointError(failure(CALL, problem, "A GPTQ or AWQ matrix has qweight, scales [G, N] and qzeros."))
        awq_words = found["qweight"].shape[1:] != found["scales"].shape[1:]
        return (awq if awq_words else gptq).recognise(module, found, settings.about)
    if suffix == "weight_packed":
        return compressed_tensors.recognise(module, parts(compressed_tensors.PARTS), settings.compressed)
    if suffix == "weight_scale_2" and f"{module}.weight" in stored:
        found = parts(("weight", "weight_scale", "weight_scale_2"))
        is_nvfp4 = len(found) == 3 and found["weight"].kind == "U8"
        return modelopt.recognise(module, found, settings.about) if is_nvfp4 else None
    scales = fp8_blocks.scale_of(name, stored) if stored[name].kind == "F8_E4M3" else None
    if scales is not None:
        return fp8_blocks.recognise(stored[name], scales, settings.about, settings.compressed)
    if bitsandbytes.STATE in name:
        return bitsandbytes.recognise(name.partition(bitsandbytes.STATE)[0], stored)
    if suffix == "weight" and stored[name].kind == "U32" and f"{module}.scales" in stored:
        return mlx.recognise(module, parts(("weight", "scales", "biases", "global_scale")), settings.mlx)
    if suffix in native.first_parts():
        found = parts(native.parts())
        return native.recognise(module, found, settings.native) if settings.native or ABOUT in found else None
    if name.endswith("_blocks") and f"{name[:-7]}_scales" in stored:
        return modelopt.recognise_blocks(name[:-7], stored[name], stored[f"{name[:-7]}_scales"])
    return None
