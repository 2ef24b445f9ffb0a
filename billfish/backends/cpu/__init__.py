"""The CPU engine: C++ kernels for every format, compiled for several ISA levels, chosen when the module loads.

    storage -> PackedWeights (one stream of bytes, in the order in which the kernels read) -> y

This file says, for each format, which of the few kernel axes it is made of; the kernels know nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.activations import ACTIVATIONS
from billfish.arrays import Input
from billfish.backends.base import Backend, Problem
from billfish.backends.cpu import _cpu
from billfish.backends.cpu.packed import GROUPS, Axes, PackedWeights
from billfish.elements import E2M1, E2M1X2, Integer, Signed, Table
from billfish.errors import BackendUnavailable, FormatError, complaint
from billfish.format import Format, GroupValues, Planes
from billfish.formats.ggml import BlockFormat
from billfish.formats.words import WordFormat
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
    """How many threads compute from now on; 0 for the default: OMP_NUM_THREADS, or the cores this process may use."""
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


# ---- dequantize reads storage as it is -----------------------------------------------------------------------------

OUTPUTS = ("float32", "float16", "bfloat16")
# The order of the enums in problem.h.
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
    """Storage in the terms of problem.h: one array of bytes and where its codes and scales are, or the fields that
    hold scales."""

    data: NDArray[np.uint8]
    words: bool
    about: dict[str, Any]
    scale: _cpu.Field | None = None
    minimum: _cpu.Field | None = None
    zero: _cpu.Field | None = None
    byte_values: NDArray[np.float32] | None = None
    scaled_tables: NDArray[np.uint8] | None = None


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
        if x.dtype == np.float32:
            return y
        with np.errstate(over="ignore", invalid="ignore"):
            return y.astype(x.dtype)

    def matmul_into(
        self, x: NDArray[Any], weights: Any, bias: NDArray[Any] | None, activations: str, y: NDArray[np.float32]
    ) -> None:
        """`matmul` into y [M, N], contiguous float32. It may be x itself, which has been read before y is written."""
        if len(x):
            planes = ACTIVATIONS.index(activations)
            rows = np.ascontiguousarray(x, np.float32)
            added = None if bias is None else np.ascontiguousarray(bias, np.float32)
            _cpu.multiply(weights.level, weights.description, weights.data, rows, planes, added, y)

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
