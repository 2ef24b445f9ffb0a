"""The same weights in another format, bit for bit, where that format can hold them.

Formats overlap: q4_0 is u4b8 in groups of 32 in another order, MLX's s * q + b holds every integer format whose offset
comes out exact, and a group of 128 is four groups of 32 with the same scale. Whether a tensor fits is decided by its
scales and offsets alone, so that a plan need not look at the codes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from billfish.core.arrays import bfloat16
from billfish.core.elements import Integer, Signed
from billfish.core.format import Format, GroupValues, Planes
from billfish.core.formats.affine import AffineFormat, ZeroPointFormat
from billfish.core.formats.ggml import MinimumBlock, ScaledBlock
from billfish.core.formats.word_packing import ScaledWordFormat, WordFormat
from billfish.core.storage import Array
from billfish.core.tensor import QuantizedTensor

Floats = NDArray[np.float32]


class Misfit(Exception):
    """A format that cannot hold these weights; the message says why."""


class Recast(NamedTuple):
    """How a tensor becomes one of another format: its planes beside the codes, and a table for the codes."""

    format: Format
    group_size: int
    planes: Planes
    table: NDArray[np.uint8] | None  # None: as they are

    def apply(self, tensor: QuantizedTensor) -> QuantizedTensor:
        """The tensor in the other format. It must be the one that the plan was made for."""
        if tensor.format is self.format:
            return tensor
        codes = tensor.format.unpack_codes(tensor.storage)
        planes = {"codes": codes if self.table is None else self.table[codes], **self.planes}
        group = -1 if self.format.whole_row_groups and self.group_size == tensor.shape[1] else self.group_size
        n, k, group = self.format.check_storage("convert", storage := self.format.pack(planes), group)
        return QuantizedTensor.owning(self.format, (n, k), group, dict(storage), tensor.permutation)


def recast(tensor: QuantizedTensor, format: Format) -> Recast:
    """How `tensor` becomes one of `format` without loss; raises Misfit where it cannot."""
    source = tensor.format
    if source is format:
        return Recast(format, tensor.group_size, {}, None)
    if tensor.shape[1] % format.block_size:
        raise Misfit(f"K = {tensor.shape[1]} is not a multiple of {format.block_size}")
    planes = tensor.scale_planes
    kinds = {source.element.name, format.element.name}
    if kinds <= {"e2m1", "e2m1x2"} and source.group_sizes == format.group_sizes:
        return Recast(format, format.default_group_size, _fp4_scales(source, format, planes), None)
    if not all(isinstance(f.element, (Integer, Signed)) for f in (source, format)):
        made_of = f"{format.name} stores {format.element.name} with {format.scale} scales"
        raise Misfit(f"{made_of}, and {source.name} stores {source.element.name} with {source.scale} scales")
    group = _group_size(tensor, format)
    with np.errstate(invalid="ignore", over="ignore"):
        values = source.group_values(planes)
        shift = 0.0
        if isinstance(format, (ScaledWordFormat, ScaledBlock, ZeroPointFormat)):
            values = _with_zero_point(source, values)
        if isinstance(format, (ScaledWordFormat, ScaledBlock)):
            values, shift = _without_zero_point(values)
        planes = _integer_planes(source, format, *values)
    repeats, count = tensor.group_size // group, -(-tensor.shape[1] // group)
    planes = {name: np.repeat(plane, repeats, axis=1)[:, :count] for name, plane in planes.items()}
    return Recast(format, group, planes, _code_table(source, format, shift))


def _with_zero_point(source: Format, values: GroupValues) -> GroupValues:
    """q * s + m as (q - z) * s, where m is a whole number of scales in every group."""
    scale, _, minimum = values
    if minimum is None:
        return values
    zero = np.where(scale == 0, np.float32(0), np.rint(-minimum / np.where(scale == 0, np.float32(1), scale)))
    if not ((zero.astype(np.float64) * scale == -minimum) & _has_room(source, scale)).all():
        return values
    used = zero[scale != 0]  # where the scale is zero, any zero point will do
    return GroupValues(scale, np.where(scale == 0, used.flat[0] if used.size else np.float32(0), zero))


def _without_zero_point(values: GroupValues) -> tuple[GroupValues, float]:
    """(q - z) * s where z is the same everywhere: a fixed offset."""
    if values.zero is None or values.minimum is not None or not (values.zero == values.zero.flat[0]).all():
        return values, 0.0
    return GroupValues(values.scale), float(values.zero.flat[0])


def _has_room(source: Format, scale: Floats) -> NDArray[np.bool_]:
    """Whether a scale times any code is a float32: its last bits are free."""
    return scale.view(np.uint32) & np.uint32(2**source.element.bits - 1) == 0


def _code_table(source: Format, target: Format, shift: float) -> NDArray[np.uint8]:
    """For each code of the source, the one of the target that means the same, up to a zero point or minimum."""
    a, b = source.element, target.element
    fixed = isinstance(target, (ScaledWordFormat, ScaledBlock))  # no offset that could make up for a shift
    values = a.values - np.float32(shift if fixed else a.low)
    if values.min() < b.low or values.max() > b.high or shift != int(shift):
        raise Misfit(f"{target.name} has no codes for {values.min():g} .. {values.max():g}")
    code_of = {float(value): code for code, value in enumerate(b.values)}
    return np.array([code_of[float(value)] for value in values], np.uint8)


def _fp4_scales(source: Format, target: Format, planes: Planes) -> Planes:
    """The standards' and ggml's scale bytes mean the same but for a few."""
    odd = planes["scale"] == 255 if "mxfp4" in source.name else planes["scale"] >= 0x7F
    if odd.any():
        raise Misfit(f"some of its scale bytes mean another scale in {target.name}")
    return planes


def _group_size(tensor: QuantizedTensor, target: Format) -> int:
    """The largest group of the target that divides the source's."""
    group, k = tensor.group_size, tensor.shape[1]
    if target.whole_row_groups and group == k:
        return k
    fitting = [size for size in target.group_sizes if group % size == 0 or (group == k and k % size == 0)]
    if not fitting:
        raise Misfit(f"its group size is {group}, and {target.name} has {', '.join(map(str, target.group_sizes))}")
    return max(fitting)


