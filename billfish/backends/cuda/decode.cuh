// Packed codes to pairs of numbers in registers: the only place that knows how many bits a code has.
//
// A *brick* is 16 rows by 128 k: codes, then scales, then offsets, in the order in which the lanes of a warp want them
// as the A operand of mma.m16n8k16 (wgmma's A operand is the same). Lane (g, c) = (lane / 4, lane % 4) holds of each
// 16 x 16 fragment four pairs along k, one register each:
//
//     pair        0             1                 2                 3
//     row, k      g, 2c         g + 8, 2c         g, 2c + 8         g + 8, 2c + 8
//
// An element decodes one fragment: `words` registers of codes to the four pairs, times `raw`, a power of two that the scale
// makes up for where that is free. `place` is the way back: where the first code of a pair goes in its word; the second
// goes 16 bits further round, or one byte for Int8 and E4M3, whose second word has pairs 2 and 3 (SECOND). `take` undoes `place`.
//
// Integers can be decoded and multiplied by their scales at once. A code by itself, under a mask, is a number already:
// code * 2^-24 in float16, a subnormal one, and code * 2^-133 in bfloat16. So fma(that, scale * 2^15, -8 * scale * 2^-9)
// is (code - 8) * scale * `fused`, 2^-9, and rounded only once, since the factors are exact: scales are below 2.
// `factors` makes them of a pair of scales, for the rows g and g + 8.
//
// For sums that are scaled later, that code under a mask is enough. `decode_plain` gives number + `center`, times `unit_low` in
// the rows g and `unit_high` in the rows g + 8, whose codes are a nibble higher. An operand of these units, `units_low` and `units_high`
// as pairs, times x is the sum of x, by which the center is taken off again. bfloat16 would lose such small numbers: there, a nibble
// is added to 128.
#pragma once
#include "device.cuh"

// Nibbles that mean code - 8. Pair p is in nibbles p and p + 4, so that one mask finds both of its codes.
template <class T> struct Int4 {
  static constexpr int words = 1;
  static constexpr float raw = 1;
  static constexpr u32 unraw = T::ones;
  static constexpr float fused = T::is_half ? 0x1p-9f : 0x1p-7f;
  DEVICE u32 place(u32 code, int pair) { return code << (4 * pair); }
  DEVICE u32 take(u32 q, int pair) { return q >> (4 * pair) & 15; }
  DEVICE void factors(u32 scale, u32 (&f)[4]) {
    f[0] = T::mul2(scale, T::is_half ? 0x78007800 : 0x7e807e80);  // 2^15, 2^126
    f[1] = T::mul2(scale, 0x68006800);                            // 2^11, for codes that are a nibble higher
    f[2] = T::mul2(scale, T::is_half ? 0xa400a400 : 0xbd80bd80);  // -8 * fused
  }
  DEVICE void decode_scaled(const u32* q, const u32 (&f)[4], u32 (&a)[4]) {
    if constexpr (T::is_half) {
      const u32 next = q[0] >> 8;
      a[0] = T::fma2(q[0] & 0x000f000f, twice(f[0], 0), twice(f[2], 0));
      a[1] = T::fma2(q[0] & 0x00f000f0, twice(f[1], 1), twice(f[2], 1));
      a[2] = T::fma2(next & 0x000f000f, twice(f[0], 0), twice(f[2], 0));
      a[3] = T::fma2(next & 0x00f000f0, twice(f[1], 1), twice(f[2], 1));
    } else {
#pragma unroll
      for (int p = 0; p < 4; p++) a[p] = T::fma2(q[0] >> (4 * p) & 0x000f000f, twice(f[0], p & 1), twice(f[2], p & 1));
    }
  }
  static constexpr float unit_low = T::is_half ? 0x1p-24f : 1, unit_high = T::is_half ? 0x1p-20f : 1, center = T::is_half ? 8 : 136;
  static constexpr u32 units_low = T::is_half ? 0x00010001 : T::ones, units_high = T::is_half ? 0x00100010 : T::ones;
  DEVICE void decode_plain(const u32* q, u32 (&a)[4]) {
    if constexpr (T::is_half) {
      const u32 next = q[0] >> 8;
      a[0] = q[0] & 0x000f000f;
      a[1] = q[0] & 0x00f000f0;
      a[2] = next & 0x000f000f;
      a[3] = next & 0x00f000f0;
    } else {
#pragma unroll
      for (int p = 0; p < 4; p++) a[p] = and_or(q[0] >> (4 * p), 0x000f000f, 0x43004300);
    }
  }
  DEVICE void decode(const u32* q, u32 (&a)[4]) {
    if constexpr (T::is_half) {
      // 0x6400 is 1024, and its last bit counts 1: or-ing a nibble into it adds the code. One nibble higher, it adds 16
      // times the code; fma(v, 1/16, -(64 + 8)) brings it down again. Both are exact.
      const u32 low = and_or(q[0], 0x000f000f, 0x64006400), high = and_or(q[0], 0x00f000f0, 0x64006400);
      const u32 next = q[0] >> 8;
      const u32 low2 = and_or(next, 0x000f000f, 0x64006400), high2 = and_or(next, 0x00f000f0, 0x64006400);
      a[0] = T::add2(low, 0xe408e408);
      a[1] = T::fma2(high, 0x2c002c00, 0xd480d480);
      a[2] = T::add2(low2, 0xe408e408);
      a[3] = T::fma2(high2, 0x2c002c00, 0xd480d480);
    } else {
      // 0x4300 is 128 in bfloat16, whose last bit counts 1 as well; there is no room one nibble higher.
#pragma unroll
      for (int p = 0; p < 4; p++) a[p] = T::add2(and_or(q[0] >> (4 * p), 0x000f000f, 0x43004300), 0xc308c308);
    }
  }
};

