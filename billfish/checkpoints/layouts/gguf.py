"""GGUF, the files of llama.cpp: fields and tensors, as billfish.checkpoints.gguf_header has them.

    NAME          blocks [..., N, K/b] of ggml's type, one after the other: docs/format-bits.md; or numbers
    NAME.scale    f32 [1], or [E] of a stack: NVFP4's global scale, a multiplier

A tensor begins at a multiple of 32 bytes. A file may be split into MODEL-00001-of-0000N.gguf and so on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from billfish.checkpoints.entry import Entry, MatrixEntry, Plain, Unsupported
from billfish.checkpoints.gguf_header import ALIGNMENT, Field, Fields, Info, Items, header_bytes, read_header
from billfish.checkpoints.safetensors_files import TYPES, MappedFile, Stored, damaged
from billfish.checkpoints.write.recast import Misfit
from billfish.checkpoints.write.target import Item, OutputFile, Spec, Target, storage_specs
from billfish.core.format import FORMATS, Format, Planes, get_format
from billfish.core.storage import Array, Storage

PLAIN = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"} | {
    f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)
}  # ggml's names of NumPy's types
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


# ---- reading ---------------------------------------------------------------------------------------------------------


def ggml_names() -> dict[str, str]:
    """ggml's names of the types that files hold, and ours: what each format's own class says."""
    return {vars(type(f))["gguf"]: f.name for f in FORMATS.values() if "gguf" in vars(type(f))}


class Metadata(Mapping[str, Any]):
    """The fields of a GGUF file, each decoded when it is asked for."""

    def __init__(self, fields: dict[str, Field]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> Any:
        content = self._fields[name].content
        return content.decode() if isinstance(content, Items) else content

    def __contains__(self, name: object) -> bool:
        return name in self._fields  # a Mapping would decode the field to know that

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def length(self, name: str) -> int:
        """How many items a list has, without decoding them; 0 if there is none."""
        field = self._fields.get(name)
        return field.content.length if field is not None and isinstance(field.content, Items) else 0

    def types(self, name: str) -> tuple[int, int | None]:
        """The type of a field, and of its items if it is a list; numbers as in the file."""
        kind, content = self._fields[name]
        return kind, content.kind if isinstance(content, Items) else None


class GgufMatrix(MatrixEntry):
    layout = "gguf"

    def __init__(self, format: str, stored: Stored, shape: tuple[int, ...], scale: Stored | None) -> None:
        self.stored, self.scale = stored, scale
        parts = [stored, *([scale] if scale else [])]
        super().__init__(stored.name, format, shape, get_format(format).default_group_size, parts)

    def storage(self, rows: slice, columns: slice) -> tuple[Format, Storage, int]:
        size = self.stored.shape[-1] * self.format.block_size // self.k  # bytes of a block
        part = slice(columns.start // self.format.block_size * size, columns.stop // self.format.block_size * size)
        storage = {"blocks": self.stored.array().reshape(self.n, -1)[rows, part]}
        if self.format.name == "nvfp4_gguf":
            scale = 1 if self.scale is None else self.scale.array().flat[0]
            storage["global_scale"] = np.array(scale, np.float32)
        return self.format, storage, self.format.default_group_size

    def stack(self, experts: slice, columns: slice) -> tuple[Format, Storage, int]:
        format, storage, group_size = super().stack(experts, columns)
        if self.scale is not None and self.scale.nbytes > 4:  # one for each expert
            storage = {**storage, "global_scale": np.array(self.scale.array().reshape(-1)[experts], np.float32)}
        return format, storage, group_size


def open_gguf(path: Path) -> tuple[list[MappedFile], dict[str, Entry], Metadata]:
    """The file, or all files of a split one, and the entries in them."""
    files, infos, metadata = [], dict[str, tuple[Info, Stored]](), None
    for part in _parts(path):
        file = MappedFile(part)
        files.append(file)
        fields, tensors = read_header(file)
        metadata = metadata or Metadata(fields)
        for info in tensors:
            if info.name in infos:
                raise damaged(part, f"holds a second tensor {info.name!r}")
            if info.offset + info.nbytes > file.size:
                raise damaged(
                    part, f"is truncated: its {file.size} bytes end within {info.name}", "Download or copy it again."
                )
            infos[info.name] = info, _stored(file, info)
        _refuse_overlaps(part, tensors)
    assert metadata is not None
    return files, _entries(infos), metadata


def _refuse_overlaps(path: Path, tensors: list[Info]) -> None:
    """Raises unless each byte belongs to one tensor: many tensors in the same bytes are no file of this size."""
    end, before = 0, ""
    for info in sorted(tensors, key=lambda info: info.offset):
        if info.nbytes and info.offset < end:
            raise damaged(path, f"is damaged: {info.name} overlaps {before}")
        if info.nbytes:
            end, before = info.offset + info.nbytes, info.name


def _stored(file: MappedFile, info: Info) -> Stored:
    """Numbers as they are, blocks as rows of bytes."""
    if info.kind in PLAIN.values():
        dtype, shape = np.dtype(TYPES[info.kind][1]), info.shape
    else:
        rows = info.shape[:-1]
        dtype, shape = np.dtype(np.uint8), (*rows, info.nbytes // max(1, math.prod(rows)))
    return Stored(info.name, file, info.kind, dtype, shape, info.offset, info.nbytes)


def _parts(path: Path) -> list[Path]:
    match = SPLIT.fullmatch(path.name)
    if not match:
        return [path]
    stem, number, count = match.groups()
    if not 1 <= int(number) <= int(count):
        raise damaged(path, f"is named part {int(number)} of {int(count)}, which cannot be")
    parts = []
    for i in range(int(count)):
        parts.append(path.with_name(f"{stem}-{i + 1:05}-of-{count}.gguf"))
        if not parts[i].is_file():
            raise damaged(
                path, f"is one of {int(count)} parts, and {parts[i].name} is missing", "Put all parts into one folder."
            )
    return parts


def _entries(infos: dict[str, tuple[Info, Stored]]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    taken = set()
    known = ggml_names()
    for name, (info, held) in infos.items():
        format = known.get(info.kind)
        if info.kind in PLAIN.values():
            entries[name] = Plain(held, "gguf")
        elif format is None:
            entries[name] = Unsupported(name, "gguf", f"ggml's {info.kind}", [held], info.shape)
        else:
            scale = None
            if format == "nvfp4_gguf":
                candidates = (f"{name.removesuffix('.weight')}.scale", f"{name}.scale")
                scale = next((infos[n][1] for n in candidates if n in infos and infos[n][0].kind == "F32"), None)
                counts = (1, info.shape[0]) if len(info.shape) == 3 else (1,)  # for a stack one, or one for each expert
                if scale is not None and scale.nbytes // 4 in counts:
                    taken.add(scale.name)
                else:
                    scale = None
            entries[name] = GgufMatrix(format, held, info.shape, scale)
    return {name: entry for name, entry in entries.items() if name not in taken}


# ---- writing ---------------------------------------------------------------------------------------------------------


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
            raise Misfit("GGUF cannot store a permutation (act-order)")

    def check_plain(self, dtype: np.dtype[Any]) -> None:
        if dtype.name not in PLAIN:
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


def gguf_file(
    target: GgufTarget, name: str, items: Sequence[Item], fields: Fields, release: Callable[[], None]
) -> OutputFile:
    """The file of these items."""
    tensors = [
        (tensor, _kind(item, tensor, dtype), item.shape if tensor == item.name else shape)
        for item in items
        for tensor, (dtype, shape) in target.all_specs(item).items()
    ]
    header = header_bytes(fields, tensors)
    return OutputFile(name, header, tuple(target.piece(item, release) for item in items), ALIGNMENT)


def _kind(item: Item, tensor: str, dtype: np.dtype[Any]) -> str:
    """ggml's name of the type of a tensor."""
    return vars(type(item.format))["gguf"] if item.format is not None and tensor == item.name else PLAIN[dtype.name]