def _integer_planes(
    source: Format, target: Format, scale: Floats, zero: Floats | None, minimum: Floats | None
) -> Planes:
    if isinstance(target, (ScaledWordFormat, ScaledBlock)):
        if zero is not None or minimum is not None:
            raise Misfit(f"{target.name} has no {'zero point' if minimum is None else 'minimum'}")
        if isinstance(target, ScaledBlock) and target.fields.keys() != {"d"}:
            raise Misfit(f"{target.name} stores more than a scale")
        return {"scale": narrow(scale) if isinstance(target, WordFormat) else _as_half(scale, target)}
    if isinstance(target, ZeroPointFormat):
        if minimum is not None:
            raise Misfit(f"{target.name} has a zero point, and {source.name} a minimum")
        if source.element.bits > target.element.bits:
            raise Misfit(
                f"{target.name} has codes of {target.element.bits} bits, and {source.name} of {source.element.bits}"
            )
        if zero is None:  # codes are counted from the lowest value, so zero is that far up
            zero = np.full_like(scale, -source.element.low)
        return {"scale": narrow(scale), "zero": _whole_numbers(zero, int(target.element.high))}
    if isinstance(target, (AffineFormat, MinimumBlock)):
        if minimum is None:
            # (q - z) * s as q * s - z * s: the same number if no product has to be rounded.
            shift = np.float32(source.element.low) - (np.float32(0) if zero is None else zero)
            minimum = shift * scale
            exact = minimum.astype(np.float64) == shift.astype(np.float64) * scale
            if not (exact & _has_room(source, scale)).all():
                raise Misfit("a zero point times its scale is not exact in float32")
        if isinstance(target, MinimumBlock):
            return {"scale": _as_half(scale, target), "minimum": _as_half(minimum, target)}
        dtype = smallest_type(scale, minimum)
        return {"scale": scale.astype(dtype), "minimum": minimum.astype(dtype)}
    raise Misfit(f"{target.name} has scales of another kind")


def _whole_numbers(zero: Floats, high: int) -> NDArray[np.uint8]:
    whole = (zero == np.rint(zero)) & (zero >= 0) & (zero <= high)
    if not whole.all():
        raise Misfit(f"its zero point {zero[~whole].flat[0]:g} is not an integer from 0 to {high}")
    return zero.astype(np.uint8)


def holds(values: Floats, dtype: Any) -> bool:
    """Whether a narrower type has all these numbers."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.array_equal(values.astype(dtype).astype(np.float32), values, equal_nan=True))


def narrow(scales: Array) -> Array:
    """float16 if that holds every scale as it is, else float32."""
    if scales.dtype == np.float16:
        return scales
    wide = scales.astype(np.float32)
    with np.errstate(over="ignore"):
        half = wide.astype(np.float16)
    exact = np.array_equal(half.astype(np.float32), wide, equal_nan=True)
    return half if exact else wide


def _as_half(values: Floats, target: Format) -> Array:
    if not holds(values, np.float16):
        raise Misfit(f"its scales or minima are not exact in float16, as {target.name} stores them")
    return values.astype(np.float16)


def smallest_type(*planes: Floats) -> np.dtype[Any]:
    """The first of float16, bfloat16 and float32 that holds them all."""
    narrower = (np.dtype(np.float16), bfloat16)
    return next((t for t in narrower if all(holds(plane, t) for plane in planes)), np.dtype(np.float32))
