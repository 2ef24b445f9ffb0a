"""GGUF, read quickly: metadata as Python values, tensors as views of the memory-mapped file.

magic "GGUF", version u32, tensors u64, fields u64
fields: name, type u32, value                          a string is its length u64 and UTF-8 bytes
tensors: name, axes u32, extent u64 each (fastest first), type u32, offset u64
padding to `general.alignment`, then the data
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.arrays import FLOATS
from billfish.errors import ModelError, complaint
from billfish.format import FORMATS
from billfish.formats.ggml import BlockFormat
from billfish.tensor import QuantizedTensor

# The numbers of GGUF's value types; 8 is a string, 9 an array.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# ggml's numbers for the types of tensors.
PLAIN = {0: FLOATS["float32"], 1: FLOATS["float16"], 30: FLOATS["bfloat16"]}
BLOCKS = {
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    9: "q8_1",
    10: "q2_k",
    11: "q3_k",
    12: "q4_k",
    13: "q5_k",
    14: "q6_k",
    20: "iq4_nl",
    39: "mxfp4_gguf",
    40: "nvfp4_gguf",
}
Tensor = QuantizedTensor | NDArray[Any]


class Entry(NamedTuple):
    """Where a tensor is, as the file says it: `shape` slowest axis first."""

    shape: tuple[int, ...]
    type: int
    offset: int


class GgufFile:
    """An open file. `metadata` holds every field; `file[name]` is a QuantizedTensor or a float array."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as stream:
                self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(complaint("llm.load", "path", f"{str(path)!r} ({error})", "a GGUF file")) from None
        self._at = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
            if isinstance(error, ModelError):
                raise
            got = f"a file that breaks off or is damaged at byte {self._at}"
            raise ModelError(complaint("llm.load", "path", got, "a whole GGUF file")) from None

    def _read_header(self) -> None:
        if self._bytes[:4] != b"GGUF":
            got = f"a file that begins with {self._bytes[:4]!r}"
            raise ModelError(complaint("llm.load", "path", got, "a GGUF file"))
        self._at = 4
        version, tensors, fields = self._scalars("IQQ")
        if version not in (2, 3):
            raise ModelError(complaint("llm.load", "path", f"GGUF version {version}", "version 2 or 3"))
        self.metadata: dict[str, Any] = {}
        for _ in range(fields):
            name = self._string()
            self.metadata[name] = self._value(*self._scalars("I"))
        self.entries: dict[str, Entry] = {}
        for _ in range(tensors):
            name = self._string()
            (axes,) = self._scalars("I")
            shape = self._scalars(f"{axes}Q")
            self.entries[name] = Entry(shape[::-1], *self._scalars("IQ"))
        alignment = self.metadata.get("general.alignment", 32)
        self._data = -(-self._at // alignment) * alignment

    def _scalars(self, kinds: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + kinds, self._bytes, self._at)
        self._at += struct.calcsize("<" + kinds)
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        data, at, length_of = self._bytes, self._at, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):  # a vocabulary has hundreds of thousands: nothing but the least in here
            end = at + 8 + length_of(data, at)[0]
            found.append(data[at + 8 : end].decode())
            at = end
        if at > len(data):
            raise ValueError("strings beyond the end")
        self._at = at
        return found

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._scalars(SCALARS[kind])[0]
        item, count = self._scalars("IQ")
        if item == STRING:
            return self._strings(count)
        if item == ARRAY:
            return [self._value(ARRAY) for _ in range(count)]
        values = np.frombuffer(self._bytes, "<" + SCALARS[item], count, self._at)
        self._at += values.nbytes
        return values

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        if entry.type in PLAIN:
            return self._view(name, PLAIN[entry.type], entry.shape)
        format = FORMATS.get(BLOCKS.get(entry.type, ""))
        if not isinstance(format, BlockFormat) or format.name == "nvfp4_gguf":
            takes = f"float32, float16, bfloat16 or one of {', '.join(BLOCKS.values())}"
            raise ModelError(complaint("llm.load", name, f"ggml type {entry.type}", takes))
        *rows, k = entry.shape
        if k % format.block_size:
            raise ModelError(
                complaint("llm.load", name, f"K={k}", f"a multiple of {format.block_size} as {format.name}")
            )
        row_bytes = k // format.block_size * format.struct.itemsize
        blocks = self._view(name, np.dtype(np.uint8), (int(np.prod(rows)), row_bytes))
        return QuantizedTensor.from_storage(format, {"blocks": blocks}, call="llm.load")

    def _view(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        count, start = int(np.prod(shape)), self._data + self.entries[name].offset
        if start + count * dtype.itemsize > len(self._bytes):
            got = f"a file of {len(self._bytes)} bytes that ends before {name} does"
            raise ModelError(complaint("llm.load", "path", got, "a whole GGUF file"))
        return np.frombuffer(self._bytes, dtype, count, start).reshape(shape)
