// Codes of a brick to bytes, four of a row in a register: the A operand of wgmma's k32, whose B operand is x in bytes.
//
// BYTES says what x is: FP8, which is E4M3, or INT8. A lane (g, c) has of each 16 k the codes of k = 2c, 2c + 8, 2c + 1, 2c + 9, in this
// order, for the rows g and g + 8. That is how nibbles of Int4 lie in their word, and the order in which quantize_rows.cu writes x.
//
//     element   x      a byte is                      made of it by
//     Int4      FP8    E4M3, (code - 8) * 2^-9        the distance to 8, and a sign: E4M3's first 16 bytes are those integers
//     Int4      INT8   int8, (code - 8) * 16          the nibble at the top of its byte, its first bit flipped
//     E2M1      FP8    E5M2, number * 2^-14           the upper byte of its float16
//
// FOLDED: groups of E2M1 with powers of two. The product of both is a float16 whose lower byte is zero, so E5M2 has it, and no scale is left:
// exact from a row's largest power of two down to 2^-16 of it. Other scales multiply the sums of their group.
#pragma once
#include "decode.cuh"

enum Bytes { FP8, INT8 };

DEVICE u32 absolute_difference4(u32 a, u32 b) { u32 r; asm("vabsdiff4.u32.u32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0)); return r; }

template <class Element, Bytes X> struct BytesOf;
template <class T> struct BytesOf<Int4<T>, FP8> {
  static constexpr float raw = 0x1p-9f;
  DEVICE void decode(u32 q, u32 (&rows)[2]) {
    rows[0] = andnot_or(q << 4, 0x80808080, absolute_difference4(q & 0x0f0f0f0f, 0x08080808));
    rows[1] = andnot_or(q, 0x80808080, absolute_difference4(q >> 4 & 0x0f0f0f0f, 0x08080808));
  }
};
template <class T> struct BytesOf<Int4<T>, INT8> {
  static constexpr float raw = 16;
  DEVICE void decode(u32 q, u32 (&rows)[2]) {
    rows[0] = (q << 4 & 0xf0f0f0f0) ^ 0x80808080;
    rows[1] = (q & 0xf0f0f0f0) ^ 0x80808080;
  }
};
template <class T> struct BytesOf<E2M1<T>, FP8> {
  static constexpr float raw = E2M1<F16>::raw;
  // Upper bytes of two pairs, in the order of x.
  DEVICE u32 upper(u32 first, u32 second) { return permute(first, second, 0x7351); }
  DEVICE void decode(u32 q, u32 (&rows)[2]) {
    const u32 kept = q & 0x8e8e8e8e, mirrored = reversed(q) & 0x8e8e8e8e;
    rows[0] = upper(kept, mirrored);
    rows[1] = permute(kept, mirrored, 0x6240);
  }
  // The same times a pair of float16 powers of two, for both rows.
  DEVICE void decode_scaled(u32 q, u32 scale, u32 (&rows)[2]) {
    u32 a[4];
    E2M1<F16>::decode(&q, a);
#pragma unroll
    for (int p = 0; p < 4; p++) a[p] = F16::mul2(a[p], twice(scale, p & 1));
    rows[0] = upper(a[0], a[2]);
    rows[1] = upper(a[1], a[3]);
  }
};

using Decoded = BytesOf<Element, BYTES>;
template <class Scale> constexpr bool IS_POWER = false;
template <> constexpr bool IS_POWER<ScaleE5M2> = true;
constexpr bool FOLDED = IS_POWER<SCALE>;
constexpr float REDUCED = Decoded::raw * (FOLDED ? SCALE::raw : 1);  // sums are so many times what they mean

// What a lane gets by one load of 16 bytes of codes: 64 k, two operands of wgmma; and, if they are FOLDED, the scales of both.
template <class Decoded, class Scale> struct LoadOf {
  u32 words[4], scales;

  // Of a brick, as the lane 0 finds it at `codes` and at `groups`.
  __device__ __forceinline__ void fetch(u32 codes, u32 groups, int load) {
    const uint4 v = Brick::codes(codes, load, 0);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    if constexpr (IS_POWER<Scale>) scales = load_shared4(groups + Brick::code_bytes + load * 4);
  }
  // Operand 1 becomes operand 0.
  __device__ __forceinline__ void skip_first() {
    words[0] = words[2], words[1] = words[3];
    if constexpr (IS_POWER<Scale>) scales >>= 16;
  }
  // Operand 0 or 1: registers of the rows g and g + 8 for 16 k, then for the next 16 k.
  __device__ __forceinline__ void decode(int operand, u32 (&a)[4]) const {
#pragma unroll
    for (int later = 0; later < 2; later++) {
      const u32 word = opaque(words[operand * 2 + later]);  // so that nothing is decoded into registers that wgmma still reads
      u32 rows[2];
      if constexpr (IS_POWER<Scale>) Decoded::decode_scaled(word, Scale::of_group(scales, operand), rows);
      else Decoded::decode(word, rows);
      a[later * 2] = rows[0], a[later * 2 + 1] = rows[1];
    }
  }
};

using Load = LoadOf<Decoded, SCALE>;
