"""GGUF. The `gguf` library parses it; here its reads are kept inside the file, and lists are left until asked for.

Without that, a count that lies makes the library loop for hours, and an honest list of a million numbers becomes a
million Python objects.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from billfish.arrays import bfloat16
from billfish.checkpoints.container import MappedFile, Stored, damaged, extra
from billfish.checkpoints.entry import Entry, Matrix, Plain, Unsupported
from billfish.format import Array, Format, Storage, get_format

# ggml's names of types, and ours. Its Q8_1 is for activations: the library has its size wrong, and no file holds it.
QUANTIZED = {
    "Q4_0": "q4_0",
    "Q4_1": "q4_1",
    "Q5_0": "q5_0",
    "Q5_1": "q5_1",
    "Q8_0": "q8_0",
    "Q2_K": "q2_k",
    "Q3_K": "q3_k",
    "Q4_K": "q4_k",
    "Q5_K": "q5_k",
    "Q6_K": "q6_k",
    "IQ4_NL": "iq4_nl",
    "MXFP4": "mxfp4_gguf",
    "NVFP4": "nvfp4_gguf",
}
PLAIN = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")
ARRAY, STRING = 9, 8
SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class Metadata(Mapping[str, Any]):
    """The fields of a GGUF file, each decoded when it is asked for."""

    def __init__(self, reader: Any) -> None:
        self._fields = {name: f for name, f in reader.fields.items() if not name.startswith("GGUF.")}

    def __getitem__(self, name: str) -> Any:
        field = self._fields[name]
        if field.types[0] != ARRAY:
            return field.contents()
        item, count, data = field.parts[-1]
        if item != STRING:
            return np.frombuffer(data, SCALARS[item], count).tolist()
        strings, at = [], 0
        for _ in range(count):
            size = int.from_bytes(data[at : at + 8], "little")
            strings.append(str(data[at + 8 : at + 8 + size], "utf-8", errors="replace"))
            at += 8 + size
        return strings

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def types(self, name: str) -> tuple[int, int | None]:
        """The type of a field, and of its items if it is a list; numbers as in the file."""
        field = self._fields[name]
        kind = int(field.types[0])
        return kind, field.parts[-1][0] if kind == ARRAY else None


def checked_reader(path: Path) -> Any:
    """gguf's reader of a file, with every read checked against the end of the file."""
    gguf = extra("gguf")

    class Reader(gguf.GGUFReader):  # type: ignore[misc, name-defined]
        def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Array:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError(f"it ends at byte {len(self.data)}, inside of what its header promises")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            item, count = int(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
            start = orig_offs + 12
            if item == STRING:
                end = self._end_of_strings(start, count)
            elif item in SCALARS:
                end = start + count * np.dtype(SCALARS[item]).itemsize
            else:
                raise ValueError(f"a list of items of type {item}")
            data = self._get(start, np.uint8, end - start).data
            return end - orig_offs, [(item, count, data)], [0], [gguf.GGUFValueType.ARRAY]

        def _end_of_strings(self, at: int, count: int) -> int:
            data = memoryview(self.data)
            for _ in range(count):
                if at + 8 > len(data):
                    raise ValueError(f"a list of {count} strings, with room for fewer")
                at += 8 + struct.unpack_from("<Q", data, at)[0]
            return at

    with path.open("rb") as file:
        head = file.read(8)
    if len(head) == 8 and head[4:6] == b"\0\0":
        raise damaged(path, "a big-endian GGUF file", "a little-endian one")
    try:
        return Reader(path)
    except (ValueError, KeyError, IndexError, OverflowError, TypeError) as error:  # how the library says no
        raise damaged(path, f"a damaged header ({error})", "a GGUF file") from None


class GgufMatrix(Matrix):
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
            scale = 1 if self.scale is None else self.scale.array().reshape(())
            storage["global_scale"] = np.array(scale, np.float32)
        return self.format, storage, self.format.default_group_size


def open_gguf(path: Path) -> tuple[list[MappedFile], dict[str, Entry], Mapping[str, Any]]:
    """The file, or all files of a split one, and the entries in them."""
    files, stored, metadata = [], dict[str, tuple[str, tuple[int, ...], Stored]](), None
    for part in _parts(path):
        reader = checked_reader(part)
        file = MappedFile(part)
        files.append(file)
        metadata = metadata or Metadata(reader)
        for tensor in reader.tensors:
            if tensor.name in stored:
                raise damaged(part, f"{tensor.name} a second time", "each tensor once")
            kind, shape = tensor.tensor_type.name, tuple(int(size) for size in reversed(tensor.shape))
            # The library gives BF16, like blocks, as bytes.
            dtype, held = (bfloat16, shape) if kind == "BF16" else (tensor.data.dtype, tensor.data.shape)
            array = Stored(tensor.name, file, kind, dtype, held, int(tensor.data_offset), int(tensor.n_bytes))
            stored[tensor.name] = kind, shape, array
    assert metadata is not None
    return files, _entries(stored), metadata


def _parts(path: Path) -> list[Path]:
    match = SPLIT.fullmatch(path.name)
    if not match:
        return [path]
    stem, _, count = match.groups()
    parts = [path.with_name(f"{stem}-{i + 1:05}-of-{count}.gguf") for i in range(min(int(count), 99999))]
    for part in parts:
        if not part.is_file():
            raise damaged(path, f"{part.name} missing", f"all {int(count)} parts beside each other")
    return parts


def _entries(stored: dict[str, tuple[str, tuple[int, ...], Stored]]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    taken = set()
    for name, (kind, shape, held) in stored.items():
        format = QUANTIZED.get(kind)
        if kind in PLAIN:
            entries[name] = Plain(held, "gguf")
        elif format is None:
            entries[name] = Unsupported(name, "gguf", f"ggml's {kind}", [held], shape)
        else:
            scale = None
            if format == "nvfp4_gguf":
                candidates = (f"{name.removesuffix('.weight')}.scale", f"{name}.scale")
                scale = next((stored[n][2] for n in candidates if n in stored and stored[n][0] == "F32"), None)
                if scale is not None and scale.nbytes == 4:
                    taken.add(scale.name)
                else:
                    scale = None
            entries[name] = GgufMatrix(format, held, shape, scale)
    return {name: entry for name, entry in entries.items() if name not in taken}
