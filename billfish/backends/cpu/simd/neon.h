// NEON with dot products (ARMv8.2): vectors of 16 bytes, 4 lanes of 32 bits.
#pragma once
#include <arm_neon.h>

#include <cstdint>

#include "simd/wide_sums.h"

namespace BILLFISH_ISA {

constexpr int LANES = 4;
constexpr int TILE_ROWS = 16;

using Bytes = uint8x16_t;
using Ints = int32x4_t;
using Floats = float32x4_t;

inline Bytes load_bytes(const uint8_t* p) { return vld1q_u8(p); }
// A load by itself: gcc would make pairs of them, which take longer here than two, or load once and copy the register, which
// takes a slot of the arithmetic, where loads are free beside it.
template <class T> T load_alone(const void* p) {
  T v;
  asm volatile("ldr %q0, %1" : "=w"(v) : "m"(*static_cast<const uint8_t(*)[16]>(p)));
  return v;
}
inline Bytes load_operand(const uint8_t* p) { return load_alone<Bytes>(p); }
inline void store_bytes(uint8_t* p, Bytes v) { vst1q_u8(p, v); }
inline Bytes splat_byte(uint8_t x) { return vdupq_n_u8(x); }
inline Bytes bit_and(Bytes a, Bytes b) { return vandq_u8(a, b); }
inline Bytes bit_or(Bytes a, Bytes b) { return vorrq_u8(a, b); }
inline Bytes bit_xor(Bytes a, Bytes b) { return veorq_u8(a, b); }
inline Bytes subtract(Bytes a, Bytes b) { return vsubq_u8(a, b); }
template <int N> Bytes shift_right(Bytes a) {
  if constexpr (N == 0) return a;
  else return vshrq_n_u8(a, N);
}
template <int N> Bytes shift_left(Bytes a) {
  if constexpr (N == 0) return a;
  else return vshlq_n_u8(a, N);
}
// The bits of `other` where `mask` has ones, else those of a, which are 0 there.
inline Bytes merge(Bytes a, Bytes other, int mask) { return vbslq_u8(vdupq_n_u8(uint8_t(mask)), other, a); }
// The top N bits of a, and below them b shifted right by N.
template <int N> Bytes insert_right(Bytes a, Bytes b) { return vsriq_n_u8(a, b, N); }
// High nibbles, signed: code - 8, because prepack has flipped their top bit.
inline Bytes high_nibbles(Bytes a) { return vreinterpretq_u8_s8(vshrq_n_s8(vreinterpretq_s8_u8(a), 4)); }
constexpr int HIGH_FLIP = 8;
// table[index] for each byte, index < 16.
inline Bytes lookup(const uint8_t* table, Bytes index) { return vqtbl1q_u8(vld1q_u8(table), index); }

inline Ints splat_int(int32_t x) { return vdupq_n_s32(x); }
// Modulo 2^32, as the sums in place need it; gcc's vsubq_s32 is the subtraction of int, which may not overflow.
inline Ints add(Ints a, Ints b) { return vreinterpretq_s32_u32(vaddq_u32(vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b))); }
inline Ints subtract(Ints a, Ints b) { return vreinterpretq_s32_u32(vsubq_u32(vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b))); }
template <int N> Ints shift_left(Ints a) { return vshlq_n_s32(a, N); }