// Bytes that mean code - 128. Word 0 has pairs 0 and 1, word 1 pairs 2 and 3.
template <class T> DEVICE u32 bytes_to_pair(u32 pair) {  // 0x00BB00AA to (A - 128, B - 128)
  if constexpr (T::is_half) return T::add2(pair | 0x64006400, 0xe480e480);
  // bfloat16 counts to 128 + 127 only. So the low seven bits make 128 + low, and the top bit decides whether 128 or 256
  // is taken off: 0xc300 and 0xc380 differ in just that bit.
  else return T::add2(and_or(pair, 0x007f007f, 0x43004300), andnot_or(pair, 0x00800080, 0xc300c300));
}
template <class T> struct Int8 {
  static constexpr int words = 2;
  static constexpr float raw = 1;
  static constexpr u32 unraw = T::ones;
  static constexpr float fused = T::is_half ? 0x1p-9f : 0x1p-7f;
  DEVICE u32 place(u32 code, int pair) { return code << (pair % 2 * 16); }
  DEVICE u32 take(u32 q, int pair) { return q >> (pair % 2 * 16) & 255; }
  DEVICE void factors(u32 scale, u32 (&f)[4]) {
    f[0] = T::mul2(scale, T::is_half ? 0x78007800 : 0x7e807e80);  // 2^15, 2^126
    f[2] = T::mul2(scale, T::is_half ? 0xb400b400 : 0xbf80bf80);  // -128 * fused
  }
  DEVICE void decode_scaled(const u32* q, const u32 (&f)[4], u32 (&a)[4]) {
#pragma unroll
    for (int p = 0; p < 4; p++) a[p] = T::fma2(permute(q[p / 2], 0, p % 2 ? 0x4342 : 0x4140), twice(f[0], p & 1), twice(f[2], p & 1));
  }
  static constexpr float unit_low = T::is_half ? 0x1p-24f : 1, unit_high = unit_low, center = T::is_half ? 128 : 0;
  static constexpr u32 units_low = T::is_half ? 0x00010001 : T::ones, units_high = units_low;
  DEVICE void decode_plain(const u32* q, u32 (&a)[4]) {
    if constexpr (T::is_half) {
#pragma unroll
      for (int p = 0; p < 4; p++) a[p] = permute(q[p / 2], 0, p % 2 ? 0x4342 : 0x4140);
    } else decode(q, a);
  }
  DEVICE void decode(const u32* q, u32 (&a)[4]) {
#pragma unroll
    for (int w = 0; w < 2; w++) {
      a[2 * w] = bytes_to_pair<T>(permute(q[w], 0, 0x4140));
      a[2 * w + 1] = bytes_to_pair<T>(permute(q[w], 0, 0x4342));
    }
  }
};

