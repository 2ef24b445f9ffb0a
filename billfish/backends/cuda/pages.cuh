// The KV cache: pages of 64 positions. A layer's part of a page is [keys, values][kv_heads] tiles, from `offset` bytes on. A tile is [64][WIDE] 16-bit
// numbers; where FP8 is 1, it is [64][WIDE] E4M3 codes with a float32 scale for each position behind them.
//
// WIDE is HEAD, the numbers of a head, rounded up to a multiple of 64. The 16 bytes j of position p are at j ^ (p % 8), or at j ^ (p / 2 % 4) where a row
// has an odd multiple of 64 bytes. So a copy of a tile as it lies has eight rows in different banks of shared memory.
//
// A scale is the smallest power of two that is at least 1 / 448 of the largest magnitude, so scaling changes no bit of a mantissa. It is a position's own: one for a whole
// page would rise with later positions, which would change the codes of earlier ones.
#pragma once
#include "device.cuh"

constexpr int PAGE = 64, WIDE = (HEAD + 63) / 64 * 64, BYTES = FP8 ? 1 : 2, ROW_BYTES = WIDE * BYTES, ROWS_BYTES = PAGE * ROW_BYTES;
constexpr int TILE_BYTES = ROWS_BYTES + (FP8 ? PAGE * 4 : 0), IN_SIXTEEN = 16 / BYTES;  // numbers in 16 bytes

// What is exclusive-or'ed to the number of 16 bytes of row p.
DEVICE int swizzle(int p) { return ROW_BYTES % 128 ? p >> 1 & 3 : p & 7; }
// Where number i of row p is in a tile.
DEVICE u32 in_tile(int p, int i) { return p * ROW_BYTES + ((i / IN_SIXTEEN ^ swizzle(p)) << 4) + i % IN_SIXTEEN * BYTES; }
// The tile of one head, of keys (0) or values (1), in a page.
DEVICE u64 tile_at(u64 page, int offset, int values, int kv_heads, int head) { return page + offset + (size_t)(values * kv_heads + head) * TILE_BYTES; }

#if FP8
static_assert(TYPE::is_half, "E4M3 becomes float16");

// The scale of numbers up to `largest`, and 1 / scale. Scales have float16's range, as values are multiplied with them in float16.
DEVICE float2 power_of_two_scale(float largest) {
  const u32 exponent = max((__float_as_uint(largest) + 0x1fffff) >> 23, 127u - 24 + 8) - 8;  // the carry is for mantissas above 1.75 = 448 / 256
  return make_float2(__uint_as_float(exponent << 23), __uint_as_float((254 - exponent) << 23));
}
// 61440 is the largest multiple of a code's step that float16 has. NaN stays.
DEVICE float within_codes(float v) { return v > 61440 ? 61440 : v < -61440 ? -61440 : v; }
// Two codes, `low` in the low byte; and back, exactly.
DEVICE u16 to_codes(float low, float high) { u16 r; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low)); return r; }
DEVICE u32 from_codes(u32 codes) { u32 r; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((u16)codes)); return r; }
#endif