// 16 bytes of x. dot<L> adds, in each lane, the products of that lane's four signed weights with bytes 4L..4L+3.
using Activations = int8x16_t;
inline Activations load_activations(const int8_t* p) { return vld1q_s8(p); }
constexpr bool X_IN_MEMORY = false;  // see simd/avx512.h
template <int L, billfish::Operand> Ints dot(Ints sum, Bytes w, Activations x) {
  asm("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sum) : "w"(w), "w"(x), "i"(L));  // gcc moves the intrinsic's sums about
  return sum;
}
// From so many rows of x on, it pays to decode weights into a buffer first: bytes and tables, other codes, and where sums go over whole groups.
constexpr int BUFFER_ROWS = 9, PACKED_BUFFER_ROWS = 9, GROUP_BUFFER_ROWS = 25;
// Whether few rows of x have kernels that decode codes as they are read, and up to how many rows are multiplied one by one from the buffer: these
// kernels are most of what a level takes to compile, which simd/portable.h does without.
constexpr bool FEW_FROM_STREAM = true;
constexpr int BUFFERED_ONE_BY_ONE = 0;
// Whether two and three rows of x have kernels of their own. T = 2 takes 60 cycles a block and T = 3 86, where T = 4 takes 107 and one row 37.
constexpr bool TAILS = true;
// From MANY_ROWS up to so many rows, nibbles are decoded once for all of them, in registers: see gemm/held8.h.
constexpr int HELD_ROWS = 16;
// Up to four rows of x go with so many slices of a tile together: 64 blocks of q4_0 and their x take 18 KiB each. With each block the kernels ask
// for its codes ahead; the lines of its scales come by themselves, and asking for them too reads a third more than there is.
constexpr int SLICES_OF_FEW = 2, LINES_OF_SCALES = 0;
// Many rows of x, whose weights are in the buffer, are multiplied so many together.
constexpr int MANY_TOGETHER = 4;
// Whether the row vectors of a tile follow one another with the same x. Else rows of x do, with the same codes: then no register is written twice in a row.
constexpr bool ROW_OF_X_FIRST = false;
// Whether many rows of x in two digits have one sum for both: see add_buffered_16.
constexpr bool DIGITS_IN_ONE_SUM = true;
// With x in two digits, rows go one by one up to here, and then through the buffer.
constexpr int ONE_BY_ONE_16 = 7;
// With one row of x, how many bytes ahead to ask for the stream. 0 is not at all: asking more than halves the rate of reading here.
constexpr int ONE_ROW_AHEAD = 0;
// How many k-quads are decoded before their dot products: a sum that is added to twice in a row stays in its pipe.
constexpr int QUADS_TOGETHER = 2;
// What bytes of signed weights have more than their values when dot() gets them.
constexpr int SIGNED_BIAS = 0;
// Whether dot() takes any byte, two nibbles at once for example.
constexpr bool WHOLE_BYTES_FIT = true;

inline Floats load_floats(const float* p) { return vld1q_f32(p); }
// A constant that a sum begins with, LANES times in memory: see load_alone.
inline Floats load_constant(const float* p) { return load_alone<Floats>(p); }
inline void store_floats(float* p, Floats v) { vst1q_f32(p, v); }
inline Floats splat(float x) { return vdupq_n_f32(x); }
inline Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
inline Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
inline Floats divide(Floats a, Floats b) { return vdivq_f32(a, b); }
inline Floats larger(Floats a, Floats b) { return vmaxq_f32(a, b); }
inline float largest(Floats v) { return vmaxvq_f32(v); }
inline Floats multiply_add(Floats sum, Floats a, Floats b) { return vfmaq_f32(sum, a, b); }
inline Floats to_floats(Ints v) { return vcvtq_f32_s32(v); }
// p * 2^n, for a p between 0.5 and 2 and shifted = n + 1.5 * 2^23: n is in its last bits, and goes to the exponent of p.
inline Floats times_power(Floats p, Floats shifted) {
  return vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(p), vshlq_n_u32(vreinterpretq_u32_f32(shifted), 23)));
}

// Integer sums below 2^22 become floats without the conversion, which blocks a pipe for two cycles: started at the bits of
// 1.5 * 2^23, whose last bit is worth 1, a sum *is* the float that much larger. Starts come from memory, four times each: see load_alone.
constexpr int32_t SUM_START = 0x4b400000;
constexpr float SUM_OFFSET = 12582912.0f;
constexpr int START_INTS = 4;
inline Ints load_start(const int32_t* p) { return load_alone<Ints>(p); }
template <bool MAGIC> Floats sum_to_floats(Ints v) {
  if constexpr (MAGIC) return vsubq_f32(vreinterpretq_f32_s32(v), vdupq_n_f32(SUM_OFFSET));
  else return vcvtq_f32_s32(v);
}
// Of two sums, as floats: what both started at falls out.
template <bool MAGIC> Floats difference_to_floats(Ints a, Ints b) {
  if constexpr (MAGIC) return vsubq_f32(vreinterpretq_f32_s32(a), vreinterpretq_f32_s32(b));
  else return vcvtq_f32_s32(subtract(a, b));
}
// sum * scale. offset, -SUM_OFFSET * scale, is exact for scales of up to 22 bits, so this is rounded once.
template <bool MAGIC> Floats scale_sum(Ints v, Floats scale, const float* offset) {
  if constexpr (MAGIC) return vfmaq_f32(load_alone<Floats>(offset), vreinterpretq_f32_s32(v), scale);
  else return vmulq_f32(vcvtq_f32_s32(v), scale);
}