// Four-bit floats s eem. float16 wants the sign in bit 15 and eem in 11..9, which is the number times 2^-14 (0.5 is a subnormal
// there, and exact). Pair 0 lies like that in its 16 bits, pair 1 eight bits lower. What is left is the mirror image of these places:
// pairs 2 and 3 lie like pairs 0 and 1 in the word with its bits reversed.
template <class T> struct E2M1 {
  static constexpr int words = 1;
  static constexpr float raw = T::is_half ? 0x1p-14f : 0x1p-126f;
  static constexpr u32 unraw = T::is_half ? 0x74007400 : 0x7e807e80;  // 1 / raw, a pair of them
  static constexpr float fused = 0;  // not so
  DEVICE u32 place(u32 code, int pair) {
    const u32 q = ((code >> 3) << 15 | (code & 7) << 9) >> (pair % 2 * 8);
    return pair < 2 ? q : reversed(q);
  }
  DEVICE u32 take(u32 q, int pair) {
    const u32 lies = (pair < 2 ? q : reversed(q)) << (pair % 2 * 8);
    return lies >> 12 & 8 | lies >> 9 & 7;
  }
  DEVICE void decode(const u32* q, u32 (&a)[4]) {
    two(q[0], a[0], a[1]);
    two(reversed(q[0]), a[2], a[3]);
  }
  DEVICE void two(u32 w, u32& first, u32& second) {
    if constexpr (T::is_half) {
      first = w & 0x8e008e00;
      second = (w << 8) & 0x8e008e00;
    } else {
      // bfloat16 wants eem in 8..6, which is the number times 2^-126. Of the second one, s and eem go different ways: a multiplication
      // shifts by both, and what it puts elsewhere does not reach these bits.
      first = and_or(w, 0x80008000, (w >> 3) & 0x01c001c0);
      second = (w & 0x008e008e) * (1 << 8 | 1 << 5) & 0x81c081c0;
    }
  }
  // Without a scale, products that small would get lost.
  static constexpr float unit_low = T::is_half ? raw : 1, unit_high = unit_low, center = 0;
  static constexpr u32 units_low = T::is_half ? 0x04000400 : T::ones, units_high = units_low;
  DEVICE void decode_plain(const u32* q, u32 (&a)[4]) {
    decode(q, a);
    if constexpr (!T::is_half)
#pragma unroll
      for (int p = 0; p < 4; p++) a[p] = T::mul2(a[p], unraw);
  }
};

// Eight-bit floats s eeee mmm, laid out as Int8's bytes. At the top of 16 bits, all but the sign moved down by one, they are a float16
// times 2^-8; moved down by four, a bfloat16 times 2^-120. Magnitude 0x7f is NaN: adding 1 carries into the place of the sign for that
// alone, from where one subtraction makes an exponent of ones.
template <class T> struct E4M3 {
  static constexpr int words = 2;
  static constexpr float raw = T::is_half ? 0x1p-8f : 0x1p-120f;
  static constexpr u32 unraw = T::is_half ? 0x5c005c00 : 0x7b807b80;  // 1 / raw, a pair of them
  static constexpr float fused = 0;  // not so
  DEVICE u32 place(u32 code, int pair) { return Int8<T>::place(code, pair); }
  DEVICE u32 take(u32 q, int pair) { return Int8<T>::take(q, pair); }
  DEVICE u32 two(u32 tops) {  // 0xBB00AA00
    const u32 magnitude = tops & 0x7f007f00, carried = magnitude + 0x01000100 & 0x80008000;
    const u32 number = and_or(tops, 0x80008000, magnitude >> (T::is_half ? 1 : 4));
    return number | (carried - (carried >> (T::is_half ? 6 : 9)));
  }
  DEVICE void decode(const u32* q, u32 (&a)[4]) {
#pragma unroll
    for (int p = 0; p < 4; p++) a[p] = two(permute(q[p / 2], 0, p % 2 ? 0x3424 : 0x1404));
  }
  // Without a scale, products as small as bfloat16's would get lost.
  static constexpr float unit_low = T::is_half ? raw : 1, unit_high = unit_low, center = 0;
  static constexpr u32 units_low = T::is_half ? 0x1c001c00 : T::ones, units_high = units_low;
  DEVICE void decode_plain(const u32* q, u32 (&a)[4]) {
    decode(q, a);
    if constexpr (!T::is_half)
#pragma unroll
      for (int p = 0; p < 4; p++) a[p] = T::mul2(a[p], unraw);
  }
};

