"""Storage as the kernels read it, without planes in between: where in its bytes codes and scales are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cpu import _cpu
from billfish.elements import Signed
from billfish.floats import with_known_floats
from billfish.format import Format
from billfish.formats.ggml import BlockFormat
from billfish.formats.words import WordFormat
from billfish.tensor import QuantizedTensor

# The order of the enums in layout/problem.h.
SCALES_IN_BLOCKS = ("apart", "halves", "looked_up", "six_bit_pairs", "nibble_pairs", "six_bits", "signed_bytes")
FIELD_KINDS = ("none", "float16", "bfloat16", "float32", "uint8", "looked_up")
SUB_SCALES = {
    "q2_k": "nibble_pairs",
    "q3_k": "six_bits",
    "q4_k": "six_bit_pairs",
    "q5_k": "six_bit_pairs",
    "q6_k": "signed_bytes",
}


@dataclass
class Source:
    """Storage in the terms of layout/problem.h: one array of bytes and where its codes and scales are, or the fields
    that hold scales."""

    data: NDArray[np.uint8]
    words: bool
    about: dict[str, Any]
    scale: _cpu.Field | None = None
    minimum: _cpu.Field | None = None
    zero: _cpu.Field | None = None
    byte_values: NDArray[np.float32] | None = None
    scaled_tables: NDArray[np.uint8] | None = None


@with_known_floats
def storage_of(tensor: QuantizedTensor) -> Source:
    """Where the kernel finds codes and scales."""
    format, storage, (n, k) = tensor.format, tensor.storage, tensor.shape
    element, words = format.element, isinstance(format, WordFormat)
    about: dict[str, Any] = {
        "n": n,
        "k": k,
        "group": tensor.group_size,
        "table": [float(v) for v in element.values] if element.bits <= 4 else [],
        "bias": 128 if isinstance(element, Signed) else getattr(element, "bias", 0),
        "flip": 128 if isinstance(element, Signed) else 0,
        "scales": 0,
        "scale_offset": -1,
        "minimum_offset": -1,
        "sub_offset": -1,
    }
    source = Source(np.ascontiguousarray(storage["packed" if "packed" in storage else "blocks"]), words, about)
    if format.scale.startswith(("e8m0", "e4m3", "ue4m3")):
        with np.errstate(over="ignore", invalid="ignore"):  # scales of a file may be NaN or infinite
            source.byte_values = byte_values(format) * np.float32(storage.get("global_scale", 1))
        source.scaled_tables = None if "global_scale" in storage else scaled_tables(format)
    if isinstance(format, BlockFormat):
        _describe_blocks(format, about)
        about["row_bytes"] = source.data.shape[1]
        return source
    source.data = source.data.view(np.uint8)
    block_bytes = 32 * element.bits // 8
    about |= {"block": 32, "block_bytes": block_bytes, "row_bytes": k * element.bits // 8}
    about["planes"] = [(0, 1, element.bits)]
    source.scale = _field(storage["scales"], words, source.byte_values is not None)
    source.minimum = _field(storage["biases"], words) if "biases" in storage else None
    source.zero = _field(storage["zeros"], words) if "zeros" in storage else None
    return source


def _describe_blocks(format: BlockFormat, about: dict[str, Any]) -> None:
    struct = format.struct
    offset = {name: struct.fields[name][1] for name in struct.names or ()} if struct.fields else {}
    about |= {"block": format.block_size, "block_bytes": struct.itemsize}
    about["planes"] = [(offset[name], width, bits) for name, width, bits in format.code_planes]
    if format.name in SUB_SCALES:
        kind, about["sub_offset"] = SUB_SCALES[format.name], offset["scales"]
        about["scale_offset"], about["minimum_offset"] = offset["d"], offset.get("dmin", -1)
    elif struct["d" if "d" in offset else "e"] == np.float16:
        kind, about["scale_offset"], about["minimum_offset"] = "halves", offset["d"], offset.get("m", -1)
    else:
        kind, about["sub_offset"] = "looked_up", offset.get("d", offset.get("e"))
    about["scales"] = SCALES_IN_BLOCKS.index(kind)


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


def _field(values: NDArray[Any], words: bool, looked_up: bool = False) -> _cpu.Field:
    """[N, groups], or turned, [groups, N], beside words."""
    kind = FIELD_KINDS.index("looked_up" if looked_up else values.dtype.name)
    item, row = values.itemsize, values.itemsize * values.shape[1]
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return (data, kind, item, row) if words else (data, kind, row, item)
