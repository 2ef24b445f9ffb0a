"""Storage as the kernels read it: one array of bytes, where its codes are, and its scales inside or beside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cpu import _cpu
from billfish.backends.cpu.axes import Layout
from billfish.core.elements import Element, Signed
from billfish.core.format import Format
from billfish.core.formats.fp8 import ByteRows
from billfish.core.formats.meaning import E4M3, E8M0, PLAIN, decodes_plainly, meaning
from billfish.core.formats.nf4 import Nf4
from billfish.core.formats.structure import Structure, structure_of
from billfish.core.machine import with_known_floats
from billfish.core.tensor import QuantizedTensor

# The order of the enums in layout/problem.h.
SCALES_IN_BLOCKS = (
    "apart",
    "halves",
    "looked_up",
    "six_bit_pairs",
    "nibble_pairs",
    "six_bits",
    "signed_bytes",
    "six_bits_apart",
)
FIELD_KINDS = ("none", "float16", "bfloat16", "float32", "uint8", "looked_up")
# A byte for each code, in rows: what a format's planes are.
CODE_BYTES = Structure(False, 32, 32, ((0, 1, 8),))


@dataclass
class StorageSource:
    """Storage in the terms of layout/problem.h. Scales are inside the blocks, or in fields of their own."""

    data: NDArray[np.uint8]
    words: bool
    about: dict[str, Any]
    scale: _cpu.Field | None = None
    minimum: _cpu.Field | None = None
    zero: _cpu.Field | None = None
    byte_values: NDArray[np.float32] | None = None
    scaled_tables: NDArray[np.uint8] | None = None
    numbers: NDArray[np.float32] | None = None


def codes_of(tensor: QuantizedTensor) -> StorageSource:
    """Where the packer finds codes: in storage, or in a plane of them where kernels do not read the storage."""
    structure = structure_of(tensor.format)
    if structure is None:
        codes = np.ascontiguousarray(tensor.format.unpack_codes(tensor.storage))
        return StorageSource(codes, False, _about(tensor, CODE_BYTES, codes.shape[1]))
    held = np.ascontiguousarray(next(iter(tensor.storage.values())))
    row_bytes = held.shape[1] if held.dtype == np.uint8 else tensor.shape[1] * tensor.format.element.bits // 8
    return StorageSource(held.view(np.uint8), structure.words, _about(tensor, structure, row_bytes))


def prepack_fields(
    level: str, description: _cpu.Description, tensor: QuantizedTensor, layout: Layout, out: NDArray[np.uint8]
) -> None:
    """Writes the stream: codes from the storage or from their plane, and scales from the planes of a Layout."""
    source = codes_of(tensor)
    per_chunk, per_group = as_bytes(layout.chunk_fields), as_bytes(layout.group_fields)
    _cpu.prepack(level, description, source.data, source.words, source.about, per_chunk, per_group, out)


def as_bytes(fields: list[NDArray[Any]]) -> list[NDArray[np.uint8]]:
    """Numbers [N, count] of any type to bytes [N, count, size of one]."""
    return [np.ascontiguousarray(f).view(np.uint8).reshape(*f.shape, f.dtype.itemsize) for f in fields]


@with_known_floats
def source_of(tensor: QuantizedTensor) -> StorageSource:
    """Codes and scales of a tensor whose storage the kernels read."""
    structure, format, storage = structure_of(tensor.format), tensor.format, tensor.storage
    if structure is None:
        structure = CODE_BYTES
        packed = np.ascontiguousarray(storage["packed"])
        source = StorageSource(packed, False, _about(tensor, structure, packed.shape[1]), numbers=byte_numbers(format))
    else:
        source = codes_of(tensor)
    if meaning(format) in (*E8M0, *E4M3):
        with np.errstate(over="ignore", invalid="ignore"):  # scales of a file may be NaN or infinite
            source.byte_values = byte_values(format) * np.float32(storage.get("global_scale", 1))
        if source.numbers is None and "global_scale" not in storage:
            source.scaled_tables = scaled_tables(format)
    if structure.scales == "apart":
        words = structure.words
        source.scale = field_of(storage["scales"], words, source.byte_values is not None)
        source.minimum = field_of(storage["biases"], words) if "biases" in storage else None
        source.zero = field_of(storage["zeros"], words) if "zeros" in storage else None
    return source


def _about(tensor: QuantizedTensor, structure: Structure, row_bytes: int) -> dict[str, Any]:
    return source_about(tensor.format, tensor.shape, tensor.group_size, structure, row_bytes)


def source_about(
    format: Format, shape: tuple[int, ...], group_size: int, structure: Structure, row_bytes: int
) -> dict[str, Any]:
    """What the native core is told of codes [N, K] in this structure."""
    element, (n, k) = format.element, shape
    return {
        "n": n,
        "k": k,
        "row_bytes": row_bytes,
        "group": group_size,
        "table": [float(v) for v in element.values] if element.bits <= 4 else [],
        "bias": 128 if isinstance(element, Signed) else getattr(element, "bias", 0),
        "flip": 128 if isinstance(element, Signed) else 0,
        "block": structure.block,
        "block_bytes": structure.block_bytes,
        "code_fields": structure.code_fields,
        "scales": SCALES_IN_BLOCKS.index(structure.scales),
        "scale_offset": structure.scale_offset,
        "minimum_offset": structure.minimum_offset,
        "sub_offset": structure.sub_offset,
    }


@cache
def byte_numbers(format: Format) -> NDArray[np.float32] | None:
    """What each byte of a row stands for: [256, 1], or [256, 2] where it holds two codes; None if not rows of bytes."""
    kind = type(format)
    rows = kind.unpack_codes in (ByteRows.unpack_codes, Nf4.unpack_codes)
    scales = kind.unpack_scales in (ByteRows.unpack_scales, Nf4.unpack_scales)
    known = meaning(format) in (*PLAIN, *E8M0) and decodes_plainly(format)
    if not (rows and scales and known) or type(format.element).decode is not Element.decode:
        return None
    every = {"packed": np.arange(256, dtype=np.uint8)[:, None]}
    return np.ascontiguousarray(format.element.decode(format.unpack_codes(every)))


@cache
def byte_values(format: Format) -> NDArray[np.float32]:
    """What each byte of a scale means, without the tensor's own scale."""
    planes = {"scale": np.arange(256, dtype=np.uint8), "global_scale": np.float32(1)}
    return format.group_values(planes).scale


@cache
def scaled_tables(format: Format) -> NDArray[np.uint8] | None:
    """The 16 values times each scale as bfloat16, low bytes and high ones, [256, 2, 16]; None if some do not fit."""
    with np.errstate(over="ignore", invalid="ignore"):
        products = format.element.values * byte_values(format)[:, None]
    bits = products.view(np.uint32)
    if (bits & 0xFFFF).any():
        return None
    return np.stack([bits >> 16 & 0xFF, bits >> 24], axis=1).astype(np.uint8)


def field_of(values: NDArray[Any], words: bool = False, looked_up: bool = False) -> _cpu.Field:
    """[N, groups], or transposed, [groups, N], beside words."""
    kind = FIELD_KINDS.index("looked_up" if looked_up else values.dtype.name)
    item, row = values.itemsize, values.itemsize * values.shape[1]
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return (data, kind, item, row) if words else (data, kind, row, item)