// Nibbles, laid out as Int4's, that are indices into a table of 16 bytes that mean byte - 128.
#ifndef TABLE
#define TABLE 0, 0, 0, 0
#endif
template <class T> struct Table4 {
  static constexpr int words = 1;
  static constexpr float raw = 1;
  static constexpr u32 unraw = T::ones;
  static constexpr float fused = 0;  // not so
  DEVICE u32 place(u32 code, int pair) { return code << (4 * pair); }
  DEVICE u32 take(u32 q, int pair) { return q >> (4 * pair) & 15; }
  // Four nibbles to their bytes. A permute looks up 8 bytes with 3 bits; bit 3 chooses between two of them.
  DEVICE u32 lookup(u32 nibbles) {
    constexpr u32 table[4] = {TABLE};
    const u32 index = nibbles & 0x7777;
    const u32 low = permute(table[0], table[1], index), high = permute(table[2], table[3], index);
    return permute(low, high, and_or(nibbles >> 1, 0x4444, 0x3210));
  }
  static constexpr float unit_low = T::is_half ? 0x1p-24f : 1, unit_high = unit_low, center = T::is_half ? 128 : 0;
  static constexpr u32 units_low = T::is_half ? 0x00010001 : T::ones, units_high = units_low;
  DEVICE void bytes(const u32* q, u32 (&a)[4]) {
    const u32 even = lookup(q[0]), odd = lookup(q[0] >> 16);
#pragma unroll
    for (int p = 0; p < 4; p++) a[p] = permute(even >> (8 * p), odd >> (8 * p), 0x5410) & 0x00ff00ff;
  }
  DEVICE void decode_plain(const u32* q, u32 (&a)[4]) {
    if constexpr (T::is_half) bytes(q, a);
    else decode(q, a);
  }
  DEVICE void decode(const u32* q, u32 (&a)[4]) {
    bytes(q, a);
#pragma unroll
    for (int p = 0; p < 4; p++) a[p] = bytes_to_pair<T>(a[p]);
  }
};

// Unquantized weights: float16 numbers, a word for each pair.
template <class T> struct Half {
  static constexpr int words = 4;
  static constexpr float raw = 1;
  static constexpr u32 unraw = T::ones;
  static constexpr float fused = 0;  // not so
  DEVICE u32 place(u32 code, int) { return code; }
  DEVICE u32 take(u32 q, int) { return q & 0xffff; }
  static constexpr float unit_low = 1, unit_high = 1, center = 0;
  static constexpr u32 units_low = T::ones, units_high = T::ones;
  DEVICE void decode(const u32* q, u32 (&a)[4]) {
#pragma unroll
    for (int p = 0; p < 4; p++) a[p] = T::is_half ? q[p] : T::pack(F16::to_float((u16)q[p]), F16::to_float((u16)(q[p] >> 16)));
  }
  DEVICE void decode_plain(const u32* q, u32 (&a)[4]) { decode(q, a); }
};

// ---- scales and offsets -------------------------------------------------------------------------------------------

// Of every group, a lane wants two: of row g and of row g + 8. They are neighbours, in one word, or two of float32. Where there are
// `halves`, they are a pair of float16. decode gives them as float32. Both are times `raw`.
struct ScaleF16 {
  static constexpr int bytes = 2;
  static constexpr float raw = 1;
  static constexpr bool halves = true;
  DEVICE float2 decode(u32 word, u32) { return {F16::to_float((u16)word), F16::to_float((u16)(word >> 16))}; }
};
struct ScaleF32 {
  static constexpr int bytes = 4;
  static constexpr float raw = 1;
  static constexpr bool halves = false;
  DEVICE float2 decode(u32 low, u32 high) { return {__uint_as_float(low), __uint_as_float(high)}; }
};
// Scales of one byte are the upper bits of a float16; two groups share a word, and `of_group` makes a pair of float16 for one of them.
// `raw` brings such scales to the upper end of float16, where they make up for Element::raw.
//
// Powers of two: the upper byte, exponent and two bits.
struct ScaleE5M2 : ScaleF16 {
  static constexpr int bytes = 1;
  static constexpr float raw = 0x1p7f;
  DEVICE u32 of_group(u32 word, int group) { return permute(word, 0, group % 2 ? 0x3424 : 0x1404); }
};
// All of E4M3: exponent and three bits, 14 to 7. Those of the first group lie there already, those of the second eight bits lower.
struct ScaleE5M3 : ScaleF16 {
  static constexpr int bytes = 1;
  static constexpr float raw = 0x1p7f;
  DEVICE u32 of_group(u32 word, int group) { return (group % 2 ? permute(word, 0, 0x2103) : word) & 0x7f807f80; }
};
// Offsets are float16, beside float32 scales float32.
template <class S> struct OffsetOf { using type = ScaleF16; };
template <> struct OffsetOf<ScaleF32> { using type = ScaleF32; };

enum Offset { NONE, ZERO, MINIMUM };  // code * s; (code - zero) * s; code * s + minimum
// With an offset, elements are codes less the middle of their range: weights spread around it, so that what is added for
// the offset and the middle together is small, and so is its rounding.
#ifndef MIDDLE
#define MIDDLE 0
#endif

