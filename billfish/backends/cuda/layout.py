"""Weights as the CUDA kernels read them: bricks of 16 rows by 128 k, one layout for every M.

A brick holds codes, scales and offsets, each in the order in which the lanes of a warp want them (decode.cuh has the
picture), so the same bytes feed `mma` and `wgmma`. This file says, for each format, which of the few kernel axes it is
made of, and is the model of the layout in NumPy; pack.cu does the same on the GPU.
"""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.elements import E2M1, Integer, Signed, Table
from billfish.errors import DataError, complaint
from billfish.files import replacing
from billfish.format import Format, Planes
from billfish.scales import decode_e4m3
from billfish.tensor import QuantizedTensor

TILE, BRICK = 16, 128  # rows and k of a brick
GROUPS = {128: 1, 64: 2, 32: 4, 16: 8}  # group size -> groups in a brick
OFFSET_LIMIT = 1024.0  # offsets up to this many times the largest scale of their row do not count for its exponent
BYTE_SCALE_RAW = 128  # as in decode.cuh
REVERSED_BYTES = np.array([int(f"{i:08b}"[::-1], 2) for i in range(256)], np.uint8)  # their bits

Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for, in the words of decode.cuh."""

    element: str  # Int4, Int8, E2M1 or Table4
    scale: str  # ScaleF16, ScaleF32, ScaleE5M2 or ScaleE5M3
    offset: str  # NONE, ZERO or MINIMUM
    groups: int  # of scales in a brick: 1, 2, 4 or 8
    middle: int = 0  # what elements are less than codes; not 0 only with an offset
    table: tuple[int, ...] = ()  # of Table4: 16 bytes that mean byte - 128

    @property
    def words(self) -> int:
        """32-bit words of codes for each lane and 16 x 16 tile."""
        return 2 if self.element == "Int8" else 1

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        return np.dtype({"ScaleF16": np.float16, "ScaleF32": np.float32}.get(self.scale, np.uint8))

    @property
    def code_bytes(self) -> int:
        """Of a brick."""
        return 1024 * self.words

    @property
    def group_bytes(self) -> int:
        """Of a brick's scales, or of its offsets, which are of the same type."""
        return TILE * self.groups * self.scale_dtype.itemsize

    @property
    def brick_bytes(self) -> int:
        return self.code_bytes + self.group_bytes * (1 if self.offset == "NONE" else 2)

    def macros(self) -> dict[str, str]:
        """For the compiler."""
        names = {"ELEMENT": self.element, "SCALE": self.scale, "OFFSET": self.offset, "GROUPS": str(self.groups)}
        if self.middle:
            names["MIDDLE"] = str(self.middle)
        if self.table:
            words = np.asarray(self.table, np.uint8).view("<u4")
            names["TABLE"] = ",".join(f"{word:#x}u" for word in words)
        return names


@dataclass(eq=False)
class Description:
    """A tensor in terms of the kernel axes: codes uint8 [N, K]; scales, offsets [N, groups]; row scales float32 [N]."""

    kind: Kind
    codes: Codes
    scales: NDArray[Any]
    offsets: NDArray[Any] | None
    row_scale: Floats


