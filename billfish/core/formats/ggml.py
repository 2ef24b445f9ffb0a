"""The blocks of ggml, as GGUF files hold them: `q4_0` to `q8_1`, `iq4_nl`, and GGUF's own FP4 blocks.

A block is a C struct, so each class gives it as a NumPy structured type; most need no more than that. Codes narrower
than a byte are split-half: element j < 16 of a block is the low nibble of qs[j], element j + 16 the high one, and bit
i of qh is the fifth bit of element i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.core.elements import E2M1X2, IQ4NL, S8, U4, U4B8, U5, U5B16, Element, Integer
from billfish.core.format import Format, GroupValues, Planes, register
from billfish.core.formats.fp4 import GLOBAL_SCALE, Mxfp4, Nvfp4
from billfish.core.scales import decode_e8m0_half, decode_ue4m3_half
from billfish.core.search import (
    Search,
    Separately,
    extremes,
    float16_scale,
    largest_magnitude,
    nearest_codes,
    signed_extreme,
)
from billfish.core.storage import Array, Storage, StoragePart

Floats = NDArray[np.float32]


def unfold(packed: Array, width: int, bits: int) -> Array:
    """Bytes [..., B] to their fields [..., B * 8 / bits]: of each run of `width` bytes, first all lowest fields, then
    all second ones, and so on. With bits = 4 that is ggml's split-half order."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    *leading, count = packed.shape
    runs = packed.reshape(*leading, count // width, 1, width)
    return (runs >> shifts[:, None] & np.uint8(2**bits - 1)).reshape(*leading, count * len(shifts))


def fold(fields: Array, width: int, bits: int) -> Array:
    """The inverse of :func:`unfold`; only the low `bits` of each field count."""
    per_byte = 8 // bits
    *leading, count = fields.shape
    # Several bytes at a time, as no bit leaves its byte.
    word = np.dtype(f"<u{math.gcd(width, 8)}")
    runs = fields.reshape(*leading, count // (per_byte * width), per_byte, width).view(word)
    mask = np.frombuffer(bytes([2**bits - 1]) * word.itemsize, word)[0]
    folded = runs[..., 0, :] & mask
    for i in range(1, per_byte):
        folded |= (runs[..., i, :] & mask) << word.type(i * bits)
    return np.ascontiguousarray(folded).view(np.uint8).reshape(*leading, count // per_byte)


class BlockFormat(Format):
    """The base of all ggml formats: storage is {"blocks": uint8 [N, K / block_size * bytes of a block]}."""

    scale = "f16"
    group_sizes = (32,)
    block_size = 32
    struct: np.dtype[Any]
    fields = {"d": "scale"}  # which field of the struct is which plane
    # The fields that hold the bits of the codes, lowest first: (field, run of bytes, bits); see unfold().
    code_fields: tuple[tuple[str, int, int], ...] = (("qs", 16, 4),)

    def __init_subclass__(cls) -> None:
        if "struct" in cls.__dict__:
            cls.layout = f"{cls.struct.itemsize} B: {describe_struct(cls.struct)}"

    def parts(self, options: Mapping[str, str]) -> tuple[StoragePart, ...]:
        return (StoragePart("blocks", (np.dtype(np.uint8),), "nk", self.block_size, self.struct.itemsize),)

    def read_codes(self, blocks: Array) -> Array:
        """Struct blocks [N, B] to codes [N, B, block_size]."""
        codes, at = np.zeros((*blocks.shape, self.block_size), np.uint8), 0
        for field, width, bits in self.code_fields:
            codes |= unfold(blocks[field], width, bits) << np.uint8(at)
            at += bits
        return codes

    def write_codes(self, codes: Array, blocks: Array) -> None:
        """The inverse: codes [N, B, block_size] into the fields of struct blocks [N, B]."""
        at = 0
        for field, width, bits in self.code_fields:
            blocks[field] = fold(codes >> np.uint8(at), width, bits)
            at += bits

    def read_scales(self, blocks: Array) -> Planes:
        """Struct blocks [N, B] to the planes beside the codes, [N, B, ...]; the caller flattens what is left."""
        return {plane: blocks[field] for field, plane in self.fields.items()}

    def write_scales(self, planes: Planes, blocks: Array) -> None:
        """The inverse: planes [N, B, items in a block] into the fields of struct blocks [N, B]."""
        for field, plane in self.fields.items():
            blocks[field] = planes[plane].reshape(blocks[field].shape)

    def pack(self, planes: Planes) -> Storage:
        n, k = planes["codes"].shape
        blocks = np.zeros((n, k // self.block_size), self.struct)
        per_block = {name: p.reshape(*blocks.shape, -1) for name, p in planes.items() if p.ndim}
        self.write_codes(per_block["codes"], blocks)
        self.write_scales(per_block, blocks)
        return {"blocks": blocks.view(np.uint8)}

    def unpack_codes(self, storage: Storage) -> Array:
        return flat_rows(self.read_codes(self._structs(storage)))

    def unpack_scales(self, storage: Storage) -> Planes:
        return {name: flat_rows(plane) for name, plane in self.read_scales(self._structs(storage)).items()}

    def _structs(self, storage: Storage) -> Array:
        return np.ascontiguousarray(storage["blocks"]).view(self.struct)

    def quantization_run(self, group_size: int) -> int:
        return self.block_size


def flat_rows(plane: Array) -> Array:
    """[N, ...] to a contiguous [N, everything else]."""
    return np.ascontiguousarray(plane).reshape(len(plane), math.prod(plane.shape[1:]))


def describe_struct(struct: np.dtype[Any]) -> str:
    """The fields of a block in one line, such as ``d f16, qs u8[16]``."""
    names = {"f2": "f16", "u1": "u8", "i1": "i8"}
    fields = []
    for name in struct.names or ():
        field = struct[name]
        extent = "".join(f"[{n}]" for n in field.shape)
        fields.append(f"{name} {names[field.base.str[1:]]}{extent}")
    return ", ".join(fields)


def ggml_ties(element: Element) -> str:
    """Between two integers ties go up, as ggml's do; other elements have a rule."""
    return "up" if isinstance(element, Integer) else "even"


class ScaledBlock(BlockFormat):
    """element[code] * d."""

    @property
    def plain_ties(self) -> str:
        """How plain rounding breaks ties."""
        return ggml_ties(self.element)

    def group_values(self, planes: Planes) -> GroupValues:
        return GroupValues(planes["scale"].astype(np.float32))

    def search_groups(self, w: Floats, search: Search, **context: Any) -> list[Planes]:
        scales = search.scale(w, self.element, self._scale(w), float16_scale)
        return [
            {
                "codes": nearest_codes(self.element, w, scale),
                "scale": scale.astype(np.float16)[:, None],
            }
            for scale in scales
        ]

    def _scale(self, w: Floats) -> Floats:
        """ggml's: the weight of largest magnitude, sign and all, becomes the least value of the element."""
        return signed_extreme(w) / np.float32(self.element.low)

    def round_groups(self, w: Floats, **context: Any) -> Planes:
        # The codes follow the scale before it is rounded to float16: bit for bit what ggml does.
        scale = self._scale(w)
        codes = nearest_codes(self.element, w, scale, ties=self.plain_ties)
        return {"codes": codes, "scale": scale.astype(np.float16)[:, None]}


class MinimumBlock(BlockFormat):
    """code * d + m."""

    offset = "minimum, f16"
    fields = {"d": "scale", "m": "minimum"}

    def group_values(self, planes: Planes) -> GroupValues:
        return GroupValues(planes["scale"].astype(np.float32), minimum=planes["minimum"].astype(np.float32))

    def _range(self, w: Floats) -> tuple[Floats, Floats]:
        low, high = extremes(w)
        return (high - low) / np.float32(self.element.high), low

    def round_groups(self, w: Floats, **context: Any) -> Planes:
        scale, minimum = self._range(w)
        return {
            "codes": nearest_codes(self.element, w, scale, minimum, ties=ggml_ties(self.element)),
            "scale": scale.astype(np.float16)[:, None],
            "minimum": minimum.astype(np.float16)[:, None],
        }

    def search_groups(self, w: Floats, search: Search, **context: Any) -> list[Planes]:
        halves = Separately(float16_scale, float16_scale)
        found = search.scale_and_minimum(w, self.element, *self._range(w), halves)
        return [
            {
                "codes": nearest_codes(self.element, w, scale, minimum),
                "scale": scale.astype(np.float16)[:, None],
                "minimum": minimum.astype(np.float16)[:, None],
            }
            for scale, minimum in found
        ]


@register
class Q4_0(ScaledBlock):
    name = "q4_0"
    gguf = "Q4_0"
    element = U4B8
    struct = np.dtype([("d", "<f2"), ("qs", "u1", 16)])


@register
class Q4_1(MinimumBlock):
    name = "q4_1"
    gguf = "Q4_1"
    element = U4
    struct = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])


@register
class Q5_0(ScaledBlock):
    name = "q5_0"
    gguf = "Q5_0"
    element = U5B16
    struct = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
    code_fields = (("qs", 16, 4), ("qh", 1, 1))


@register
class Q5_1(MinimumBlock):
    name = "q5_1"
    gguf = "Q5_1"
    element = U5
    struct = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
    code_fields = (("qs", 16, 4), ("qh", 1, 1))


@register
class Q8_0(ScaledBlock):
    name = "q8_0"
    gguf = "Q8_0"
    element = S8
    struct = np.dtype([("d", "<f2"), ("qs", "u1", 32)])
    code_fields = (("qs", 1, 8),)

    plain_ties = "away"

    def _scale(self, w: Floats) -> Floats:
        return largest_magnitude(w) / np.float32(127)


@register
class Q8_1(Q8_0):
    """q8_0 with s = d * sum(q) beside it, which spares a kernel that multiplies with q4_1 a pass over the codes."""

    name = "q8_1"
    struct = np.dtype([("d", "<f2"), ("s", "<f2"), ("qs", "u1", 32)])
    fields = {"d": "scale", "s": "sum"}

    def round_groups(self, w: Floats, **context: Any) -> Planes:
        # The sum takes d before it is rounded to float16, as in ggml.
        return self._with_sum(super().round_groups(w), self._scale(w))

    def search_groups(self, w: Floats, search: Search, **context: Any) -> list[Planes]:
        found = super().search_groups(w, search)
        return [self._with_sum(planes, planes["scale"][:, 0].astype(np.float32)) for planes in found]

    def with_codes(self, planes: Planes, codes: Array) -> Planes:
        blocks = {"codes": codes.reshape(-1, self.block_size)}
        sums = self._with_sum(blocks, planes["scale"].reshape(-1).astype(np.float32))["sum"]
        return {**planes, "codes": codes, "sum": sums.reshape(planes["sum"].shape)}

    @staticmethod
    def _with_sum(planes: Planes, scale: Floats) -> Planes:
        total = planes["codes"].view(np.int8).sum(axis=1, dtype=np.int32)
        # Decoding does not need the sum, so it saturates where ggml's would be infinite.
        sums = np.clip(scale * total.astype(np.float32), -65504, 65504)
        return {**planes, "sum": sums.astype(np.float16)[:, None]}


@register
class Iq4Nl(ScaledBlock):
    """Non-linear levels, a table of 16."""

    name = "iq4_nl"
    gguf = "IQ4_NL"
    element = IQ4NL
    struct = Q4_0.struct


# The next two take how they are stored from BlockFormat, which comes first, and how they are quantized from OCP's and
# NVIDIA's format. What they say themselves is how ggml reads the bytes.


@register
class Mxfp4Gguf(BlockFormat, Mxfp4):
    """mxfp4 as GGUF stores it and ggml reads it: one zero only, and scale byte 255 is a number."""

    name = "mxfp4_gguf"
    gguf = "MXFP4"
    element = E2M1X2
    scale = "e8m0"
    struct = np.dtype([("e", "u1"), ("qs", "u1", 16)])
    fields = {"e": "scale"}

    def group_values(self, planes: Planes) -> GroupValues:
        return GroupValues(decode_e8m0_half(planes["scale"]))


@register
class Nvfp4Gguf(BlockFormat, Nvfp4):
    """nvfp4 as GGUF stores it, 64 weights to a block: one zero only, unsigned scales, the global scale apart."""

    name = "nvfp4_gguf"
    gguf = "NVFP4"
    element = E2M1X2
    scale = "ue4m3 * f32"
    group_sizes = (16,)
    block_size = 64
    struct = np.dtype([("d", "u1", 4), ("qs", "u1", 32)])
    code_fields = (("qs", 8, 4),)

    def group_values(self, planes: Planes) -> GroupValues:
        return GroupValues(decode_ue4m3_half(planes["scale"]) * planes["global_scale"])

    def quantization_run(self, group_size: int) -> int:
        return group_size

    def parts(self, options: Mapping[str, str]) -> tuple[StoragePart, ...]:
        return *BlockFormat.parts(self, options), GLOBAL_SCALE

    def pack(self, planes: Planes) -> Storage:
        return {**BlockFormat.pack(self, planes), "global_scale": planes["global_scale"]}

    def unpack_scales(self, storage: Storage) -> Planes:
        return {**BlockFormat.unpack_scales(self, storage), "global_scale": storage["global_scale"]}
