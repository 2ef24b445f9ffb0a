"""The bit tricks that turn packed codes into floats inside registers, in NumPy, one function each.

Kernels of all backends use these; here they are slow, exact and explained. A word is a uint32 (array), looked at as two
16-bit lanes, or a uint16, which is one. Results are float16 (or bfloat16) with one more axis, the low lane first.

Layout of a float16: s eeeee mmmmmmmmmm, exponent bias 15. Of a bfloat16: s eeeeeeee mmmmmmm, bias 127.
`skip_flop=True` leaves out the arithmetic at the end, which a kernel can fold into something it does anyway.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from billfish.core.errors import DataError, DTypeError, bad_argument

Words = Any  # uint32 arrays, or a recording word of billfish.cli.explain
Halves = NDArray[np.float16]


def words(q: Words) -> Words:
    """Words as they come, or an error; plain integers are taken as uint32."""
    if hasattr(q, "as_lanes"):
        return q
    q = np.asarray(q, np.uint32) if isinstance(q, int) else np.asarray(q)
    if q.dtype not in (np.uint32, np.uint16):
        raise DTypeError(bad_argument("bits", "words.dtype", q.dtype, "uint32, or uint16 for a single lane"))
    return q


def both(lane: int, q: Words) -> int:
    """A 16-bit constant for every lane of q: 0x8000 becomes 0x80008000."""
    return lane if getattr(q, "dtype", None) == np.uint16 else lane * 0x00010001


def lanes(q: Words, dtype: Any = np.float16) -> Any:
    """The same bits as 16-bit floats: [...] -> [..., 2]."""
    if hasattr(q, "as_lanes"):
        return q.as_lanes(dtype)
    return np.array(q)[..., None].view(dtype)


def half(pattern: int) -> np.float16:
    """The float16 with these 16 bits."""
    return np.uint16(pattern).view(np.float16)


def bfloat(pattern: int) -> Any:
    """The bfloat16 with these 16 bits."""
    return np.uint16(pattern).view(ml_dtypes.bfloat16)


def lop3(a: Words, b: Words, c: Words, lut: int) -> Words:
    """NVIDIA's lop3.b32: any logic function of three inputs, given by its truth table.

    Bit i of `lut` is the result where the input bits are a = bit 2, b = bit 1, c = bit 0 of i. So the table of an
    expression is that expression applied to 0xf0, 0xcc and 0xaa: (0xf0 & 0xcc) | 0xaa = 0xea means (a & b) | c.
    """
    a, b, c = np.broadcast_arrays(words(a), words(b), words(c))
    if not 0 <= lut <= 255:
        raise DataError(bad_argument("lop3", "lut", lut, "a truth table from 0 to 255"))
    result = np.zeros_like(a)
    for i in range(8):
        if lut >> i & 1:
            result = result | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    return result


def decode_table(codes: NDArray[np.uint8], table: NDArray[np.float32], scale: Any = None) -> Halves:
    """What the tricks are compared with: look each code up, multiply by its scale in float32, round once."""
    values = table[codes]
    return values.astype(np.float16) if scale is None else scaled(values, scale)


def scaled(values: Any, scale: Any) -> Halves:
    """values * scale, in float32 and rounded once to half: overflow is infinity, as in a kernel, and no warning."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (values.astype(np.float32) * np.asarray(scale, np.float32)).astype(np.float16)


# ---- FP4 (E2M1) -----------------------------------------------------------------------------------------------


