// 16-bit floats in plain integer arithmetic, for where the machine has no instruction, and as the meaning of those.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace BILLFISH_ISA {

inline float bits_to_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline uint32_t float_to_bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

// s eeeee mmmmmmmmmm, bias 15.
inline float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000 | mantissa << 13);
  if (exponent != 0) return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
  float magnitude = float(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

// Round to nearest, ties to even. NaN stays NaN, what is too large becomes infinity.
inline uint16_t float_to_half(float f) {
  const uint32_t bits = float_to_bits(f), magnitude = bits & 0x7fffffff;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and above
  if (magnitude < 0x38800000) {  // subnormal: adding 0.5 puts the steps of 2^-24 at the last bit of the sum
    return uint16_t(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return uint16_t(sign | (rounded - 0x38000000) >> 13);
}

inline uint16_t float_to_bfloat(float f) {
  const uint32_t bits = float_to_bits(f);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// By instruction, where the compiler was told that there is one.
#if defined(__aarch64__)
inline float half_to_float_fast(uint16_t h) {
  __fp16 value;
  std::memcpy(&value, &h, 2);
  return value;
}
inline uint16_t float_to_half_fast(float f) {
  const __fp16 value = __fp16(f);
  uint16_t h;
  std::memcpy(&h, &value, 2);
  return h;
}
#elif defined(__F16C__)
inline float half_to_float_fast(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t float_to_half_fast(float f) { return uint16_t(_cvtss_sh(f, 0)); }
#else
inline float half_to_float_fast(uint16_t h) { return half_to_float(h); }
inline uint16_t float_to_half_fast(float f) { return float_to_half(f); }
#endif

}  // namespace BILLFISH_ISA
