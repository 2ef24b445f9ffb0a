"""The header of a GGUF file, parsed here. The `gguf` library would add 0.15 s, a quarter, to the time until the first
token of a model: half of that to import it, half to read a vocabulary.

magic "GGUF", version u32, tensors u64, fields u64
fields: name, type u32, value                          a string is its length u64 and UTF-8 bytes
tensors: name, axes u32, extent u64 each (fastest first), type u32, offset u64
padding to `general.alignment`, then the data
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from billfish.checkpoints.container import MappedFile, damaged
from billfish.checkpoints.gguf import ARRAY, SCALARS, STRING, Field, Header, Info, list_items, nbytes_of

# ggml's numbers for the types of tensors that we know.
KINDS = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    20: "IQ4_NL",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    30: "BF16",
    39: "MXFP4",
    40: "NVFP4",
}
MAX_AXES = 4


def read_header(file: MappedFile) -> Header:
    """Fields and tensors."""
    cursor = Cursor(file)
    try:
        return cursor.read_header()
    except (struct.error, UnicodeDecodeError, KeyError, ValueError, TypeError, OverflowError) as error:
        got = f"a header that breaks off or is damaged at byte {cursor.at} ({error})"
        raise damaged(file.path, got, "a GGUF file") from None


class Cursor:
    """A place in the header, which moves on with what is read."""

    def __init__(self, file: MappedFile) -> None:
        self.data = memoryview(file.view(0, file.size, np.uint8, (file.size,)).data)
        self.at = 0

    def read_header(self) -> Header:
        magic, version, tensors, fields = self.numbers("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r}, version {version}; GGUF has version 2 or 3")
        metadata = {self.string(): self.field() for _ in range(fields)}
        infos = [self.info() for _ in range(tensors)]
        alignment = metadata["general.alignment"].content if "general.alignment" in metadata else 32
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment {alignment!r}")
        data = -(-self.at // alignment) * alignment
        return metadata, [info._replace(offset=data + info.offset) for info in infos]

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + kinds)
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def string(self) -> str:
        (size,) = self.numbers("Q")
        if self.at + size > len(self.data):
            raise ValueError(f"a string of {size} bytes")
        self.at += size
        return str(self.data[self.at - size : self.at], "utf-8")

    def field(self) -> Field:
        (kind,) = self.numbers("I")
        if kind == STRING:
            return Field(kind, self.string())
        if kind != ARRAY:
            value = np.frombuffer(self.data, SCALARS[kind], 1, self.at)
            self.at += value.nbytes
            return Field(kind, value.item())
        item, count = self.numbers("IQ")
        items = list_items(self.data, self.at, item, count)
        self.at += len(items.data)
        return Field(kind, items)

    def info(self) -> Info:
        name = self.string()
        (axes,) = self.numbers("I")
        if axes > MAX_AXES:
            raise ValueError(f"{axes} axes for {name}")
        *extents, number, offset = self.numbers(f"{axes}QIQ")
        if number not in KINDS:
            raise ValueError(f"ggml's type {number} for {name}")
        kind, shape = KINDS[number], tuple(reversed(extents))
        return Info(name, kind, shape, offset, nbytes_of(kind, shape))
