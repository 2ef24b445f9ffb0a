"""The CPU engine: C++ kernels for every format, compiled for several ISA levels, chosen when the module loads.

    storage -> PackedWeights (one stream of bytes, in the order in which the kernels read) -> y

This file says, for each format, which of the few kernel axes it is made of; the kernels know nothing else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.activations import ACTIVATIONS
from billfish.arrays import FLOATS, Input
from billfish.backends.base import Backend, Problem, Product
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.packed import GROUPS, Axes, PackedWeights
from billfish.backends.cpu.source import Source, storage_of
from billfish.elements import E2M1, E2M1X2, Integer, Table
from billfish.errors import BackendUnavailable, FormatError, complaint
from billfish.floats import with_known_floats
from billfish.format import Format, GroupValues, Planes
from billfish.formats.ggml import BlockFormat
from billfish.tensor import QuantizedTensor

CHUNK = 256


def choose_level() -> str:
    """The best ISA level of this machine, or the one that BILLFISH_ISA names."""
    available = _cpu.levels()
    wanted = os.environ.get("BILLFISH_ISA")
    if wanted is None:
        return str(available[0])
    if wanted not in available:
        takes = f"one that this machine runs: {', '.join(available)}"
        raise BackendUnavailable(complaint("cpu", "BILLFISH_ISA", repr(wanted), takes))
    return wanted


def set_threads(count: int) -> None:
    """How many threads compute from now on; 0 for the default: OMP_NUM_THREADS, or the cores this process
    may use, by its affinity and its CPU quota. These are looked at when billfish is imported, in the child after a
    fork, and by ``set_threads(0)``."""
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 1024:
        raise FormatError(complaint("set_threads", "count", repr(count), "a number from 0 to 1024"))
    _cpu.set_threads(count)


@dataclass
class Layout:
    """One format in terms of the kernel axes. Fields are planes [N, count], one column for each chunk or group."""

    codes: str
    scales: str
    chunk_fields: list[NDArray[Any]]
    group_fields: list[NDArray[Any]]
    group: int
    bias: int = 0
    factor: float = 1.0
    table: tuple[int, ...] = ()


@with_known_floats
def layout_of(tensor: QuantizedTensor) -> Layout:
    """Which kernel axes a tensor is made of."""
    format, element = tensor.format, tensor.format.element
    group = min(tensor.group_size, CHUNK)
    layout = Layout("u4", "f16", [], [], group if group in GROUPS else CHUNK)  # the other is all of a short row
    if isinstance(element, (E2M1, Table)):
        # E2M1 as twice its value, a small integer; the scale makes up for it.
        doubled = E2M1X2.values if isinstance(element, E2M1) else element.values
        layout.codes = "table"
        layout.table = tuple(int(v) & 0xFF for v in doubled)
        layout.factor = 0.5 if isinstance(element, E2M1) else 1.0
    elif element.bits == 8:
        layout.codes = "s8"
    elif isinstance(element, Integer):
        layout.codes, layout.bias = f"u{element.bits}", element.bias
    _add_scales(layout, format, format.unpack_scales(tensor.storage))
    if layout.group < tensor.group_size:  # one scale for more than a chunk: repeat it for each
        chunks = -(-tensor.shape[1] // CHUNK)
        index = np.arange(chunks) * CHUNK // tensor.group_size
        layout.group_fields = [np.ascontiguousarray(field[:, index]) for field in layout.group_fields]
    return layout


def _add_scales(layout: Layout, format: Format, planes: Planes) -> None:
    # The kernels' sums are offset by a multiple of the scale, so scales that are not finite go as float32, without.
    plain = planes["scale"].dtype != np.float16 or bool(np.isfinite(planes["scale"]).all())
    if "sub_scale" in planes and plain:
        layout.scales = "sub_minimum" if "sub_minimum" in planes else "sub"
        bias = getattr(format, "sub_bias", 0)
        if layout.scales == "sub":  # signed; the kernels' bytes are not, and have 128 more
            bias -= 128
        sub_scale = (planes["sub_scale"].astype(np.int16) - bias).astype(np.uint8)
        layout.chunk_fields = [planes["scale"]] + ([planes["minimum"]] if "minimum" in planes else [])
        layout.group_fields = [sub_scale] + ([planes["sub_minimum"]] if "sub_minimum" in planes else [])
        if getattr(format, "sub_limit", 0) == 15:  # both fit one byte, as in the file
            layout.scales = "sub_nibbles"
            layout.group_fields = [planes["sub_scale"] | planes["sub_minimum"] << 4]
        return
    scale = planes["scale"]
    # The kernels' bytes are signed: of codes that mean q they hold q - 128.
    shift = 128 - format.element.bias if format.element.bits == 8 and isinstance(format.element, Integer) else 0
    if shift and scale.dtype == np.float16 and planes.get("zero", scale).dtype == np.uint8:
        layout.scales = "f16_zero16"
        layout.group_fields = [scale, planes["zero"].astype(np.float16) - np.float16(shift)]
        return
    if scale.dtype.itemsize > 1 and (scale.dtype != np.float16 or shift or not plain):
        with np.errstate(invalid="ignore", over="ignore"):  # scales of a file may be NaN or infinite
            group = format.group_values(planes)
            layout.scales, layout.group_fields = "f32", [group.scale * np.float32(layout.factor)]
            layout.factor = 1.0
            if group.zero is not None or group.minimum is not None:
                layout.scales = "f32_minimum"
                layout.group_fields.append(_float_minimum(group, np.float32(shift)))
        return
    if scale.dtype == np.float16:
        layout.group_fields = [scale]
        if "zero" in planes:
            layout.scales = "f16_zero8" if planes["zero"].dtype == np.uint8 else "f16_zero16"
            layout.group_fields.append(planes["zero"])
        elif "minimum" in planes:
            layout.scales = "f16_minimum"
            layout.group_fields.append(planes["minimum"])
        return
    # One byte: shifted into place by the kernel, except for the few bytes that mean something else there.
    if format.scale.startswith("e8m0"):
        layout.scales, odd = "e8m0", (scale == 0) | (scale > 224)  # no scale times the offset may overflow
        factor = 0.5
    else:
        layout.scales, odd = "e4m3", scale >= 0x7F
        factor = 128.0 * float(planes["global_scale"])
    if odd.any():
        layout.scales = "f32"
        layout.group_fields = [format.group_values(planes).scale * np.float32(layout.factor)]
        layout.factor = 1.0
    else:
        layout.group_fields, layout.factor = [scale], factor


def _float_minimum(group: GroupValues, shift: np.float32) -> NDArray[np.float32]:
    """(code + shift - zero) * scale + minimum is code * scale plus this."""
    offset = shift if group.zero is None else shift - group.zero
    return group.scale * offset + (0 if group.minimum is None else group.minimum)


OUTPUTS = ("float32", "float16", "bfloat16")  # what dequantize writes, in the order of the enum in layout/problem.h


def _blocks_with_scales(tensor: QuantizedTensor) -> Source | None:
    """Blocks whose codes and float16 scales the packer reads as they are, or None."""
    if not isinstance(tensor.format, BlockFormat):
        return None
    source = storage_of(tensor)
    return source if source.about["scale_offset"] >= 0 else None


@cache
def _layout_of_blocks(format: BlockFormat) -> Layout:
    """Such blocks' layout, which is the same for all matrices but for the planes; these are of a single block."""
    blocks = np.zeros((1, format.struct.itemsize), np.uint8)
    return layout_of(QuantizedTensor.from_storage(format, {"blocks": blocks}))


