"""bitsandbytes' NF4: 16 levels for Gaussian weights, times the largest magnitude of a group. Row-major:

    packed  uint8 [N, K/2]           byte j holds k = 2j in its high nibble, k = 2j+1 in its low one
    scales  float32 [N, ceil(K/g)]   bitsandbytes' `absmax`

Double quantization stores `absmax` in 8 bits. It is brought to float32 when a checkpoint is read, as bitsandbytes does
before it multiplies: the 256 blocks that then share a float32 follow each other across rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from billfish.core.elements import NF4
from billfish.core.format import Planes, register
from billfish.core.formats.fp8 import FloatScaled
from billfish.core.storage import Array, Storage, StoragePart


@register
class Nf4(FloatScaled):
    name = "nf4"
    element = NF4
    scale = "f32"
    group_sizes = (64, 128, 256, 512, 1024)
    block_size = 8
    layout = "u8 [N, K/2], f32 [N, K/g]"

    def parts(self, options: Mapping[str, str]) -> tuple[StoragePart, ...]:
        return StoragePart("packed", (np.dtype(np.uint8),), "nk", 2), StoragePart(
            "scales", (np.dtype(np.float32),), "nk"
        )

    def pack(self, planes: Planes) -> Storage:
        codes = planes["codes"]
        return {"packed": codes[:, 0::2] << 4 | codes[:, 1::2], "scales": planes["scale"]}

    def unpack_codes(self, storage: Storage) -> Array:
        packed = storage["packed"]
        return np.stack([packed >> 4, packed & 15], axis=-1).reshape(len(packed), 2 * packed.shape[1])

    def unpack_scales(self, storage: Storage) -> Planes:
        return {"scale": storage["scales"]}
