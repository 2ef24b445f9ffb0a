// NEON with dot products (ARMv8.2): vectors of 16 bytes, 4 lanes of 32 bits.
#pragma once
#include <arm_neon.h>

#include <cstdint>

namespace BILLFISH_ISA {

constexpr int LANES = 4;
constexpr int TILE_ROWS = 16;

using Bytes = uint8x16_t;
using Ints = int32x4_t;
using Floats = float32x4_t;

inline Bytes load_bytes(const uint8_t* p) { return vld1q_u8(p); }
inline void store_bytes(uint8_t* p, Bytes v) { vst1q_u8(p, v); }
inline Bytes splat_byte(uint8_t x) { return vdupq_n_u8(x); }
inline Bytes bit_and(Bytes a, Bytes b) { return vandq_u8(a, b); }
inline Bytes bit_or(Bytes a, Bytes b) { return vorrq_u8(a, b); }
inline Bytes subtract(Bytes a, Bytes b) { return vsubq_u8(a, b); }
template <int N> Bytes shift_right(Bytes a) {
  if constexpr (N == 0) return a;
  else return vshrq_n_u8(a, N);
}
template <int N> Bytes shift_left(Bytes a) {
  if constexpr (N == 0) return a;
  else return vshlq_n_u8(a, N);
}
// table[index] for each byte, index < 16.
inline Bytes lookup(const uint8_t* table, Bytes index) { return vqtbl1q_u8(vld1q_u8(table), index); }

inline Ints splat_int(int32_t x) { return vdupq_n_s32(x); }
inline Ints add(Ints a, Ints b) { return vaddq_s32(a, b); }
template <int N> Ints shift_left(Ints a) { return vshlq_n_s32(a, N); }

// 16 bytes of x. dot<L> adds, in each lane, the products of that lane's four signed weights with bytes 4L..4L+3.
using Activations = int8x16_t;
inline Activations load_activations(const int8_t* p) { return vld1q_s8(p); }
template <int L, bool SIGNED> Ints dot(Ints sum, Bytes w, Activations x) {
  return vdotq_laneq_s32(sum, vreinterpretq_s8_u8(w), x, L);
}
// What dot<L, true> adds to the weights before it multiplies; the caller takes it away again through the starting sum.
constexpr int SIGNED_BIAS = 0;

inline Floats load_floats(const float* p) { return vld1q_f32(p); }
inline void store_floats(float* p, Floats v) { vst1q_f32(p, v); }
inline Floats splat(float x) { return vdupq_n_f32(x); }
inline Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
inline Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
inline Floats multiply_add(Floats sum, Floats a, Floats b) { return vfmaq_f32(sum, a, b); }
inline Floats to_floats(Ints v) { return vcvtq_f32_s32(v); }

// Byte K of each 32-bit lane, as a signed number: alone at the top, it is a fixed-point number with 24 fraction bits.
template <int K> Floats signed_byte(Bytes v) {
  int32x4_t word = vreinterpretq_s32_u8(v);
  if constexpr (K < 3) word = vshlq_n_s32(word, 24 - 8 * K);
  if constexpr (K > 0) word = vandq_s32(word, vdupq_n_s32(int32_t(0xff000000)));
  return vcvtq_n_f32_s32(word, 24);
}

// Four values of x; multiply_add_x<L> multiplies with value L.
using FloatActivations = float32x4_t;
inline FloatActivations load_x(const float* p) { return vld1q_f32(p); }
template <int L> Floats multiply_add_x(Floats sum, Floats w, FloatActivations x) { return vfmaq_laneq_f32(sum, w, x, L); }

template <int L> Floats multiply_x(Floats w, FloatActivations x) { return vmulq_laneq_f32(w, x, L); }

// LANES stored numbers to float32.
inline Floats halves_to_floats(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
inline uint32x4_t widen(const uint8_t* p) {
  uint32_t four;
  __builtin_memcpy(&four, p, 4);
  return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
}
inline Floats unsigned_to_floats(const uint8_t* p) { return vcvtq_f32_u32(widen(p)); }
inline Floats low_nibbles_to_floats(const uint8_t* p) { return vcvtq_f32_u32(vandq_u32(widen(p), vdupq_n_u32(15))); }
inline Floats high_nibbles_to_floats(const uint8_t* p) { return vcvtq_f32_u32(vshrq_n_u32(widen(p), 4)); }
inline Floats signed_to_floats(const uint8_t* p) {
  return vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_u32(widen(p)), 24), 24));
}
// Bytes e to 2^(e - 127), for e from 1 to 254.
inline Floats exponents_to_floats(const uint8_t* p) { return vreinterpretq_f32_u32(vshlq_n_u32(widen(p), 23)); }
// Bytes seeeemmm to s eeee mmm as a half whose bias is 8 too large: times 2^-8 of the E4M3 value.
inline Floats e4m3_to_floats(const uint8_t* p) {
  uint32x4_t b = widen(p);
  uint32x4_t bits = vorrq_u32(vshlq_n_u32(vandq_u32(b, vdupq_n_u32(0x80)), 8), vshlq_n_u32(vandq_u32(b, vdupq_n_u32(0x7f)), 7));
  return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(bits)));
}

}  // namespace BILLFISH_ISA