// Byte K of each 32-bit lane, less `bias`. Put into the last byte of 2^23 it makes the float 2^23 + byte, so what is taken
// off is byte_offset(bias). 2^23 comes from memory each time: see load_alone.
alignas(16) const float TWO_TO_23[4] = {8388608, 8388608, 8388608, 8388608};
inline Floats byte_offset(int bias) { return vdupq_n_f32(8388608.0f + float(bias)); }
template <int K> Floats byte_to_floats(Bytes v, Floats offset) {
  constexpr uint8_t keep = 255;
  const uint8x16_t from = {K, keep, keep, keep, K + 4, keep, keep, keep, K + 8, keep, keep, keep, K + 12, keep, keep, keep};
  const uint8x16_t word = vreinterpretq_u8_f32(load_alone<Floats>(TWO_TO_23));
  return vsubq_f32(vreinterpretq_f32_u8(vqtbx1q_u8(word, v, from)), offset);
}

// Byte K of each lane, less a bias, times the scale; offset is (-BYTE_START - bias) * scale. In the second byte of 2^15 it makes the
// float 2^15 + byte, and where the offset is exact, a single multiply-add is rounded once.
alignas(16) const float TWO_TO_15[4] = {32768, 32768, 32768, 32768};
constexpr float BYTE_START = 32768;
template <int K> Floats times_byte(Floats scale, const float* offset, Bytes v) {
  constexpr uint8_t keep = 255;
  const uint8x16_t from = {keep, K, keep, keep, keep, K + 4, keep, keep, keep, K + 8, keep, keep, keep, K + 12, keep, keep};
  const uint8x16_t word = vreinterpretq_u8_f32(load_alone<Floats>(TWO_TO_15));
  return vfmaq_f32(load_alone<Floats>(offset), vreinterpretq_f32_u8(vqtbx1q_u8(word, v, from)), scale);
}

// For exact products: whether few rows go through dot(), and for many, vectors of sums that registers hold for each of four rows, and how many times four.
constexpr bool EXACT_IN_DIGITS = true;
constexpr int SUM_VECTORS = 4, SUM_BUNDLES = 1;
constexpr int REGISTER_ROWS = 16;

