// AVX-512 with VNNI: vectors of 64 bytes, 16 lanes of 32 bits.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "simd/wide_sums.h"

namespace BILLFISH_ISA {

constexpr int LANES = 16;
constexpr int TILE_ROWS = 32;

using Bytes = __m512i;
struct Ints { __m512i v; };  // a type of its own: the intrinsics have one for all integers
using Floats = __m512;

inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes load_operand(const uint8_t* p) { return load_bytes(p); }
inline void store_bytes(uint8_t* p, Bytes v) { _mm512_storeu_si512(p, v); }
inline Bytes splat_byte(uint8_t x) { return _mm512_set1_epi8(char(x)); }
inline Bytes bit_and(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
inline Bytes bit_or(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
inline Bytes bit_xor(Bytes a, Bytes b) { return _mm512_xor_si512(a, b); }
inline Bytes subtract(Bytes a, Bytes b) { return _mm512_sub_epi8(a, b); }
// There are no byte shifts: 16-bit ones, and then away with what came over from the neighbour.
template <int N> Bytes shift_right(Bytes a) {
  if constexpr (N == 0) return a;
  else return _mm512_and_si512(_mm512_srli_epi16(a, N), _mm512_set1_epi8(char(0xff >> N)));
}
template <int N> Bytes shift_left(Bytes a) {
  if constexpr (N == 0) return a;
  else return _mm512_and_si512(_mm512_slli_epi16(a, N), _mm512_set1_epi8(char(0xff << N)));
}
// The bits of `other` where `mask` has ones, else those of a, which are 0 there.
inline Bytes merge(Bytes a, Bytes other, int mask) {
  return _mm512_ternarylogic_epi32(splat_byte(uint8_t(mask)), other, a, 0xca);  // mask ? other : a
}
// The top N bits of a, and below them b shifted right by N.
template <int N> Bytes insert_right(Bytes a, Bytes b) { return merge(a, _mm512_srli_epi16(b, N), 0xff >> N); }
inline Bytes high_nibbles(Bytes a) { return shift_right<4>(a); }
constexpr int HIGH_FLIP = 0;
inline Bytes lookup(const uint8_t* table, Bytes index) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), index);
}

inline Ints splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints subtract(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
template <int N> Ints shift_left(Ints a) { return {_mm512_slli_epi32(a.v, N)}; }
// As shift_left<8>, on port 5 instead of port 0, where conversions and products are.
inline Ints times_256(Ints a) {
  static constexpr uint8_t FROM[16] = {128, 0, 1, 2, 128, 4, 5, 6, 128, 8, 9, 10, 128, 12, 13, 14};  // 128: a zero
  return {_mm512_shuffle_epi8(a.v, _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(FROM))))};
}

struct Activations { const int8_t* p; };
inline Activations load_activations(const int8_t* p) { return {p}; }
constexpr bool X_IN_MEMORY = true;  // dot() takes x from where it lies, and not a lane of a register
// vpdpbusd takes the weights as unsigned bytes, so signed ones come with 128 added.
template <int L, billfish::Operand> Ints dot(Ints sum, Bytes w, Activations x) {
  int32_t four;
  std::memcpy(&four, x.p + 4 * L, 4);
  return {_mm512_dpbusd_epi32(sum.v, w, _mm512_set1_epi32(four))};
}
constexpr int BUFFER_ROWS = 8, PACKED_BUFFER_ROWS = 13, GROUP_BUFFER_ROWS = 13;  // see simd/neon.h
constexpr bool FEW_FROM_STREAM = true;
constexpr int BUFFERED_ONE_BY_ONE = 0;
constexpr bool TAILS = false;
constexpr int HELD_ROWS = 0;
constexpr int SLICES_OF_FEW = 1, LINES_OF_SCALES = 1;
// Two dot products begin in a cycle and each takes 5, so that 10 sums or more keep both pipes busy: 8 rows by 2 row vectors have 16. Four bytes of
// x in all lanes then serve two sums and give their register to the next, which leaves 27 of 32 for sums and totals.
constexpr int MANY_TOGETHER = 8;
constexpr bool ROW_OF_X_FIRST = true;
constexpr bool DIGITS_IN_ONE_SUM = true;
constexpr int ONE_BY_ONE_16 = 2;  // see simd/neon.h
constexpr int ONE_ROW_AHEAD = 8192;  // see simd/neon.h
constexpr int QUADS_TOGETHER = 1;  // see simd/neon.h
// What bytes of signed weights have more than their values when dot() gets them.
constexpr int SIGNED_BIAS = 128;
// Whether dot() takes any byte, two nibbles at once for example.
constexpr bool WHOLE_BYTES_FIT = true;

inline Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load_constant(const float* p) { return load_floats(p); }  // see simd/neon.h
inline void store_floats(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline float largest(Floats v) { return _mm512_reduce_max_ps(v); }
inline Floats multiply_add(Floats sum, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, sum); }
inline Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v.v); }
// p * 2^n, for a p between 0.5 and 2 and shifted = n + 1.5 * 2^23: n is in its last bits, and goes to the exponent of p.
inline Floats times_power(Floats p, Floats shifted) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}

