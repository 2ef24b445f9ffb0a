"""The second axis of a format: how a group's scale is stored.

Plain float16 and float32 need no help from us. The two 8-bit kinds are decoded and encoded here, for every byte,
with ml_dtypes as the outside oracle; so are ggml's own readings of the same bytes, which differ at the edges.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

E4M3_MAX = 448.0


def decode_e8m0(codes: Bytes) -> Floats:
    """E8M0, a bare exponent: 2^(code - 127); 255 is NaN."""
    power = (codes.astype(np.uint32) << np.uint32(23)).view(np.float32)
    power = np.where(codes == 0, np.float32(2.0**-127), power)  # a float32 subnormal
    return np.where(codes == 255, np.float32(np.nan), power)


def encode_e8m0(x: Any) -> Bytes:
    """The nearest power of two, ties up; what has none (zero, negative, infinite, NaN) becomes 255."""
    x = np.asarray(x, np.float32)
    mantissa, exponent = np.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    code = exponent + np.where(mantissa >= 0.75, 127, 126)
    valid = np.isfinite(x) & (x > 0) & (code <= 254)
    return np.where(valid, np.maximum(code, 0), 255).astype(np.uint8)


def decode_e4m3(codes: Bytes) -> Floats:
    """E4M3 (the `fn` kind): sign, exponent bias 7, three mantissa bits, no infinity; 0x7f and 0xff are NaN."""
    exponent = (codes >> 3 & 15).astype(np.int32)
    mantissa = (codes & 7).astype(np.float32)
    subnormal = np.ldexp(mantissa, -9)
    normal = np.ldexp(mantissa + 8, exponent - 10)
    magnitude = np.where(exponent == 0, subnormal, normal)
    magnitude = np.where(codes & 0x7F == 0x7F, np.float32(np.nan), magnitude)
    return np.where(codes >= 128, -magnitude, magnitude).astype(np.float32)


def encode_e4m3(x: Floats) -> Bytes:
    """The nearest E4M3, ties to even; beyond 464, the middle between 448 and the missing 480, it is NaN."""
    magnitude = np.abs(x)
    with np.errstate(invalid="ignore", over="ignore"):
        # Three mantissa bits mean steps of 2^(e-3), and no smaller than the subnormals' 2^-9. The same anchor
        # trick as in elements.E2M1: a float32 of size 2^(e+20) has that step.
        power = np.maximum(magnitude, np.float32(2.0**-6)).view(np.uint32) & np.uint32(0x7F800000)
        anchor = power.view(np.float32) * np.float32(2**20)
        rounded = (magnitude + anchor) - anchor
    # Exponent and mantissa are adjacent in float32 too; only the bias (127, not 7) and the subnormals differ.
    normal = (rounded.view(np.uint32) >> np.uint32(20)).astype(np.int32) - (120 << 3)
    code = np.where(rounded < 2.0**-6, rounded * np.float32(512), normal)
    code = np.where(rounded <= E4M3_MAX, code, 0x7F).astype(np.uint8)  # NaN compares false
    return code | np.where(np.signbit(x), np.uint8(0x80), np.uint8(0))


def decode_e8m0_half(codes: Bytes) -> Floats:
    """ggml's E8M0, halved for elements that are doubled: 2^(code - 128). 255 is a number to ggml, 2^127."""
    power = ((codes.astype(np.uint32) - np.uint32(1)) << np.uint32(23)).view(np.float32)
    subnormal = np.ldexp(np.float32(2.0**-128), codes.astype(np.int32) & 1)
    return np.where(codes < 2, subnormal, power)


def decode_ue4m3_half(codes: Bytes) -> Floats:
    """ggml's unsigned E4M3, halved: the sign bit is ignored, and 0x7f is zero; 0xff is 240."""
    magnitude = decode_e4m3(codes & np.uint8(0x7F))
    magnitude = np.where(codes & 0x7F == 0x7F, np.float32(480), magnitude)
    return np.where(codes == 0x7F, np.float32(0), magnitude * np.float32(0.5))