// Four values of x; multiply_add_x<L> multiplies with value L.
using FloatActivations = float32x4_t;
inline FloatActivations load_x(const float* p) { return vld1q_f32(p); }
template <int L> Floats multiply_add_x(Floats sum, Floats w, FloatActivations x) {
  asm("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(w), "w"(x), "i"(L));  // gcc would share a copy of the lane instead
  return sum;
}

template <int L> Floats multiply_x(Floats w, FloatActivations x) { return vmulq_laneq_f32(w, x, L); }

// LANES stored numbers to float32.
inline Floats halves_to_floats(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
// A bfloat16 is the upper half of a float32. It gets there by zip, which either pipe does; a shift would wait for one of them.
inline Floats bfloats_to_floats(const uint8_t* p) {
  const uint16x8_t upper = vcombine_u16(vreinterpret_u16_u8(vld1_u8(p)), vdup_n_u16(0));
  return vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), upper));
}
// Bytes ROW .. ROW + 3 of 16, one for each row of a tile: one load serves all four vectors of rows. Each goes to byte TO of a
// lane, whose other bytes are those of `word`.
template <int ROW, int TO> uint8x16_t row_bytes(uint8x16_t rows, uint8x16_t word) {
  constexpr auto from = [](int byte) constexpr { return uint8_t(byte % 4 == TO ? ROW + byte / 4 : 255); };
  const uint8x16_t index = {from(0), from(1), from(2),  from(3),  from(4),  from(5),  from(6),  from(7),
                            from(8), from(9), from(10), from(11), from(12), from(13), from(14), from(15)};
  return vqtbx1q_u8(word, rows, index);
}
// (field - bias) * d, where the field of a byte is byte >> SHIFT & MASK. In the second byte of 2^15 it makes the float 2^15 + field,
// and with offset = -(2^15 + bias) * d, which is exact for halves d, a single multiply-add is rounded once, here not at all.
inline Floats times_bytes_offset(Floats d, int bias) { return vmulq_n_f32(d, -32768.0f - float(bias)); }
template <int ROW, int SHIFT, int MASK> Floats fields_in_word(const uint8_t* rows) {
  Bytes fields = shift_right<SHIFT>(vld1q_u8(rows));
  if constexpr (MASK << SHIFT < 128) fields = bit_and(fields, splat_byte(MASK));  // else the shift has left no other bits
  return vreinterpretq_f32_u8(row_bytes<ROW, 1>(fields, vreinterpretq_u8_f32(load_alone<Floats>(TWO_TO_15))));
}
template <int ROW, int SHIFT, int MASK> Floats times_bytes(Floats d, const float* offset, const uint8_t* rows) {
  return vfmaq_f32(load_alone<Floats>(offset), fields_in_word<ROW, SHIFT, MASK>(rows), d);
}
// field - bias.
template <int ROW, int SHIFT, int MASK> Floats byte_fields(const uint8_t* rows, int bias) {
  return vsubq_f32(fields_in_word<ROW, SHIFT, MASK>(rows), vdupq_n_f32(32768.0f + float(bias)));
}
// Bytes e to 2^(e - 127), for e from 1 to 254.
template <int ROW> Floats exponents_to_floats(const uint8_t* rows) {
  return vreinterpretq_f32_u32(vshrq_n_u32(vreinterpretq_u32_u8(row_bytes<ROW, 3>(vld1q_u8(rows), vdupq_n_u8(0))), 1));
}
// Bytes 0eeeemmm to 2^-8 of the E4M3 value, which is what float16 reads with seven zeros behind them, subnormals included. Eight rows are
// widened at once.
template <int ROW> Floats e4m3_to_floats(const uint8_t* rows) {
  const float16x8_t halves = vreinterpretq_f16_u16(vshll_n_u8(vld1_u8(rows + ROW / 8 * 8), 7));
  return vcvt_f32_f16(ROW % 8 ? vget_high_f16(halves) : vget_low_f16(halves));
}

// Four k of LANES rows, as Bytes has them: k[j] is byte j of every lane, as a number.
struct FourFloats {
  Floats k[4];
};
// Bytes seeeemmm to 2^-120 of the E4M3 value: sign, exponent and mantissa where float32 has them. A shift that keeps the sign brings all three
// into place, with copies of the sign between them.
inline FourFloats e4m3_to_floats(Bytes v) {
  const int32x4_t lanes = vreinterpretq_s32_u8(v), keep = vdupq_n_s32(int32_t(0x87f00000));
  const auto number = [&](int32x4_t top) { return vreinterpretq_f32_s32(vandq_s32(vshrq_n_s32(top, 4), keep)); };
  return {{number(vshlq_n_s32(lanes, 24)), number(vshlq_n_s32(lanes, 16)), number(vshlq_n_s32(lanes, 8)), number(lanes)}};
}
// 16 float32, byte by byte: one look-up gives a byte of 16 numbers, and four of them are then put together.
using FloatTable = uint8x16x4_t;
inline FloatTable load_table(const uint8_t* numbers) { return vld4q_u8(numbers); }
inline FourFloats look_up(const FloatTable& table, Bytes index) {
  Bytes byte[4];
  for (int i = 0; i < 4; i++) byte[i] = vqtbl1q_u8(table.val[i], index);
  const auto pairs = [](Bytes a, Bytes b) { return uint16x8x2_t{{vreinterpretq_u16_u8(vtrn1q_u8(a, b)), vreinterpretq_u16_u8(vtrn2q_u8(a, b))}}; };
  const uint16x8x2_t low = pairs(byte[0], byte[1]), high = pairs(byte[2], byte[3]);
  return {{vreinterpretq_f32_u16(vtrn1q_u16(low.val[0], high.val[0])), vreinterpretq_f32_u16(vtrn1q_u16(low.val[1], high.val[1])),
           vreinterpretq_f32_u16(vtrn2q_u16(low.val[0], high.val[0])), vreinterpretq_f32_u16(vtrn2q_u16(low.val[1], high.val[1]))}};
}

}  // namespace BILLFISH_ISA