// The weights that this compilation is for: TYPE, ELEMENT, SCALE, OFFSET and GROUPS (of scales in a brick) are macros.
using Element = ELEMENT<TYPE>;

// One brick: where things are in it.
struct Brick {
  static constexpr int group_words = GROUPS * 2 * SCALE::bytes / 4;  // of scales, for each g
  static constexpr int code_bytes = 1024 * Element::words;
  static constexpr int scale_bytes = 8 * 4 * group_words;
  static constexpr int bytes = code_bytes + (OFFSET == NONE ? 1 : 2) * scale_bytes;
  static constexpr int group_fragments = 8 / GROUPS;  // fragments in a group
  static_assert(GROUPS * SCALE::bytes >= 2, "a lane's scales fill at least one word");

  // A course is a row block, 16 rows. Bricks of eight courses are neighbours, then comes k, then the next eight courses (the last may be fewer).
  DEVICE size_t at(int course, int brick, int courses, int bricks) {
    const int first = course & ~7;
    return ((size_t)first * bricks + (size_t)brick * min(8, courses - first) + (course - first)) * bytes;
  }
  // A lane's codes: 16 bytes of each 512, which is 64 k, or 32 of Int8.
  DEVICE uint4 codes(u32 brick, int load, int lane) { return load_shared16(brick + load * 512 + lane * 16); }
  // COUNT words of them, from word `first` on, which is a multiple of COUNT.
  template <int COUNT> DEVICE void codes(u32 (&to)[COUNT], u32 brick, int first, int lane) {
    const u32 at = brick + first / 4 * 512 + lane * 16 + first % 4 * 4;
    if constexpr (COUNT == 4) {
      const uint4 v = load_shared16(at);
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else if constexpr (COUNT == 2) {
      const uint2 v = load_shared8(at);
      to[0] = v.x, to[1] = v.y;
    } else to[0] = load_shared4(at);
  }
  // The scales of a group, for the rows g and g + 8; the brick is in shared memory.
  DEVICE float2 scale(u32 brick, int g, int group) {
    const uint2 s = stored_scale(brick, g, group);
    return SCALE::decode(s.x, s.y);
  }
  // The same as a pair of TYPE, times Scale::raw.
  template <class Scale> DEVICE u32 scale_pair(uint2 stored) {
    if constexpr (TYPE::is_half && Scale::halves) return stored.x;
    const float2 s = Scale::decode(stored.x, stored.y);
    return TYPE::pack(s.x, s.y);
  }
  DEVICE uint2 stored_scale(u32 brick, int g, int group) { return load<SCALE>(brick + code_bytes + g * 4 * group_words, group); }
  DEVICE uint2 stored_offset(u32 brick, int g, int group) {
    return load<SCALE>(brick + code_bytes + scale_bytes + g * 4 * group_words, group);
  }
  DEVICE float2 decode_offset(uint2 stored) { return OffsetOf<SCALE>::type::decode(stored.x, stored.y); }
  // What is added to each element of the group, times its scale.
  DEVICE float2 offset(uint2 stored, float2 scale) {
    const float2 o = decode_offset(stored);
    if constexpr (OFFSET == ZERO) return {(MIDDLE - o.x) * scale.x, (MIDDLE - o.y) * scale.y};
    else return {o.x + MIDDLE * scale.x, o.y + MIDDLE * scale.y};
  }
  template <class S> DEVICE uint2 load(u32 words, int group) {
    const u32 at = words + group * 2 * S::bytes;
    if constexpr (S::bytes == 4) return make_uint2(load_shared4(at), load_shared4(at + 4));
    else if constexpr (S::bytes == 1) return make_uint2(S::of_group(load_shared4(at - group % 2 * 2), group), 0);
    else return make_uint2(load_shared4(at), 0);
  }
};

constexpr int SECOND = Element::words == 2 ? 8 : 16;

// All codes of word i of a brick, as visit(row, column, pair, odd): pack.cu and unpack.cu share where they are.
template <class Visit> DEVICE void for_each_code(int i, Visit visit) {
  const int load = i / 128, lane = i / 4 % 32, word = i % 4, g = lane >> 2, c = lane & 3;
  const int fragment = (load * 4 + word) / Element::words, first = word % Element::words * (4 / Element::words);
  for (int pair = first; pair < first + 4 / Element::words; pair++)
    for (int odd = 0; odd < 2; odd++) visit(g + pair % 2 * 8, fragment * 16 + pair / 2 * 8 + 2 * c + odd, pair, odd);
}
