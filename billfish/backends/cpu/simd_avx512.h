// AVX-512 with VNNI: vectors of 64 bytes, 16 lanes of 32 bits.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace BILLFISH_ISA {

constexpr int LANES = 16;
constexpr int TILE_ROWS = 32;

using Bytes = __m512i;
struct Ints { __m512i v; };  // a type of its own: the intrinsics have one for all integers
using Floats = __m512;

inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(uint8_t* p, Bytes v) { _mm512_storeu_si512(p, v); }
inline Bytes splat_byte(uint8_t x) { return _mm512_set1_epi8(char(x)); }
inline Bytes bit_and(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
inline Bytes bit_or(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
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
inline Bytes lookup(const uint8_t* table, Bytes index) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), index);
}

inline Ints splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
template <int N> Ints shift_left(Ints a) { return {_mm512_slli_epi32(a.v, N)}; }

struct Activations { const int8_t* p; };
inline Activations load_activations(const int8_t* p) { return {p}; }
// vpdpbusd takes the weights as unsigned bytes, so signed ones get 128 added, by flipping their top bit.
template <int L, bool SIGNED> Ints dot(Ints sum, Bytes w, Activations x) {
  int32_t four;
  std::memcpy(&four, x.p + 4 * L, 4);
  if constexpr (SIGNED) w = _mm512_xor_si512(w, _mm512_set1_epi8(char(0x80)));
  return {_mm512_dpbusd_epi32(sum.v, w, _mm512_set1_epi32(four))};
}
constexpr int SIGNED_BIAS = 128;

inline Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
inline void store_floats(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats multiply_add(Floats sum, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, sum); }
inline Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v.v); }
template <int K> Floats signed_byte(Bytes v) {
  if constexpr (K < 3) v = _mm512_slli_epi32(v, 24 - 8 * K);
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(v, 24));
}

struct FloatActivations { const float* p; };
inline FloatActivations load_x(const float* p) { return {p}; }
template <int L> Floats multiply_add_x(Floats sum, Floats w, FloatActivations x) {
  return _mm512_fmadd_ps(w, _mm512_set1_ps(x.p[L]), sum);
}

template <int L> Floats multiply_x(Floats w, FloatActivations x) { return _mm512_mul_ps(w, _mm512_set1_ps(x.p[L])); }

inline Floats halves_to_floats(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline __m512i widen(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Floats unsigned_to_floats(const uint8_t* p) { return _mm512_cvtepi32_ps(widen(p)); }
inline Floats low_nibbles_to_floats(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_and_si512(widen(p), _mm512_set1_epi32(15)));
}
inline Floats high_nibbles_to_floats(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_srli_epi32(widen(p), 4)); }
inline Floats signed_to_floats(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// Bytes e to 2^(e - 127), for e from 1 to 254.
inline Floats exponents_to_floats(const uint8_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(widen(p), 23)); }
// Bytes seeeemmm to s eeee mmm as a half whose bias is 8 too large: times 2^-8 of the E4M3 value.
inline Floats e4m3_to_floats(const uint8_t* p) {
  const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(b, _mm256_set1_epi16(0x80)), 8);
  return _mm512_cvtph_ps(_mm256_or_si256(sign, _mm256_slli_epi16(_mm256_and_si256(b, _mm256_set1_epi16(0x7f)), 7)));
}

}  // namespace BILLFISH_ISA
