"""GGUF files. The `gguf` library writes the header; the data follow piece by piece."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from billfish.checkpoints.checkpoint import Checkpoint
from billfish.checkpoints.layouts.gguf import PLAIN, ggml_names
from billfish.checkpoints.mixes import FILE_TYPES, Mix
from billfish.checkpoints.safetensors_files import TYPES
from billfish.checkpoints.write.engine import OutputFile
from billfish.checkpoints.write.recast import Misfit
from billfish.checkpoints.write.target import Item, Spec, Target, storage_specs
from billfish.core.arrays import bfloat16
from billfish.core.errors import CheckpointError, complaint
from billfish.core.extras import require
from billfish.core.format import Format, Planes, get_format
from billfish.core.storage import Array, Storage

ALIGNMENT = 32
STRING_TYPE, UINT32_TYPE = 8, 4
QUANTIZATION_VERSION = 2  # of ggml's blocks
GGML_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"} | {
    f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)
}


class GgufTarget(Target):
    name = "gguf"
    suffixes = (".gguf",)
    takes_dtype = True
    casts_vectors = False  # llama.cpp wants them in float32

    def __init__(self) -> None:
        self.formats = (*ggml_names().values(),)

    def own(self, format: Format) -> Format:
        """MXFP4 is ggml's, which is not quite the standard's."""
        return get_format(ggml_names().get(format.name.upper(), format.name))

    def is_plain(self, name: str, dtype: np.dtype[Any] | None) -> bool:
        return dtype is not None

    def fallback(self, source: Format, k: int) -> tuple[str, int] | None:
        if k % 32:
            return None
        if source.element.bits > 4:
            return "q8_0", 32
        return ("q4_0" if source.offset == "none" else "q4_1"), 32

    def check(self, format: Format, group_size: int, planes: Planes, shape: tuple[int, ...], act_order: bool) -> None:
        if act_order:
            raise Misfit("act-order: GGUF has no place for a permutation")

    def check_plain(self, dtype: np.dtype[Any]) -> None:
        if GGML_TYPES.get(dtype.name) not in PLAIN:
            raise Misfit(f"GGUF has no type {dtype.name}")

    def specs(self, item: Item) -> dict[str, Spec]:
        storage = storage_specs(item)
        specs = {item.name: storage["blocks"]}
        if "global_scale" in storage:
            specs[f"{item.module}.scale"] = (np.dtype(np.float32), item.experts or (1,))
        return specs

    def arrays(self, item: Item, storage: Storage) -> dict[str, Array]:
        arrays = {item.name: storage["blocks"]}
        if "global_scale" in storage:
            arrays[f"{item.module}.scale"] = storage["global_scale"]
        return arrays


def file_type_fields(
    checkpoint: Checkpoint, items: Sequence[Item], mix: Mix | None
) -> dict[str, tuple[Any, int, None]]:
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
    fields: dict[str, tuple[Any, int, None]] = {}
    if number is not None:
        fields["general.file_type"] = (number, UINT32_TYPE, None)
    if any(item.format for item in items):
        fields["general.quantization_version"] = (QUANTIZATION_VERSION, UINT32_TYPE, None)
    return fields


def _changed(checkpoint: Checkpoint, item: Item) -> bool:
    about = checkpoint.describe(item.name)
    return about.format is not item.format or (item.format is None and TYPES[about.dtype][1] != item.dtypes[""])


def gguf_file(
    target: GgufTarget,
    name: str,
    items: Sequence[Item],
    metadata: Mapping[str, tuple[Any, int, int | None]],
    release: Callable[[], None],
) -> OutputFile:
    """The file of these items. Metadata: value, type, and type of the items of a list, numbers as GGUF has them."""
    gguf = require("gguf", "checkpoints")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "header"
        writer = gguf.GGUFWriter(path, str(metadata["general.architecture"][0]))
        for key, (value, kind, item_kind) in metadata.items():
            if isinstance(value, str) and not _is_utf8(value):
                raise CheckpointError(complaint("convert", key, repr(value), "a text that UTF-8 can hold"))
            if key != "general.architecture":
                types = gguf.GGUFValueType(kind), None if item_kind is None else gguf.GGUFValueType(item_kind)
                writer.add_key_value(key, value, *types)
        for item in items:
            for tensor, (dtype, shape) in target.all_specs(item).items():
                _add_tensor(gguf, writer, item, tensor, dtype, shape)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        header = path.read_bytes()
    header += b"\0" * (-len(header) % ALIGNMENT)
    return OutputFile(name, header, tuple(target.piece(item, release) for item in items), ALIGNMENT)


def _is_utf8(text: str) -> bool:
    """Whether there is no lone surrogate in a text, which the JSON of a configuration may have."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _add_tensor(gguf: Any, writer: Any, item: Item, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if item.format is not None and name == item.name:
        kind = gguf.GGMLQuantizationType[vars(type(item.format))["gguf"]]
        stacked = (*item.shape[:-1], shape[-1])  # the library wants the shape in bytes
        writer.add_tensor_info(name, stacked, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=kind)
        return
    nbytes = int(np.prod(shape)) * dtype.itemsize
    if dtype == bfloat16:
        in_bytes = (*shape[:-1], shape[-1] * 2)
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), nbytes, raw_dtype=kind)
    else:
        writer.add_tensor_info(name, shape, dtype, nbytes)
