"""Which of the few kernel axes a tensor is made of: how wide its codes are, and how a group's scale is kept.

The kernels know these axes and nothing else. A format whose scales they know keeps them as they are; any other one is
brought to float32 by its own `group_values`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.backends.cpu.packed import FLOAT_CODES, GROUPS
from billfish.core.elements import FP8, Element, Integer, Signed
from billfish.core.format import Format, GroupValues, Planes
from billfish.core.formats.ggml import BlockFormat
from billfish.core.formats.kquants import Q2_K
from billfish.core.formats.meaning import E4M3, E8M0, HALVED, PLAIN, TWO_LEVELS, decodes_plainly, meaning, offsets_of
from billfish.core.machine import with_known_floats
from billfish.core.tensor import QuantizedTensor

CHUNK = 256  # k of a chunk of the stream, as in layout/problem.h
# The largest byte e, a scale of 2^(e - 127), that kernels get as it is, and the sizes of factors. With these, sums of
# x, codes and scales are finite (power_of_row of activations/quantize.h). Others go as float32, multiplied last.
LARGEST_E8M0 = 127 + 32
LEAST_FACTOR, LARGEST_FACTOR = 2.0**-64, 2.0**32


@dataclass
class Layout:
    """One tensor in terms of the kernel axes. Fields are planes [N, count], one column for each chunk or group."""

    codes: str
    scales: str
    chunk_fields: list[NDArray[Any]]
    group_fields: list[NDArray[Any]]
    group: int
    bias: int = 0
    factor: float = 1.0
    table: tuple[int, ...] = ()

    @property
    def kind(self) -> tuple[str, str, int, int, tuple[int, ...]]:
        """Which kernels read it: codes, scales, group, bias and table."""
        return self.codes, self.scales, self.group, self.bias, self.table


@cache
def why_never(format: Format) -> str:
    """Why the kernels cannot multiply with a format, or ""."""
    if not decodes_plainly(format):
        return f"no kernels for {format.name}, which has a decoder of its own"
    axis = _code_axis(format.element)
    if axis is None:
        return f"no kernels for the {format.element.name} codes of {format.name}"
    if axis[0] in FLOAT_CODES and any(offsets_of(format)):
        return f"no kernels for the {format.element.name} codes of {format.name} with offsets"
    return ""


def why_not(group_size: int, k: int) -> str:
    """Why they cannot with groups of this size, or ""."""
    if group_size in GROUPS or group_size >= k or group_size % CHUNK == 0:
        return ""
    return f"group_size is {group_size}; supported are {', '.join(map(str, GROUPS))}, multiples of {CHUNK}, or all of K"


@with_known_floats
def layout_of(tensor: QuantizedTensor, in_floats: bool = False) -> Layout:
    """Which kernel axes a tensor is made of. in_floats: with scales in float32, which hold those of any tensor."""
    format = tensor.format
    axis = _code_axis(format.element)
    assert axis is not None
    group = min(tensor.group_size, CHUNK)
    layout = Layout("", "f16", [], [], group if group in GROUPS else CHUNK)  # the other is all of a short row
    layout.codes, layout.bias, layout.table, layout.factor = axis
    _add_scales(layout, format, tensor.scale_planes, in_floats)
    if layout.codes == "e4m3":
        _spoil_groups_with_nan(layout, tensor)
    if layout.group < tensor.group_size:  # one scale for more than a chunk: repeat it for each
        chunks = -(-tensor.shape[1] // CHUNK)
        index = np.arange(chunks) * CHUNK // tensor.group_size
        layout.group_fields = [np.ascontiguousarray(field[:, index]) for field in layout.group_fields]
    return layout


@cache
def layout_of_blocks(format: BlockFormat) -> Layout:
    """The layout of blocks with float16 scales inside. But for the planes, here of one block, all matrices have it."""
    blocks = np.zeros((1, format.struct.itemsize), np.uint8)
    return layout_of(QuantizedTensor.from_storage(format, {"blocks": blocks}))


def _code_axis(element: Element) -> tuple[str, int, tuple[int, ...], float] | None:
    """Codes of layout/problem.h, bias, table, and the factor that scales make up for; None if the kernels have none."""
    if type(element) is Signed:
        return "s8", 0, (), 1.0
    if type(element) is Integer:
        if element.bits > 6:
            return "s8", 0, (), 1.0
        bits = max(2, element.bits)
        return (f"u{bits}", element.bias, (), 1.0) if 0 <= element.bias < 2**bits else None
    if type(element).decode is not Element.decode:
        return None
    if np.array_equal(element.values, FP8.values, equal_nan=True):
        return "e4m3", 0, (), 1.0
    if element.bits > 4:
        return None
    # A table of small integers; E2M1 as twice its values, which the scale makes up for.
    values, factor = element.values, 1.0
    if not np.array_equal(values, np.rint(values)):
        values, factor = values * 2, 0.5
    if not np.array_equal(values, np.rint(values)) or np.abs(values).max() > 127:
        return "floats", 0, tuple(np.resize(element.values, 16).astype("<f4").tobytes()), 1.0
    return "table", 0, tuple(int(v) & 0xFF for v in np.resize(values, 16)), factor


def _add_scales(layout: Layout, format: Format, planes: Planes, in_floats: bool) -> None:
    means, scale = meaning(format), planes["scale"]
    # The kernels' bytes are signed: of codes that mean q they hold q - 128.
    shift = 128 - format.element.bias if layout.codes == "s8" and isinstance(format.element, Integer) else 0
    # The kernels' sums are offset by a multiple of the scale, so scales that are not finite go as float32, without.
    halves = scale.dtype == np.float16 and bool(np.isfinite(scale).all())
    if in_floats:
        _add_floats(layout, format, planes, np.float32(shift))
    elif means in TWO_LEVELS and halves and format.block_size == CHUNK and _small(format, planes):
        _add_two_levels(layout, format, planes)
    elif means in PLAIN and halves and not shift and (layout.factor == 1 or planes.keys() == {"scale"}):
        _add_halves(layout, planes)
    elif means in PLAIN and halves and shift and "zero" in planes and planes["zero"].dtype == np.uint8:
        layout.scales = "f16_zero16"
        layout.group_fields = [scale, planes["zero"].astype(np.float16) - np.float16(shift)]
    elif means in E8M0 and not ((scale == 0) | (scale > LARGEST_E8M0)).any():  # 0 would be a zero and not 2^-127
        layout.scales, layout.group_fields = "e8m0", [scale]
        layout.factor *= 0.5 if means in HALVED else 1
    elif means in E4M3 and not (scale >= 0x7F).any() and _moderate(float(planes["global_scale"])):
        layout.scales, layout.group_fields = "e4m3", [scale]  # the kernels' are 256 times too small
        layout.factor *= (128 if means in HALVED else 256) * float(planes["global_scale"])
    else:
        _add_floats(layout, format, planes, np.float32(shift))


def _spoil_groups_with_nan(layout: Layout, tensor: QuantizedTensor) -> None:
    """Kernels do not know that two codes of E4M3 are NaN: where a group has one, its scale is NaN instead."""
    codes = tensor.format.unpack_codes(tensor.storage)
    starts = np.arange(0, codes.shape[1], tensor.group_size)
    spoilt = np.logical_or.reduceat(codes & 0x7F == 0x7F, starts, axis=1)
    if spoilt.any():
        _add_floats(layout, tensor.format, tensor.scale_planes, np.float32(0))
        layout.group_fields[0] = np.where(spoilt, np.float32(np.nan), layout.group_fields[0])


def _moderate(factor: float) -> bool:
    return LEAST_FACTOR <= abs(factor) <= LARGEST_FACTOR


def _add_halves(layout: Layout, planes: Planes) -> None:
    layout.group_fields = [planes["scale"]]
    if "zero" in planes:
        layout.scales = "f16_zero8" if planes["zero"].dtype == np.uint8 else "f16_zero16"
        layout.group_fields.append(planes["zero"])
    elif "minimum" in planes:
        layout.scales = "f16_minimum"
        layout.group_fields.append(planes["minimum"])


def _small(format: Format, planes: Planes) -> bool:
    """Whether the integers of the lower level fit the kernels' bytes."""
    if "sub_minimum" in planes:
        return planes["sub_scale"].dtype == planes["sub_minimum"].dtype == np.uint8
    meant = planes["sub_scale"].astype(np.int16) - getattr(format, "sub_bias", 0)
    return bool(meant.min(initial=0) >= -128 and meant.max(initial=0) <= 127)