def _as_bytes(fields: list[NDArray[Any]]) -> list[NDArray[np.uint8]]:
    """[N, count] of anything to bytes [N, count, size]."""
    return [np.ascontiguousarray(f).view(np.uint8).reshape(*f.shape, f.dtype.itemsize) for f in fields]


# x [M, K], weights, bias [N], y [M, N] or the same with more dimensions: contiguous float32.
Multiplied = tuple[NDArray[np.float32], PackedWeights, NDArray[np.float32] | None, NDArray[np.float32]]


def _rounded(y: NDArray[np.float32], dtype: np.dtype[Any]) -> NDArray[Any]:
    """y in x's type; where that has no room for a value, it is infinite."""
    if dtype == np.float32:
        return y
    with np.errstate(over="ignore", invalid="ignore"):
        return y.astype(dtype)


class CpuBackend(Backend):
    """The kernels of one ISA level."""

    name = "cpu"

    def __init__(self) -> None:
        self.level = choose_level()

    def can_run(self, problem: Problem) -> tuple[bool, str]:
        if problem.device != "cpu":
            return False, f"it computes in CPU memory, and x is on {problem.device}"
        return True, ""

    def prepack(self, tensor: QuantizedTensor) -> PackedWeights:
        return self.prepack_all([tensor])[0]

    def prepack_all(self, tensors: Iterable[QuantizedTensor]) -> list[PackedWeights]:
        """Many matrices at once, those that lie in blocks in one call that leaves Python to other threads."""
        packed: dict[int, PackedWeights] = {}
        blocks, places, all_tensors = [], [], list(tensors)
        for place, tensor in enumerate(all_tensors):
            source = _blocks_with_scales(tensor)
            if source is None:
                packed[place] = self._prepack_with_fields(tensor)
                continue
            packed[place] = self._room_for(tensor, _layout_of_blocks(tensor.format))
            blocks.append((packed[place].description, source.data, source.about, packed[place].data))
            places.append(place)
        for place, finite in zip(places, _cpu.prepack_blocks(self.level, blocks), strict=True):
            if not finite:  # such scales need float32: see _add_scales
                packed[place] = self._prepack_with_fields(all_tensors[place])
        return [packed[place] for place in range(len(all_tensors))]

    def _room_for(self, tensor: QuantizedTensor, layout: Layout) -> PackedWeights:
        axes = Axes(layout.codes, layout.scales, layout.group, layout.bias, layout.factor, layout.table)
        weights = PackedWeights(tensor.format, tensor.shape, tensor.group_size, self.level, axes, np.empty(0, np.uint8))
        return replace(weights, data=np.empty(_cpu.packed_bytes(self.level, weights.description), np.uint8))

    def _prepack_with_fields(self, tensor: QuantizedTensor) -> PackedWeights:
        """Codes come from storage as it is, scales as fields that kernels understand."""
        layout, source = layout_of(tensor), storage_of(tensor)
        weights = self._room_for(tensor, layout)
        chunk_fields, group_fields = map(_as_bytes, (layout.chunk_fields, layout.group_fields))
        _cpu.prepack(
            self.level,
            weights.description,
            source.data,
            source.words,
            source.about,
            chunk_fields,
            group_fields,
            weights.data,
        )
        return weights

    def matmul(
        self, x: NDArray[Any], weights: Any, bias: NDArray[Any] | None, activations: str = "exact"
    ) -> NDArray[Any]:
        y = np.empty((len(x), weights.shape[0]), np.float32)
        self.matmul_into(x, weights, bias, activations, y)
        return y if x.dtype == np.float32 else _rounded(y, x.dtype)

    def matmul_into(
        self, x: NDArray[Any], weights: Any, bias: NDArray[Any] | None, activations: str, y: NDArray[np.float32]
    ) -> None:
        """`matmul` into y [M, N], contiguous float32. It may be x itself, which has been read before y is written."""
        if len(x):
            planes = ACTIVATIONS.index(activations)
            rows = np.ascontiguousarray(x, np.float32)
            added = None if bias is None else np.ascontiguousarray(bias, np.float32)
            _cpu.multiply(weights.level, weights.description, weights.data, rows, planes, added, y)

    def multiply_all(self, products: Iterable[Multiplied], activations: str) -> None:
        """Several products in one call of the native core, which makes those together that have one x."""
        planes = ACTIVATIONS.index(activations)
        _cpu.multiply_all(
            [(w.level, w.description, w.data, x, planes, bias, y) for x, w, bias, y in products if len(x)]
        )

    def linears(self, products: Sequence[Product], activations: str) -> list[Any]:
        last, todo = None, []
        for x, weights, n, bias in products:
            if x is not last:
                last, lead, k = x, x.shape[:-1], x.shape[-1]
                rows = np.ascontiguousarray(x.numpy().reshape(math.prod(lead), k), np.float32)
            added = None if bias is None else np.ascontiguousarray(bias.numpy(), np.float32)
            todo.append((rows, weights, added, np.empty((*lead, n), np.float32)))
        self.multiply_all(todo, activations)
        return [
            x.like(_rounded(y, FLOATS[x.dtype_name])) for (x, _, _, _), (_, _, _, y) in zip(products, todo, strict=True)
        ]

    def linear_into(self, x: Input, weights: Any, bias: Input | None, activations: str, out: NDArray[Any]) -> None:
        k, n = x.shape[-1], out.shape[-1]
        added = None if bias is None else bias.numpy()
        if (
            out.dtype == np.float32
            and out.flags.c_contiguous
            and (added is None or not np.may_share_memory(added, out))
        ):
            self.matmul_into(x.numpy().reshape(-1, k), weights, added, activations, out.reshape(-1, n))
        else:
            super().linear_into(x, weights, bias, activations, out)

    def matmul_codes(self, codes: NDArray[np.int8], scale: NDArray[np.float32], weights: Any) -> NDArray[np.float32]:
        y = np.empty((len(codes), weights.shape[0]), np.float32)
        if len(codes):
            _cpu.multiply_codes(weights.level, weights.description, weights.data, codes, scale, y)
        return y

    def dequantize(self, tensor: QuantizedTensor, out: NDArray[Any]) -> None:
        target = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        s = storage_of(tensor)
        raw = target.view(np.uint32 if out.dtype.itemsize == 4 else np.uint16)
        kind = OUTPUTS.index(out.dtype.name)
        _cpu.dequantize(
            self.level, s.data, s.words, s.about, s.scale, s.minimum, s.zero, s.byte_values, s.scaled_tables, raw, kind
        )
        if target is not out:
            out[...] = target