def dequant_fp4_scalar(code: NDArray[np.uint8], scale: Halves) -> Halves:
    """One code at a time, field by field: s ee m, exponent bias 1, and exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3 & 1, code >> 1 & 3, (code & 1).astype(np.float16)
    subnormal = mantissa * np.float16(0.5)
    normal = np.ldexp(np.float16(1) + mantissa * np.float16(0.5), exponent.astype(np.int32) - 1)
    value = np.where(exponent == 0, subnormal, normal)
    return scaled(np.where(sign == 1, -value, value), scale)


def dequant_fp4_pair(q: Words, skip_flop: bool = False) -> Any:
    """Two codes, each in bits 15..12 of its lane; whatever lies below them is ignored.

    The sign is in place already. E2M1's exponent has 2 bits and float16's has 5, so moving e and m down by 3 puts them
    side by side at the low end of the exponent and the high end of the mantissa:

        s ee m xxxxxxxxxxxx  ->  s 000ee m000000000

    That reads with bias 15 where bias 1 was meant, so it is 2^14 too small: multiply. Code 1 (0.5) goes through the
    subnormal 0x0200 = 2^-15, which is right only where the device does not flush subnormals.
    """
    q = words(q)
    raw = lanes((q & both(0x8000, q)) | ((q & both(0x7000, q)) >> 3))
    return raw if skip_flop else raw * np.float16(2**14)


def dequant_fp8_pair(q: Words, skip_flop: bool = False) -> Any:
    """Two codes of E4M3, each in bits 15..8 of its lane; whatever lies below them is ignored.

    As for E2M1: four exponent bits against five make a shift of 1, bias 7 against 15 a factor of 2^8. The two codes
    that are NaN read as 480, the number that E4M3 gave up for them.
    """
    q = words(q)
    raw = lanes((q & both(0x8000, q)) | ((q & both(0x7F00, q)) >> 1))
    return raw if skip_flop else raw * np.float16(2**8)


def dequant_fp4_x8(word: Words, scale: Halves) -> Halves:
    """All eight codes of a word, in order of k, times a scale: [...] -> [..., 8].

    A shift left by 12 - 4j brings codes j and j + 4 to the tops of the two lanes. 2^14 comes before the scale: folded
    into it, a scale of 4 would already overflow.
    """
    word = words(word)
    pairs = [dequant_fp4_pair(word << shift) for shift in (12, 8, 4, 0)]
    return scaled(_in_order(pairs), np.asarray(scale)[..., None])


def _in_order(pairs: list[Any]) -> Any:
    """Pairs (j, j + 4), or (j, j + 2) for bytes, to one axis in order of k."""
    stacked = np.stack(pairs, axis=-1)
    return stacked.reshape(*stacked.shape[:-2], -1)


# ---- integers: the magic number ---------------------------------------------------------------------------------
#
# 1024 = 2^10 is 0x6400 in float16, and there the last mantissa bit is worth exactly 1. So OR-ing an integer
# n < 1024 into the mantissa gives the float 1024 + n, with no conversion; one subtraction leaves n.


def dequant_integer_pair(q: Words, bits: int, bias: int = 0, skip_flop: bool = False) -> Any:
    """The codes in the low `bits` (at most 10) of each lane, minus `bias`.

    Raw, they are 1024 + n. The constant to subtract, 1024 + bias, is made by the same trick: 0x6400 | bias.
    """
    q = words(q)
    raw = lanes((q & both(2**bits - 1, q)) | both(0x6400, q))
    return raw if skip_flop else raw - half(0x6400 | bias)


def dequant_u4b8_lo(q: Words, skip_flop: bool = False) -> Any:
    """The codes in bits 3..0 of each lane, minus 8: masks 0x000f000f, subtracts 0x6408 = 1024 + 8."""
    return dequant_integer_pair(q, 4, 8, skip_flop)


def dequant_u4b8_hi(q: Words, skip_flop: bool = False) -> Any:
    """The codes in bits 7..4 of each lane, minus 8.

    Left where they are, they make 1024 + 16n. One fused multiply-add undoes that without a shift: times 1/16 (0x2c00)
    gives 64 + n, and adding -72 (0xd480) gives n - 8. Raw, they are shifted down instead, so that lo and hi carry the
    same offset for the kernel to fold.
    """
    q = words(q)
    if skip_flop:
        return dequant_u4b8_lo(q >> 4, skip_flop=True)
    return multiply_add(lanes((q & both(0x00F0, q)) | both(0x6400, q)), half(0x2C00), half(0xD480))


def dequant_u4_lo(q: Words, skip_flop: bool = False) -> Any:
    """As dequant_u4b8_lo, for codes 0..15 without the offset: subtracts 0x6400 = 1024."""
    return dequant_integer_pair(q, 4, 0, skip_flop)


def dequant_u4_hi(q: Words, skip_flop: bool = False) -> Any:
    """As dequant_u4b8_hi, without the offset: (1024 + 16n) / 16 - 64, and -64 is 0xd400."""
    q = words(q)
    if skip_flop:
        return dequant_u4_lo(q >> 4, skip_flop=True)
    return multiply_add(lanes((q & both(0x00F0, q)) | both(0x6400, q)), half(0x2C00), half(0xD400))


def multiply_add(a: Any, b: np.float16, c: np.float16) -> Any:
    """a * b + c, rounded once to float16: the product of two halves is exact in float32."""
    if hasattr(a, "as_lanes"):
        return a.multiply_add(b, c)
    return (a.astype(np.float32) * np.float32(b) + np.float32(c)).astype(np.float16)


def dequant_u4x8(word: Words, scale: Halves, zero: Halves) -> Halves:
    """All eight codes of a word, (n - zero) * scale: [...] -> [..., 8].

    n is exact as a half, but a fractional zero is taken away in float32: in half, a compiler may regroup
    (1024 + n) - 1024 - zero to (1024 + n) - (1024 + zero), and 1024 + 5.5 is not a half.
    """
    word = words(word)
    n = _in_order([dequant_u4_lo(word >> shift) for shift in (0, 4, 8, 12)])
    with np.errstate(invalid="ignore"):
        centred = n.astype(np.float32) - np.asarray(zero, np.float32)[..., None]
    return scaled(centred, np.asarray(scale)[..., None])


def dequant_s4x8(word: Words, scale: Halves, zero: Halves) -> Halves:
    """Signed codes, stored with 8 added: both offsets at once, (n - (8 + zero)) * scale."""
    with np.errstate(invalid="ignore"):
        combined = np.asarray(zero, np.float32) + np.float32(8)
    return dequant_u4x8(word, scale, combined)


def dequant_u8b128_pair(q: Words, skip_flop: bool = False) -> Any:
    """The bytes in bits 7..0 of each lane, minus 128: subtracts 0x6480 = 1024 + 128."""
    return dequant_integer_pair(q, 8, 128, skip_flop)


def dequant_s8_pair(q: Words) -> Any:
    """Two's complement bytes. Adding 128 modulo 256 is flipping the top bit, and makes them unsigned."""
    q = words(q)
    return dequant_u8b128_pair(q ^ both(0x8080, q))


