"""Weights decoded by MLX operations, for when MLX traces: inside mx.compile and mx.vmap no value can be read.

Storage goes in as arrays that may be placeholders, and float32 weights come out as part of the graph, bit for bit those
of :func:`billfish.dequantize`. Nothing here looks at a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from billfish.core.activations import LARGEST, block_size
from billfish.core.errors import FormatError, failure
from billfish.core.format import Format, Planes
from billfish.core.formats.affine import AffineFormat
from billfish.core.formats.fp4 import MicroscaledFp4
from billfish.core.formats.fp8 import ByteRows, Mxfp8
from billfish.core.formats.ggml import BlockFormat, MinimumBlock
from billfish.core.formats.kquants import Q2_K, Q3_K, Iq4Xs, SixBitPairs, TwoLevelMinimum, TwoLevelScaled
from billfish.core.formats.nf4 import Nf4
from billfish.core.formats.word_packing import WordFormat

Arrays = dict[str, mx.array]


def decode(format: Format, arrays: Sequence[mx.array], group_size: int) -> mx.array:
    """W [N, K] in float32 from storage arrays in the order of their names."""
    storage = dict(zip(format.storage_names, arrays, strict=True))
    if isinstance(format, WordFormat):
        codes, groups = _words(format, storage)
    elif isinstance(format, BlockFormat):
        codes, groups = _blocks(format, storage)
    elif isinstance(format, AffineFormat):
        codes = _nibbles(storage["packed"]) if format.element.bits == 4 else storage["packed"]
        groups = {"scale": storage["scales"], "minimum": storage["biases"]}
    elif isinstance(format, ByteRows):
        bytewise = isinstance(format, Mxfp8)
        codes, scales = storage["packed"], storage["scales"]
        groups = {"scale": _byte_scale(format, scales, storage) if bytewise else scales}
    elif isinstance(format, Nf4):
        codes, groups = _nibbles(storage["packed"], first=4), {"scale": storage["scales"]}
    elif isinstance(format, MicroscaledFp4):
        codes = _nibbles(storage["packed"])
        groups = {"scale": _byte_scale(format, storage["scales"], storage)}
    else:
        raise FormatError(failure("MarlinLinear", f"the format {format.name} is not supported inside mx.compile"))
    k = codes.shape[1]
    w = mx.take(mx.array(format.element.values), codes.astype(mx.uint32))

    def spread(name: str) -> mx.array:
        return mx.repeat(groups[name].astype(mx.float32), group_size, axis=1)[:, :k]

    # In the order of Format.decode, with each operation rounded once.
    if "zero" in groups:
        w = w - spread("zero")
    w = w * spread("scale")
    if "minimum" in groups:
        w = w + spread("minimum")
    return w


def _words(format: WordFormat, storage: Arrays) -> tuple[mx.array, Arrays]:
    bits = format.element.bits
    packed = storage["packed"].T
    shifts = mx.array(np.arange(0, 32, bits, dtype=np.uint32))
    codes = ((packed[:, :, None] >> shifts) & (2**bits - 1)).reshape(packed.shape[0], -1)
    groups = {"scale": storage["scales"].T}
    if "zeros" in storage:
        groups["zero"] = storage["zeros"].T
    return codes, groups


def _nibbles(packed: mx.array, first: int = 0) -> mx.array:
    """Bytes [N, K/2] to codes [N, K], the nibble at bit `first` first."""
    return mx.stack([packed >> first & 15, packed >> (4 - first) & 15], axis=-1).reshape(packed.shape[0], -1)


def _byte_scale(format: Format, scales: mx.array, storage: Arrays) -> mx.array:
    """Scales of one byte, by the table of what each byte means."""
    planes: Planes = {"scale": np.arange(256, dtype=np.uint8)[None], "global_scale": np.ones((), np.float32)}
    table = mx.array(format.group_values(planes).scale[0])
    values = mx.take(table, scales.astype(mx.uint32))
    return values * storage["global_scale"] if "global_scale" in storage else values


def unfold(packed: mx.array, width: int, bits: int) -> mx.array:
    """As billfish.core.formats.ggml.unfold: bytes [..., B] to their fields, run by run, lowest fields first."""
    *leading, count = packed.shape
    shifts = mx.array(np.arange(0, 8, bits, dtype=np.uint8))
    runs = packed.reshape(*leading, count // width, 1, width)
    return ((runs >> shifts[:, None]) & (2**bits - 1)).reshape(*leading, -1)


def _blocks(format: BlockFormat, storage: Arrays) -> tuple[mx.array, Arrays]:
    blocks = storage["blocks"]
    n = blocks.shape[0]
    blocks = blocks.reshape(n, -1, format.struct.itemsize)
    field = {}
    for name, (kind, offset, *_) in (format.struct.fields or {}).items():
        run = blocks[:, :, offset : offset + kind.itemsize]
        # A view of another type wants rows that are contiguous, which a slice is not.
        field[name] = mx.contiguous(run).view(mx.float16) if kind.base == np.float16 else run
    codes = mx.zeros((n, blocks.shape[1], format.block_size), mx.uint8)
    at = 0
    for name, width, bits in format.code_fields:
        codes = codes | unfold(field[name], width, bits) << at
        at += bits
    groups = _block_groups(format, field, storage)
    return codes.reshape(n, -1), {name: plane.reshape(n, -1) for name, plane in groups.items()}


def _block_groups(format: BlockFormat, field: Arrays, storage: Arrays) -> Arrays:
    """What each group of a block does to its elements: [N, B, groups in a block]."""
    if isinstance(format, TwoLevelMinimum):
        scale, minimum = _sub_pairs(format, field["scales"])
        return {"scale": _two_level(field["d"], scale), "minimum": -_two_level(field["dmin"], minimum)}
    if isinstance(format, TwoLevelScaled):
        if isinstance(format, Q3_K):
            low, high = field["scales"][..., :8], field["scales"][..., 8:]
            sub_scale = unfold(low, 8, 4) | unfold(high, 4, 2) << 4
        elif isinstance(format, Iq4Xs):
            high, low = field["scales"][..., :2], field["scales"][..., 2:]
            sub_scale = unfold(low, 1, 4) | unfold(high, 1, 2) << 4
        else:
            sub_scale = mx.contiguous(field["scales"]).view(mx.int8)
        return {"scale": _two_level(field["d"], sub_scale.astype(mx.int16) - format.sub_bias)}
    if isinstance(format, MinimumBlock):
        return {"scale": field["d"], "minimum": field["m"]}
    if isinstance(format, MicroscaledFp4):
        return {"scale": _byte_scale(format, field[next(iter(format.fields))], storage)}
    return {"scale": field["d"]}


def _two_level(upper: mx.array, lower: mx.array) -> mx.array:
    return upper.astype(mx.float32) * lower.astype(mx.float32)


def _sub_pairs(format: TwoLevelMinimum, scales: mx.array) -> tuple[mx.array, mx.array]:
    if isinstance(format, Q2_K):
        return scales & 15, scales >> 4
    assert isinstance(format, SixBitPairs)
    first, second, mixed = scales[..., :4], scales[..., 4:8], scales[..., 8:]
    sub_scale = mx.concatenate([first & 63, (mixed & 15) | (first >> 6 << 4)], axis=-1)
    sub_minimum = mx.concatenate([second & 63, (mixed >> 4) | (second >> 6 << 4)], axis=-1)
    return sub_scale, sub_minimum


def round_activations(x: mx.array, activations: str, group_size: int) -> mx.array:
    """x [..., K] in float32, rounded to integers times a scale as billfish.core.activations does it."""
    *leading, k = x.shape
    block = block_size(activations, group_size)
    padded = mx.pad(x, [(0, 0)] * len(leading) + [(0, -k % block)])
    blocks = padded.reshape(*leading, -1, block)
    top = mx.array(np.float32(LARGEST[activations]))
    largest = mx.abs(blocks).max(axis=-1, keepdims=True)
    inverse = top / largest
    finite = mx.isfinite(largest)
    usable = finite & mx.isfinite(inverse)
    codes = mx.where(usable, mx.round(blocks * mx.where(usable, inverse, 0)), 0)
    scale = mx.where(usable, largest / top, mx.where(finite, 0, mx.array(np.float32(np.nan))))
    return (codes * scale).reshape(padded.shape)[..., :k]
