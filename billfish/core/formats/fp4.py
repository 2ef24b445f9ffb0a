"""FP4: `fp4` with a float16 scale, and the two microscaling formats, `mxfp4` (OCP) and `nvfp4` (NVIDIA).

The microscaling formats are stored row-major, as compressed-tensors and MLX store them:

    packed        uint8 [N, K/2]      byte j holds k = 2j in its low nibble, k = 2j+1 in its high one
    scales        uint8 [N, K/g]      E8M0 (mxfp4, g = 32) or E4M3 (nvfp4, g = 16)
    global_scale  float32 []          nvfp4 only, a multiplier
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.core.elements import FP4, Element
from billfish.core.format import Format, GroupValues, Planes, register
from billfish.core.formats.word_packing import ScaledWordFormat
from billfish.core.scales import E4M3_MAX, decode_e4m3, decode_e8m0
from billfish.core.search import E4m3Times, Search, largest_magnitude, nearest_codes
from billfish.core.storage import Array, Storage, StoragePart

Floats = NDArray[np.float32]

GLOBAL_SCALE = StoragePart("global_scale", (np.dtype(np.float32),))


@register
class Fp4(ScaledWordFormat):
    """E2M1 times a float16 scale."""

    name = "fp4"
    aliases = ("fp4_e2m1",)
    element = FP4
    group_sizes = (16, 32, 64, 128)
    block_size = 8
    layout = "u32 [K/8, N], f16 [K/g, N]"


class MicroscaledFp4(Format):
    """The base of `mxfp4` and `nvfp4`: E2M1 with one byte of scale for each short group."""

    element: Element = FP4

    def parts(self, options: Mapping[str, str]) -> tuple[StoragePart, ...]:
        byte = (np.dtype(np.uint8),)
        return StoragePart("packed", byte, "nk", 2), StoragePart("scales", byte, "nk")

    def pack(self, planes: Planes) -> Storage:
        codes = planes["codes"]
        return {"packed": codes[:, 0::2] | codes[:, 1::2] << 4, "scales": planes["scale"]}

    def unpack_codes(self, storage: Storage) -> Array:
        packed = storage["packed"]
        return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), 2 * packed.shape[1])

    def unpack_scales(self, storage: Storage) -> Planes:
        return {"scale": storage["scales"]}


@register
class Mxfp4(MicroscaledFp4):
    """OCP MX: E2M1 times a power of two."""

    name = "mxfp4"
    scale = "e8m0"
    group_sizes = (32,)
    block_size = 32
    layout = "u8 [N, K/2], u8 [N, K/32]"
    largest_power = 2  # the exponent of the element's largest value
    ties = "toward zero"  # ggml's rule

    def group_values(self, planes: Planes) -> GroupValues:
        return GroupValues(decode_e8m0(planes["scale"]))

    def round_groups(self, w: Floats, **context: Any) -> Planes:
        return self._planes(w, self._floor_code(w))

    def search_groups(self, w: Floats, search: Search, **context: Any) -> list[Planes]:
        # A power of two leaves few choices: a weight just below the next power is clipped to 6/8 of it by the plain
        # rule, which the next scale up would not do; the next one down clips more and rounds finer.
        start = self._floor_code(w)
        return [self._planes(w, np.clip(start + step, 0, 254)) for step in (1, -1)]

    def _floor_code(self, w: Floats) -> NDArray[np.int32]:
        """The rule of OCP MX and of ggml: the largest power of two in the group, over the element's largest."""
        largest = largest_magnitude(w)
        # log2 rounded to float32, as ggml takes it: an ulp below a power of two it already gives that power. By way of
        # float64 it is the same on every machine.
        exponent = np.floor(np.log2(largest.astype(np.float64)).astype(np.float32)) - self.largest_power
        return np.where(largest > 0, np.clip(exponent + 127, 0, 254), 0).astype(np.int32)

    def _planes(self, w: Floats, code: NDArray[np.int32]) -> Planes:
        scale = code.astype(np.uint8)
        element = FP4 if self.ties == "toward zero" else self.element
        codes = nearest_codes(element, w, decode_e8m0(scale), ties=self.ties)
        return {"codes": codes, "scale": scale[:, None]}


@register
class Nvfp4(MicroscaledFp4):
    """NVIDIA's: E2M1 times an E4M3 scale for each 16, times one float32 for the tensor."""

    name = "nvfp4"
    scale = "e4m3 * f32"
    group_sizes = (16,)
    block_size = 16
    layout = "u8 [N, K/2], u8 [N, K/16], f32 []"

    def parts(self, options: Mapping[str, str]) -> tuple[StoragePart, ...]:
        return *super().parts(options), GLOBAL_SCALE

    def pack(self, planes: Planes) -> Storage:
        return {**super().pack(planes), "global_scale": planes["global_scale"]}

    def unpack_scales(self, storage: Storage) -> Planes:
        return {**super().unpack_scales(storage), "global_scale": storage["global_scale"]}

    def group_values(self, planes: Planes) -> GroupValues:
        return GroupValues(decode_e4m3(planes["scale"]) * planes["global_scale"])

    def tensor_planes(self, w: Floats) -> Planes:
        """The global scale that lets the largest weight use the largest E4M3 times the largest E2M1."""
        largest = np.float32(np.abs(w).max())
        scale = largest / np.float32(E4M3_MAX * 6) if largest > 0 else 1
        # Not so small that the quotient of two scales would overflow; weights below that are zero.
        return {"global_scale": np.asarray(max(scale, np.float32(2.0**-120)), np.float32)}

    def round_groups(self, w: Floats, **context: Any) -> Planes:
        return self._planes(w, self._start(w), E4m3Times(context["global_scale"]))

    def search_groups(self, w: Floats, search: Search, **context: Any) -> list[Planes]:
        rule = E4m3Times(context["global_scale"])
        return [self._planes(w, scale, rule) for scale in search.scale(w, FP4, self._start(w), rule)]

    @staticmethod
    def _start(w: Floats) -> Floats:
        return largest_magnitude(w) / np.float32(6)

    @staticmethod
    def _planes(w: Floats, scale: Floats, rule: E4m3Times) -> Planes:
        stored = rule.codes(scale)
        return {"codes": nearest_codes(FP4, w, decode_e4m3(stored) * rule.factor), "scale": stored[:, None]}
