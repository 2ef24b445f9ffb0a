"""The header of a GGUF file: fields and tensors, read and written.

magic "GGUF", version u32, tensors u64, fields u64
fields: name, type u32, value                          a string is its length u64 and UTF-8 bytes
tensors: name, axes u32, extent u64 each (fastest first), type u32, offset u64
padding to `general.alignment`, then the data

When a header is read, nothing in it is believed, and each byte is read once.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cpu import _cpu  # decodes a vocabulary in one native call, 2.6 times as fast as Python
from billfish.checkpoints.safetensors_files import CALL, MAX_ELEMENTS, MappedFile, check_count, damaged
from billfish.core.errors import CheckpointError, failure, readable
from billfish.core.files import is_affordable

VERSIONS = (2, 3)
# Types of fields: numbers, by the letters that `struct` and NumPy have for them; and the others.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
MAX_AXES = 4
# Counts are limited on their own, since a file with holes is as large as it says and costs nothing.
MAX_FIELDS, MAX_STRINGS = 1 << 16, 1 << 24  # models have some 50, and in all lists less than a million
NUMBER_COST = 36  # bytes of memory for a number of a list; those of one byte are shared
ALIGNMENT = 32  # unless general.alignment says otherwise


# ---- types of tensors ---------------------------------------------------------------------------------------------


class GgmlType(NamedTuple):
    """Weights come in blocks; numbers as they are, in blocks of one."""

    name: str
    block_size: int  # weights in a block
    block_bytes: int


# By ggml's numbers. A file says nothing about sizes, so a tensor of a type that is not here could not even be listed.
# Numbers that are missing were types once, and no file has them any more.
GGML_TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 36),  # as ggml's struct; the `gguf` library says 40
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
}


# ---- fields and tensors -------------------------------------------------------------------------------------------


class Items(NamedTuple):
    """The items of a list, as bytes: a vocabulary is only decoded when it is asked for."""

    kind: int
    length: int
    data: memoryview
    ends: NDArray[np.uint64]  # of strings, where each ends

    def decode(self) -> list[Any]:
        """A list of numbers or of strings. Raises CheckpointError for one that would take far more memory."""
        if self.kind != STRING:
            if len(self.data) > self.length and not is_affordable(NUMBER_COST * self.length, len(self.data)):
                problem = f"a metadata list of {self.length} numbers would take too much memory"
                raise CheckpointError(failure(CALL, problem))
            return np.frombuffer(self.data, f"<{SCALARS[self.kind]}", self.length).tolist()
        return _cpu.strings(np.frombuffer(self.data, np.uint8), self.ends)


class Field(NamedTuple):
    """One field of the metadata."""

    kind: int  # a number, as in the file
    content: Any  # of a list, Items


class Info(NamedTuple):
    """One tensor, as the header has it."""

    name: str
    kind: str  # ggml's name
    shape: tuple[int, ...]  # slowest axis first
    offset: int  # from the beginning of the file
    nbytes: int


class Header(NamedTuple):
    """All that stands before the data."""

    fields: dict[str, Field]
    tensors: list[Info]


def read_header(file: MappedFile) -> Header:
    """Fields and tensors. Raises for whatever is not as the format has it; tensors may still lie beyond the end."""
    cursor = Cursor(file)
    try:
        return cursor.header()
    except EOFError:
        problem = f"is not a complete GGUF file: it has {file.size} bytes, and the header needs more"
        raise damaged(file.path, problem, "Download it again.") from None
    except ValueError as error:  # also of strings that are no UTF-8
        raise damaged(file.path, f"has a damaged GGUF header: {error}, at byte {cursor.at} of {file.size}") from None


class Cursor:
    """A place in the header, which moves on with what is read. Whatever is wrong there is a ValueError."""

    HEAD, LENGTH, KIND, LIST = (struct.Struct(f"<{letters}") for letters in ("4sIQQ", "Q", "I", "IQ"))
    NUMBERS = {kind: struct.Struct(f"<{letter}") for kind, letter in SCALARS.items()}
    EXTENTS = [struct.Struct(f"<{axes}QIQ") for axes in range(MAX_AXES + 1)]  # with the type and the offset

    def __init__(self, file: MappedFile) -> None:
        self.data = memoryview(file.view(0, file.size, np.uint8, (file.size,)).data)
        self.at = self.strings = 0  # the place, and strings of lists so far

    def header(self) -> Header:
        magic, version, tensors, fields = self.take(self.HEAD)
        if magic != b"GGUF" or version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                raise ValueError("big-endian files are not supported")
            raise ValueError(f"magic {magic!r}, version {version}; expected GGUF of version 2 or 3")
        if fields > MAX_FIELDS:
            raise ValueError(f"{fields} fields; the limit is {MAX_FIELDS}")
        metadata: dict[str, Field] = {}
        for _ in range(fields):
            name = self.string()
            if name in metadata:
                raise ValueError(f"the field {name} occurs twice")
            metadata[name] = self.field()
        check_count(min(tensors, len(self.data) // self.EXTENTS[0].size), len(self.data))  # a count may lie
        infos: dict[str, Info] = {}
        for _ in range(tensors):
            info = self.info()
            if info.name in infos:
                raise ValueError(f"the tensor {info.name!r} occurs twice")
            infos[info.name] = info
        alignment = alignment_of(metadata)
        odd = next((info for info in infos.values() if info.offset % alignment), None)
        if odd is not None:
            raise ValueError(f"{odd.name} begins at offset {odd.offset}, which is not a multiple of {alignment}")
        data = -(-self.at // alignment) * alignment
        return Header(metadata, [info._replace(offset=data + info.offset) for info in infos.values()])

    def take(self, layout: struct.Struct) -> tuple[Any, ...]:
        end = self.at + layout.size
        if end > len(self.data):
            raise EOFError
        values = layout.unpack_from(self.data, self.at)
        self.at = end
        return values

    def string(self) -> str:
        (size,) = self.take(self.LENGTH)
        end = self.at + size
        if end > len(self.data):
            raise ValueError(f"a string of {size} bytes passes the end of the file")
        text = str(self.data[self.at : end], "utf-8")
        self.at = end
        return text

    def field(self) -> Field:
        (kind,) = self.take(self.KIND)
        if kind == STRING:
            return Field(kind, self.string())
        if kind == ARRAY:
            return Field(kind, self.items())
        if kind not in self.NUMBERS:
            raise ValueError(f"unknown type {kind} of a field")
        if kind == BOOL:
            check_bools(self.data[self.at : self.at + 1])
        return Field(kind, self.take(self.NUMBERS[kind])[0])

    def items(self) -> Items:
        kind, count = self.take(self.LIST)
        start, ends = self.at, np.empty(0, np.uint64)
        if kind == STRING:
            self.strings += count
            if self.strings > MAX_STRINGS:
                raise ValueError(f"lists of {self.strings} strings; the limit is {MAX_STRINGS}")
            ends = self.ends_of_strings(count)
            end = start + (int(ends[-1]) if count else 0)
        elif kind in self.NUMBERS:
            end = start + count * self.NUMBERS[kind].size
        else:
            raise ValueError(f"unknown type {kind} of a list")
        if end > len(self.data):
            raise ValueError(f"a list of {count} items passes the end of the file")
        self.at = end
        data = self.data[start:end]
        if kind == BOOL:
            check_bools(data)
        return Items(kind, count, data, ends)

    def ends_of_strings(self, count: int) -> NDArray[np.uint64]:
        """Where each ends, from the first's beginning. A vocabulary has hundreds of thousands: not in Python."""
        rest = np.frombuffer(self.data, np.uint8)[self.at :]
        ends = np.empty(min(count, len(rest) // 8), np.uint64)  # a hostile file may not cost more than it is large
        whole = _cpu.string_ends(rest, ends)
        if whole < count:
            raise ValueError(f"a list of {count} strings passes the end of the file, after {whole}")
        return ends

    def info(self) -> Info:
        name = self.string()
        (axes,) = self.take(self.KIND)
        if axes > MAX_AXES:
            raise ValueError(f"{name} has {axes} axes")
        *extents, number, offset = self.take(self.EXTENTS[axes])
        if number not in GGML_TYPES:
            raise ValueError(f"{name} has the unknown ggml type {number}")
        kind, block_size, block_bytes = GGML_TYPES[number]
        k = extents[0] if extents else 1
        if k % block_size:
            raise ValueError(f"{name} has rows of {k} weights, not a multiple of {block_size}, a block of {kind}")
        weights = math.prod(extents)
        if math.prod(extent or 1 for extent in extents) >= MAX_ELEMENTS:  # NumPy has no larger arrays, even empty ones
            raise ValueError(f"{name} is too large: {extents}")
        nbytes = weights // block_size * block_bytes
        return Info(name, kind, tuple(reversed(extents)), offset, nbytes)


def check_bools(data: memoryview) -> None:
    """Raises unless each byte is 0 or 1."""
    if np.frombuffer(data, np.uint8).max(initial=0) > 1:
        raise ValueError("a bool that is neither 0 nor 1")


def alignment_of(metadata: dict[str, Field]) -> int:
    """What the offsets of tensors are multiples of."""
    field = metadata.get("general.alignment")
    if field is None:
        return ALIGNMENT
    size = field.content
    if field.kind != UINT32 or size == 0 or size & (size - 1):
        raise ValueError(f"general.alignment is {size!r}; expected a power of two, as uint32")
    return int(size)


# ---- writing ---------------------------------------------------------------------------------------------------------

Fields = dict[str, tuple[Any, int, int | None]]  # value, type, and type of the items of a list
NUMBERS = {about.name: number for number, about in GGML_TYPES.items()}
ARCHITECTURE = "general.architecture"


def typed(fields: Mapping[str, Any]) -> Fields:
    """Fields with the types that llama.cpp expects of them."""
    return {name: (value, *_type_of(value)) for name, value in fields.items()}


def _type_of(value: Any) -> tuple[int, int | None]:
    if isinstance(value, list):
        item = _type_of(value[0])[0] if value else STRING
        return ARRAY, INT32 if item == UINT32 else item  # such as the kinds of tokens
    return {bool: BOOL, int: UINT32, float: FLOAT32, str: STRING}[type(value)], None


def header_bytes(fields: Fields, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """A header, padded so that the data can follow; of each tensor name, ggml's name of its type, and shape.

    The tensors follow in that order, each at a multiple of ALIGNMENT. Raises CheckpointError for a field whose value
    its type cannot hold. The architecture comes first: programs look for it.
    """
    infos, offset = [], 0
    for name, kind, shape in tensors:
        number = NUMBERS[kind]
        infos.append(_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), number, offset))
        nbytes = math.prod(shape) // GGML_TYPES[number].block_size * GGML_TYPES[number].block_bytes
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    names = sorted(fields, key=lambda name: name != ARCHITECTURE)
    written = [_string(name) + _field_bytes(name, *fields[name]) for name in names]
    header = struct.pack("<4sIQQ", b"GGUF", VERSIONS[-1], len(infos), len(written)) + b"".join([*written, *infos])
    return header + b"\0" * (-len(header) % ALIGNMENT)


def _field_bytes(name: str, value: Any, kind: int, item_kind: int | None) -> bytes:
    try:
        if kind != ARRAY:
            return struct.pack("<I", kind) + _item_bytes(kind, [value])
        assert item_kind is not None
        return struct.pack("<IIQ", kind, item_kind, len(value)) + _item_bytes(item_kind, value)
    except (struct.error, OverflowError, UnicodeEncodeError) as error:
        shown = f"{readable(name)} = {readable(repr(value))}"
        raise CheckpointError(f"GGUF cannot hold the field {shown} ({error}). Change it in the input.") from None


def _item_bytes(kind: int, values: list[Any]) -> bytes:
    return b"".join(map(_string, values)) if kind == STRING else struct.pack(f"<{len(values)}{SCALARS[kind]}", *values)


def _string(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content