def _add_two_levels(layout: Layout, format: Format, planes: Planes) -> None:
    layout.scales = "sub_minimum" if "sub_minimum" in planes else "sub"
    bias = getattr(format, "sub_bias", 0)
    if layout.scales == "sub":  # signed; the kernels' bytes are not, and have 128 more
        bias -= 128
    sub_scale = (planes["sub_scale"].astype(np.int16) - bias).astype(np.uint8)
    layout.chunk_fields = [planes["scale"]] + ([planes["minimum"]] if "minimum" in planes else [])
    layout.group_fields = [sub_scale] + ([planes["sub_minimum"]] if "sub_minimum" in planes else [])
    if isinstance(format, Q2_K) and type(format).read_scales is Q2_K.read_scales:  # both fit one byte, as in the file
        layout.scales = "sub_nibbles"
        layout.group_fields = [planes["sub_scale"] | planes["sub_minimum"] << 4]


def _add_floats(layout: Layout, format: Format, planes: Planes, shift: np.float32) -> None:
    """Any scales in float32. (code + shift - zero) * scale + minimum is code * scale plus another minimum."""
    with np.errstate(invalid="ignore", over="ignore"):  # scales of a file may be NaN or infinite
        group: GroupValues = format.group_values(planes)
        layout.scales, layout.group_fields = "f32", [group.scale * np.float32(layout.factor)]
        layout.factor = 1.0
        if shift or group.zero is not None or group.minimum is not None:
            offset = shift if group.zero is None else shift - group.zero
            added = group.scale * offset + (0 if group.minimum is None else group.minimum)
            layout.scales = "f32_minimum"
            layout.group_fields.append(added.astype(np.float32))