def describe(tensor: QuantizedTensor) -> Description:
    """Which kernel axes a tensor is made of. Nothing is rounded: `dequantize` gives the same bits from these."""
    format, planes = tensor.format, tensor.planes
    k = tensor.shape[1]
    with np.errstate(invalid="ignore", over="ignore"):  # scales of a file may be NaN or infinite
        scale, zero, minimum = format.group_values(planes)
    offset = "ZERO" if zero is not None else "MINIMUM" if minimum is not None else "NONE"
    added = zero if zero is not None else minimum
    size = tensor.group_size
    if size not in GROUPS:  # one group for all of K: its scale once for each brick
        bricks = -(-k // BRICK)
        scale, added = np.repeat(scale, bricks, axis=1), None if added is None else np.repeat(added, bricks, axis=1)
        size = BRICK
    middle = 1 << format.element.bits - 1 if offset != "NONE" else 0
    element, codes, table = _element(format, planes["codes"], middle)
    groups = GROUPS[size]
    bytewise = _byte_scales(format, planes, size)
    if bytewise is not None:
        name, stored, row_scale = bytewise
        if element == "Table4":  # ggml's doubled E2M1 with halved scales; of its two zeros it knows one
            codes = np.where(codes == 8, np.uint8(0), codes)
        return Description(Kind("E2M1", name, "NONE", groups), codes, stored, None, row_scale)
    name, stored, offsets, row_scale = _float_scales(scale, added, offset)
    return Description(Kind(element, name, offset, groups, middle, table), codes, stored, offsets, row_scale)


def _element(format: Format, codes: Codes, middle: int) -> tuple[str, Codes, tuple[int, ...]]:
    element = format.element
    if isinstance(element, E2M1):
        return "E2M1", codes, ()
    if isinstance(element, Table):
        return "Table4", codes, tuple(int(v) + 128 for v in element.values)
    if isinstance(element, Signed):
        return "Int8", codes ^ np.uint8(0x80), ()
    assert isinstance(element, Integer)
    name, center = ("Int4", 8) if element.bits <= 4 else ("Int8", 128)
    return name, codes + np.uint8(center - element.bias - middle), ()


def _byte_scales(format: Format, planes: Planes, size: int) -> tuple[str, NDArray[np.uint8], Floats] | None:
    """Scales that stay one byte, if this format's do and all of them are in range: relative to the largest of their
    row those of E8M0, ScaleE5M2, as they are those of E4M3, ScaleE5M3."""
    codes = planes["scale"]
    if codes.dtype != np.uint8:
        return None
    if format.scale.startswith("e8m0"):
        if codes.max() == 255:
            return None
        # Groups of zeros often have the smallest scale there is. Theirs may be any.
        starts = np.arange(0, planes["codes"].shape[1], size)
        empty = np.maximum.reduceat(planes["codes"] & 7, starts, axis=1) == 0
        largest = np.where(empty, 0, codes).max(axis=1, keepdims=True).astype(np.int32)
        exponent = np.where(empty, 0, codes - largest)
        if exponent.min() < -31:
            return None
        name, dropped = "ScaleE5M2", 8
        scale = np.ldexp(np.float32(1), exponent + 8)
        row_scale = np.ldexp(np.float32(1), largest[:, 0] - 127 - 8)
    else:
        if codes.max() >= 0x7F:
            return None
        scale, row_scale = decode_e4m3(codes), np.full(len(codes), planes["global_scale"], np.float32)
        name, dropped = "ScaleE5M3", 7
    raised = scale * np.float32(BYTE_SCALE_RAW)
    half = raised.astype(np.float16)
    bits = half.view(np.uint16)
    if (half != raised).any() or (bits % (1 << dropped)).any():
        return None
    return name, (bits >> dropped).astype(np.uint8), row_scale


def _float_scales(
    scale: Floats, added: Floats | None, offset: str
) -> tuple[str, NDArray[Any], NDArray[Any] | None, Floats]:
    """Scales (and offsets) relative to a power of two for each row: the largest of a row is from 1 to below 2, so that
    the product of a code and a scale is a good float16 whatever the weights' size. float16 where that is exact."""
    finite = np.isfinite(scale).all() and (added is None or np.isfinite(added).all())
    row_scale = np.ones(len(scale), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if finite:
            largest = np.abs(scale).max(axis=1)
            if added is not None:
                by_offset = np.abs(added * scale if offset == "ZERO" else added).max(axis=1)
                largest = np.maximum(largest, by_offset / np.float32(OFFSET_LIMIT))
            exponent = np.clip(np.frexp(largest)[1] - 1, -126, 127)
            row_scale = np.ldexp(row_scale, np.where(largest > 0, exponent, 0)).astype(np.float32)
            # Where a row spans more powers of two than float32 has below its largest, it stays as it is.
            back = scale / row_scale[:, None] * row_scale[:, None]
            row_scale = np.where((back == scale).all(axis=1), row_scale, np.float32(1))
            if offset == "MINIMUM" and added is not None:
                back = added / row_scale[:, None] * row_scale[:, None]
                row_scale = np.where((back == added).all(axis=1), row_scale, np.float32(1))
        scale = scale / row_scale[:, None]
        if offset == "MINIMUM" and added is not None:
            added = added / row_scale[:, None]
        half = scale.astype(np.float16)
        exact = np.array_equal(half, scale)
        half_added = None
        if added is not None:
            half_added = added.astype(np.float16)
            exact = exact and np.array_equal(half_added, added)
    if finite and exact:
        return "ScaleF16", half, half_added, row_scale
    return "ScaleF32", scale, added, row_scale


# ---- the order of the bytes -----------------------------------------------------------------------------------------


def brick_shape(n: int, k: int) -> tuple[int, int]:
    """How many bricks a matrix [N, K] has, down and along K."""
    return -(-n // TILE), -(-k // BRICK)


def pack_codes(kind: Kind, codes: Codes) -> NDArray[np.uint8]:
    """Codes [N, K] to the code part of every brick: uint8 [tiles, bricks, code_bytes]. What is missing becomes 0."""
    n, k = codes.shape
    down, along = brick_shape(n, k)
    padded = np.zeros((down * TILE, along * BRICK), np.uint32)
    padded[:n, :k] = codes
    # Row = 16 tile + 8 upper + g, and k = 128 brick + 16 step + 8 later + 2 c + odd: see the table in decode.cuh.
    axes = padded.reshape(down, 2, 8, along, 8, 2, 4, 2)
    tile, upper, g, brick, step, later, c, odd = range(8)
    if kind.words == 2:
        # Word `later` has the bytes (upper, odd); a lane's 16 bytes are two steps of two words.
        ordered = axes.transpose(tile, brick, step, g, c, later, upper, odd)
        words = _gather(ordered, [[8 * (2 * u + o) for o in range(2)] for u in range(2)])
        words = words.reshape(down, along, 4, 2, 8, 4, 2).transpose(0, 1, 2, 4, 5, 3, 6)
    else:
        ordered = axes.transpose(tile, brick, step, g, c, later, upper, odd).reshape(down, along, 8, 8, 4, 4, 2)
        if kind.element == "E2M1":
            spread = (ordered & np.uint32(8)) << np.uint32(4) | (ordered & np.uint32(7)) << np.uint32(1)
            halves = _gather(spread.reshape(*spread.shape[:-2], 2, 2, 2), [[8, 24], [0, 16]])
            words = halves[..., 0] | _reversed(halves[..., 1])
        else:
            words = _gather(ordered, [[4 * p + 16 * o for o in range(2)] for p in range(4)])
        words = words.reshape(down, along, 2, 4, 8, 4).transpose(0, 1, 2, 4, 5, 3)  # 16 bytes: four steps
    return np.ascontiguousarray(words).view(np.uint8).reshape(down, along, kind.code_bytes)


def _gather(fields: NDArray[np.uint32], shifts: list[list[int]]) -> NDArray[np.uint32]:
    """Fields [..., i, j], each shifted by shifts[i][j], in one word."""
    shifted = fields << np.asarray(shifts, np.uint32)
    return np.bitwise_or.reduce(np.bitwise_or.reduce(shifted, axis=-1), axis=-1)


def _reversed(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The bits of each word in reverse order."""
    octets = np.ascontiguousarray(words, "<u4")[..., None].view(np.uint8)
    return REVERSED_BYTES[octets[..., ::-1]].view("<u4")[..., 0]


def pack_groups(kind: Kind, values: NDArray[Any], k: int) -> NDArray[np.uint8]:
    """Scales or offsets [N, groups] to their part of every brick: uint8 [tiles, bricks, group_bytes]."""
    n, groups = values.shape
    down, along = brick_shape(n, k)
    padded = np.zeros((down * TILE, along * kind.groups), kind.scale_dtype)
    padded[:n, :groups] = values
    axes = padded.reshape(down, 2, 8, along, kind.groups)  # tile, upper, g, brick, group
    ordered = np.ascontiguousarray(axes.transpose(0, 3, 2, 4, 1))
    if kind.scale == "ScaleE5M3":
        ordered = interleave_e5m3(ordered)
    return ordered.view(np.uint8).reshape(down, along, kind.group_bytes)


def interleave_e5m3(scales: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Scales [..., groups, 2] to words [..., groups / 2]: two halves of each group where float16 has these bits, those
    of the second one rotated by eight bits; see decode.cuh."""
    halves = scales.astype(np.uint32) << np.array([7, 23], np.uint32)
    pairs = halves[..., 0] | halves[..., 1]
    first, second = pairs[..., ::2], pairs[..., 1::2]
    return first | second >> np.uint32(8) | second << np.uint32(24)


def group_parts(description: Description) -> NDArray[np.uint8]:
    """What follows the codes in every brick: uint8 [tiles, bricks, scale (and offset) bytes]."""
    kind, k = description.kind, description.codes.shape[1]
    parts = [pack_groups(kind, description.scales, k)]
    if description.offsets is not None:
        parts.append(pack_groups(kind, description.offsets, k))
    return np.concatenate(parts, axis=2)


def pack(description: Description) -> NDArray[np.uint8]:
    """All bricks, one after the other: those of eight tiles of rows, then k, then the next eight tiles (or fewer)."""
    bricks = np.concatenate([pack_codes(description.kind, description.codes), group_parts(description)], axis=2)
    blocks = [bricks[i : i + 8].transpose(1, 0, 2).ravel() for i in range(0, len(bricks), 8)]
    return np.concatenate(blocks)


LAYOUT = 4  # of saved bricks; changes with the meaning of their bytes


@dataclass(frozen=True, eq=False)
class PackedBricks:
    """Weights packed on the CPU: to save, and to load on a GPU without the tensor they were made of."""

    kind: Kind
    shape: tuple[int, int]
    bricks: NDArray[np.uint8]
    row_scale: Floats

    @classmethod
    def of(cls, tensor: QuantizedTensor) -> PackedBricks:
        description = describe(tensor)
        return cls(description.kind, tensor.shape, pack(description), description.row_scale)

    def save(self, path: str | os.PathLike[str]) -> None:
        """As an .npz file, written whole or not at all."""
        about = json.dumps({**asdict(self.kind), "shape": self.shape, "layout": LAYOUT})
        with replacing(path) as file:
            np.savez(file, about=np.asarray(about), bricks=self.bricks, row_scale=self.row_scale)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PackedBricks:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                about = json.loads(str(arrays["about"]))
                if about.pop("layout", 1) != LAYOUT:
                    raise ValueError("of another version: pack the tensor again")
                (n, k), table = about.pop("shape"), tuple(about.pop("table"))
                packed = cls(Kind(**about, table=table), (n, k), arrays["bricks"], arrays["row_scale"])
        except (KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
            got = f"{os.fspath(path)!r} ({error})"
            raise DataError(complaint("load", "path", got, "a file that PackedBricks.save wrote")) from None
        down, along = brick_shape(n, k)
        if packed.bricks.nbytes != down * along * packed.kind.brick_bytes or packed.row_scale.shape != (n,):
            got = f"{packed.bricks.nbytes} bytes of bricks for [{n}, {k}]"
            raise DataError(complaint("load", "path", got, f"{down * along * packed.kind.brick_bytes}"))
        return packed