def dequant_u8b128_x4(word: Words) -> Halves:
    """All four bytes of a word, each minus 128: [...] -> [..., 4]."""
    word = words(word)
    return _in_order([dequant_u8b128_pair(word >> shift) for shift in (0, 8)])


def dequant_s8_x4(word: Words) -> Halves:
    """Four two's complement bytes of a word: [...] -> [..., 4]."""
    word = words(word)
    return _in_order([dequant_s8_pair(word >> shift) for shift in (0, 8)])


# ---- bfloat16 ---------------------------------------------------------------------------------------------------
#
# Seven mantissa bits still have room for the magic number: 128 = 2^7 is 0x4300, and n < 128 can be OR-ed in. A high
# nibble left in place would reach into the exponent, so it is shifted down first.


def dequant_fp4_pair_bf16(q: Words, skip_flop: bool = False) -> Any:
    """As dequant_fp4_pair: 8 exponent bits against 2 make a shift of 6, bias 127 against 1 a factor of 2^126."""
    q = words(q)
    raw = lanes((q & both(0x8000, q)) | ((q & both(0x7000, q)) >> 6), ml_dtypes.bfloat16)
    return raw if skip_flop else raw * bfloat(0x7E80)


def dequant_u4b8_lo_bf16(q: Words, skip_flop: bool = False) -> Any:
    """128 + n, minus 136 (0x4308)."""
    q = words(q)
    raw = lanes((q & both(0x000F, q)) | both(0x4300, q), ml_dtypes.bfloat16)
    return raw if skip_flop else raw - bfloat(0x4308)


def dequant_u4b8_hi_bf16(q: Words, skip_flop: bool = False) -> Any:
    """The high nibble, shifted down first."""
    return dequant_u4b8_lo_bf16(words(q) >> 4, skip_flop)


def dequant_u4_lo_bf16(q: Words, skip_flop: bool = False) -> Any:
    """128 + n, minus 128 (0x4300)."""
    q = words(q)
    raw = lanes((q & both(0x000F, q)) | both(0x4300, q), ml_dtypes.bfloat16)
    return raw if skip_flop else raw - bfloat(0x4300)


def dequant_u4_hi_bf16(q: Words, skip_flop: bool = False) -> Any:
    """The high nibble, shifted down first."""
    return dequant_u4_lo_bf16(words(q) >> 4, skip_flop)


def dequant_u8b128_x4_bf16(word: Words) -> Any:
    """Four bytes minus 128, as bfloat16: [...] -> [..., 4].

    A byte does not fit beside 128, so it takes the detour over float32, where 2^23 is 0x4b000000 and the last bit is
    worth 1: OR the byte in, subtract 2^23 + 128. The result has at most 8 significant bits, so bfloat16 holds it.
    """
    word = words(word)
    shifts = np.arange(0, 8 * word.dtype.itemsize, 8, dtype=word.dtype)
    raw = ((word[..., None] >> shifts & 0xFF).astype(np.uint32) | 0x4B000000).view(np.float32)
    return (raw - np.float32(2**23 + 128)).astype(ml_dtypes.bfloat16)
