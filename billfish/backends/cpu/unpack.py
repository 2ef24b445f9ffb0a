"""From packed weights back to the storage that they were packed from, bit for bit.

The stream has all codes, and most scales as the format has them (axes.py). `Rest` is what has to be known beside it:
the type of each plane that the stream tells, and the plane itself where the stream does not, such as nvfp4's scale of
the whole tensor, or scales that kernels get as other float32 numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cpu import _cpu
from billfish.backends.cpu.axes import CHUNK, Layout, layout_of_blocks
from billfish.backends.cpu.packed import GROUPS, PackedWeights, Rest
from billfish.backends.cpu.source import CODE_BYTES, field_of, source_about
from billfish.core.elements import Integer, Signed
from billfish.core.errors import DataError, failure
from billfish.core.format import Format, Planes
from billfish.core.formats.ggml import BlockFormat
from billfish.core.formats.structure import structure_of
from billfish.core.machine import with_known_floats
from billfish.core.storage import Storage

HALF, BYTE, FLOAT = np.dtype("<f2"), np.dtype("u1"), np.dtype("<f4")
# Types of the fields of a chunk, and of a group, in the order of the stream; see layout/problem.h.
FIELDS: dict[str, tuple[tuple[np.dtype[Any], ...], tuple[np.dtype[Any], ...]]] = {
    "f16": ((), (HALF,)),
    "f16_minimum": ((), (HALF, HALF)),
    "f16_zero8": ((), (HALF, BYTE)),
    "f16_zero16": ((), (HALF, HALF)),
    "e8m0": ((), (BYTE,)),
    "e4m3": ((), (BYTE,)),
    "sub": ((HALF,), (BYTE,)),
    "sub_minimum": ((HALF, HALF), (BYTE, BYTE)),
    "sub_nibbles": ((HALF, HALF), (BYTE,)),
    "f32": ((), (FLOAT,)),
    "f32_minimum": ((), (FLOAT, FLOAT)),
}


@cache
def _block_types(format: BlockFormat) -> dict[str, np.dtype[Any]]:
    """The types of the planes of blocks, which are the same for all matrices."""
    planes = format.unpack_scales({"blocks": np.zeros((1, format.struct.itemsize), np.uint8)})
    return {name: plane.dtype for name, plane in planes.items()}


def rest_of_blocks(format: Format, storage: Storage, scales: str) -> Rest | None:
    """What a stream does not tell of blocks with float16 scales inside; None where that has to be looked for."""
    structure = structure_of(format)
    if structure is None or not structure.scales_inside or not isinstance(format, BlockFormat):
        return None
    if scales != layout_of_blocks(format).scales:  # some are not finite
        return None
    types = _block_types(format)
    told = scales_told(format, scales, *_empty_fields(scales), types, format.group_sizes[0], 0)
    missing = types.keys() - told.keys()
    return {**types, **({name: format.unpack_scales(storage)[name] for name in missing} if missing else {})}


def _empty_fields(scales: str) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    return tuple([np.zeros((1, 0), kind) for kind in kinds] for kinds in FIELDS[scales])  # type: ignore[return-value]


def rest_of(format: Format, planes: Planes, layout: Layout, group_size: int, k: int) -> Rest:
    """What a stream of these fields does not tell of these planes, all but the codes."""
    types = {name: plane.dtype for name, plane in planes.items()}
    fields = layout.chunk_fields, layout.group_fields
    told = scales_told(format, layout.scales, *fields, types, group_size, k)
    return {name: types[name] if _same(told.get(name), plane) else np.array(plane) for name, plane in planes.items()}


def _same(told: NDArray[Any] | None, plane: NDArray[Any]) -> bool:
    """Whether an array is another one, bit for bit."""
    if told is None or told.shape != plane.shape or told.dtype != plane.dtype:
        return False
    bits = np.dtype(f"u{plane.dtype.itemsize}")
    return np.array_equal(np.ascontiguousarray(told).view(bits), np.ascontiguousarray(plane).view(bits))


def scales_told(
    format: Format,
    scales: str,
    chunk_fields: list[NDArray[Any]],
    group_fields: list[NDArray[Any]],
    types: Mapping[str, np.dtype[Any]],
    group_size: int,
    k: int,
) -> dict[str, NDArray[Any]]:
    """The planes that the fields of a stream tell: the inverse of `axes._add_scales`. types: of the planes."""
    if k and group_size > CHUNK:  # a scale that was repeated for each chunk
        starts = np.arange(-(-k // group_size)) * group_size // CHUNK
        group_fields = [field[:, starts] for field in group_fields]
    first, *others = group_fields
    if scales in ("sub", "sub_minimum", "sub_nibbles"):
        bias = getattr(format, "sub_bias", 0) - (128 if scales == "sub" else 0)
        planes = dict(zip(("scale", "minimum"), chunk_fields, strict=False))
        if scales == "sub_nibbles":
            return {**planes, "sub_scale": first & np.uint8(15), "sub_minimum": first >> np.uint8(4)}
        planes["sub_scale"] = (first.astype(np.int16) + np.int16(bias)).astype(types["sub_scale"])
        return {**planes, "sub_minimum": others[0]} if others else planes
    if scales in ("f32", "f32_minimum"):
        with np.errstate(all="ignore"):
            told = {"scale": first.astype(types["scale"])}
            if others and "minimum" in types and "zero" not in types:
                told["minimum"] = others[0].astype(types["minimum"])
        return told
    planes = {"scale": first}
    if scales == "f16_minimum":
        planes["minimum"] = others[0]
    elif others:
        zero = others[0]
        if types["zero"] == BYTE and zero.dtype == HALF:  # signed bytes: see axes.py
            zero = (zero + np.float16(128 - format.element.bias)).astype(np.uint8)  # type: ignore[attr-defined]
        planes["zero"] = zero
    return planes


def planes_of(weights: PackedWeights) -> Planes:
    """All planes of the tensor that the weights were packed from."""
    format, (n, k), axes, rest = weights.format, weights.shape, weights.axes, weights.rest
    if rest is None:
        problem = "these packed weights lack what unpacking needs: they were loaded, or packed for matmul only"
        raise DataError(failure("unpack", problem, "Keep the QuantizedTensor."))
    codes = np.empty((n, k), np.uint8)
    counts = -(-k // CHUNK), -(-k // axes.group)
    fields = [
        [np.empty((n, count), kind) for kind in kinds] for count, kinds in zip(counts, FIELDS[axes.scales], strict=True)
    ]
    flip = 128 if axes.codes == "s8" and not isinstance(format.element, Signed) else 0
    chunk_fields, group_fields = ([f.view(np.uint8).reshape(*f.shape, f.itemsize) for f in some] for some in fields)
    _cpu.unpack(weights.level, weights.description, weights.data, flip, codes, chunk_fields, group_fields)
    types = {name: part if isinstance(part, np.dtype) else part.dtype for name, part in rest.items()}
    told = scales_told(format, axes.scales, fields[0], fields[1], types, weights.group_size, k)
    kept = {name: told[name] if isinstance(part, np.dtype) else part for name, part in rest.items()}
    return {"codes": codes, **kept}


@with_known_floats
def decode_planes(format: Format, planes: Planes, group_size: int, level: str, out: NDArray[Any], kind: int) -> None:
    """Decode planes into `out` [N, K], contiguous: bit for bit as `dequantize` does from storage. kind: of OUTPUTS."""
    codes, element = planes["codes"], format.element
    with np.errstate(all="ignore"):  # scales of a file may be NaN or infinite
        groups = list(format.group_values(planes))
    if group_size not in GROUPS:  # one scale for a whole row, or for many blocks: repeat it for each of these
        index = np.arange(-(-codes.shape[1] // 32)) * 32 // group_size
        groups, group_size = [None if part is None else part[:, index] for part in groups], 32
    scale, zero, minimum = groups
    numbers = None
    if not isinstance(element, (Integer, Signed)):
        every = np.arange(256, dtype=np.uint8)[:, None]
        values = element.decode(every & np.uint8(2**element.bits - 1))
        numbers = np.ascontiguousarray(values, np.float32)
    about = source_about(format, codes.shape, group_size, CODE_BYTES, codes.shape[1])
    parts = (scale, minimum, zero)
    fields: list[Any] = [None if part is None else field_of(np.ascontiguousarray(part, np.float32)) for part in parts]
    raw = out.view(np.uint32 if out.dtype.itemsize == 4 else np.uint16)
    _cpu.dequantize(level, codes, False, about, fields[0], fields[1], fields[2], None, None, numbers, raw, kind)