// Integer sums below 2^22 that start at the bits of 1.5 * 2^23 are floats when they end; see simd/neon.h.
constexpr int32_t SUM_START = 0x4b400000;
constexpr float SUM_OFFSET = 12582912.0f;
constexpr int START_INTS = 1;
inline Ints load_start(const int32_t* p) { return {_mm512_set1_epi32(*p)}; }
template <bool MAGIC> Floats sum_to_floats(Ints v) {
  if constexpr (MAGIC) return _mm512_sub_ps(_mm512_castsi512_ps(v.v), splat(SUM_OFFSET));
  else return to_floats(v);
}
template <bool MAGIC> Floats difference_to_floats(Ints a, Ints b) {
  if constexpr (MAGIC) return _mm512_sub_ps(_mm512_castsi512_ps(a.v), _mm512_castsi512_ps(b.v));
  else return to_floats(subtract(a, b));
}
template <bool MAGIC> Floats scale_sum(Ints v, Floats scale, const float* offset) {
  if constexpr (MAGIC) return _mm512_fmadd_ps(_mm512_castsi512_ps(v.v), scale, load_floats(offset));
  else return multiply(to_floats(v), scale);
}

// Byte K of each 32-bit lane, less byte_offset(bias).
inline Floats byte_offset(int bias) { return splat(float(bias)); }
template <int K> Floats byte_to_floats(Bytes v, Floats offset) {
  if constexpr (K > 0) v = _mm512_srli_epi32(v, 8 * K);
  if constexpr (K < 3) v = _mm512_and_si512(v, _mm512_set1_epi32(255));
  return _mm512_sub_ps(_mm512_cvtepi32_ps(v), offset);
}

// Byte K of each lane, less a bias, times the scale; offset is (-BYTE_START - bias) * scale.
constexpr float BYTE_START = 0;
template <int K> Floats times_byte(Floats scale, const float* offset, Bytes v) { return multiply_add(load_floats(offset), byte_to_floats<K>(v, splat(0)), scale); }

// For exact products: whether few rows go through dot(), and for many, vectors of sums that registers hold for each of four rows, and how many times four.
constexpr bool EXACT_IN_DIGITS = true;
constexpr int SUM_VECTORS = 2, SUM_BUNDLES = 2;
constexpr int REGISTER_ROWS = 16;

struct FloatActivations { const float* p; };
inline FloatActivations load_x(const float* p) { return {p}; }
template <int L> Floats multiply_add_x(Floats sum, Floats w, FloatActivations x) {
  return _mm512_fmadd_ps(w, _mm512_set1_ps(x.p[L]), sum);
}

template <int L> Floats multiply_x(Floats w, FloatActivations x) { return _mm512_mul_ps(w, _mm512_set1_ps(x.p[L])); }

inline Floats halves_to_floats(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Floats bfloats_to_floats(const uint8_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
inline __m512i widen(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
// (field - bias) * d for the rows from ROW on, where the field of a byte is byte >> SHIFT & MASK; offset is -bias * d.
inline Floats times_bytes_offset(Floats d, int bias) { return multiply(d, splat(float(-bias))); }
template <int ROW, int SHIFT, int MASK> Floats byte_fields(const uint8_t* rows, int bias) {  // field - bias
  return _mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(widen(rows + ROW), SHIFT), _mm512_set1_epi32(MASK))), splat(float(bias)));
}
template <int ROW, int SHIFT, int MASK> Floats times_bytes(Floats d, const float* offset, const uint8_t* rows) {
  return multiply_add(load_floats(offset), byte_fields<ROW, SHIFT, MASK>(rows, 0), d);
}
// Bytes e to 2^(e - 127), for e from 1 to 254.
template <int ROW> Floats exponents_to_floats(const uint8_t* rows) { return _mm512_castsi512_ps(_mm512_slli_epi32(widen(rows + ROW), 23)); }
// Bytes 0eeeemmm to a half whose exponent is biased by 8 more: 2^-8 of the E4M3 value.
template <int ROW> Floats e4m3_to_floats(const uint8_t* rows) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + ROW))), 7));
}

// Four k of LANES rows, as Bytes has them: k[j] is byte j of every lane, as a number.
struct FourFloats {
  Floats k[4];
};
// Bytes seeeemmm to 2^-120 of the E4M3 value: sign, exponent and mantissa where float32 has them. A shift that keeps the sign brings all three
// into place, with copies of the sign between them.
template <int K> Floats e4m3_byte(Bytes v) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * K), 4), _mm512_set1_epi32(int32_t(0x87f00000))));
}
inline FourFloats e4m3_to_floats(Bytes v) { return {{e4m3_byte<0>(v), e4m3_byte<1>(v), e4m3_byte<2>(v), e4m3_byte<3>(v)}}; }
// A look-up in 16 float32, which takes four bits of each index.
using FloatTable = Floats;
inline FloatTable load_table(const uint8_t* numbers) { return _mm512_loadu_ps(numbers); }
template <int K> Floats look_up_byte(const FloatTable& table, Bytes index) { return _mm512_permutexvar_ps(_mm512_srli_epi32(index, 8 * K), table); }
inline FourFloats look_up(const FloatTable& table, Bytes index) {
  return {{look_up_byte<0>(table, index), look_up_byte<1>(table, index), look_up_byte<2>(table, index), look_up_byte<3>(table, index)}};
}

}  // namespace BILLFISH_ISA
