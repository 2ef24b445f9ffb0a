// x to integers: per block of 32, one scale and int8 codes, or two planes of them that make 16 bits.
#pragma once
#include <algorithm>
#include <cmath>

#include "decode.h"
#include "halves.h"

namespace BILLFISH_ISA {

using billfish::Activations8;

// To the nearest integer, ties to even, for |x| < 2^22: the magic number again. 1.5 * 2^23 has its last bit worth 1, so
// adding it rounds x, and the integer is what its bits have more than the magic number's. Compilers vectorise this.
inline int32_t round_to_int(float x) { return int32_t(float_to_bits(x + 12582912.0f)) - 0x4b400000; }

// A block of 32 values of x. The codes are those that billfish.activations computes.
template <int PLANES> __attribute__((always_inline)) inline void quantize_block(const float* x, const Activations8& out, int64_t row, int64_t b) {
  constexpr float top = PLANES == 2 ? 32639.0f : 127.0f;
  // Magnitudes compare as their bits do, and integers are something a compiler takes the largest of in vectors.
  uint32_t largest_bits = 0;
  for (int i = 0; i < 32; i++) largest_bits = std::max(largest_bits, float_to_bits(x[i]) & 0x7fffffff);
  const float largest = bits_to_float(largest_bits), inverse = top / largest;
  const bool finite = largest_bits < 0x7f800000;
  const bool usable = finite && inverse <= 3.4e38f;  // else all zeros, or so small that 1/x overflows
  int32_t whole[32];
  for (int i = 0; i < 32; i++) whole[i] = round_to_int(x[i] * inverse);
  if (!usable) std::fill(whole, whole + 32, 0);
  int32_t part[PLANES][32];
  for (int i = 0; i < 32; i++) part[PLANES - 1][i] = int8_t(whole[i]);  // of 16 bits, the digit with the same last 8
  if constexpr (PLANES == 2)
    for (int i = 0; i < 32; i++) part[0][i] = (whole[i] - part[1][i]) >> 8;
  billfish::finish_block(out, row, b, usable ? largest / top : finite ? 0.0f : std::nanf(""), part, 256);
  for (int plane = 0; plane < PLANES; plane++) std::copy(part[plane], part[plane] + 32, out.codes_of(row, b, plane));
}

// 2^exponent, for -149 .. 127.
inline float power_of_two(int exponent) {
  return bits_to_float(exponent >= -126 ? uint32_t(exponent + 127) << 23 : 1u << (exponent + 149));
}

// The exponent of the largest magnitude of x [count]: 2^exponent <= largest < 2^(exponent + 1), or 128 where one is not finite.
inline int largest_exponent(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; i++) largest = std::max(largest, float_to_bits(x[i]) & 0x7fffffff);
  return largest >= 0x7f800000 ? 128 : largest >= 1 << 23 ? int(largest >> 23) - 127 : largest ? std::ilogb(bits_to_float(largest)) : -149;
}

// A block of 32 values of x, below 2 in magnitude, in four planes: digits to the base of 256, 30 bits of fixed point below the
// largest of them. Values of at least 1/64 of it are exact, and what others lose is 1/256 of what a float32 sum with the
// largest among its terms loses; the sums of products with codes are exact.
inline void quantize_exactly(const float* x, const Activations8& out, int64_t row, int64_t b) {
  const int exponent = std::max(-96, largest_exponent(x, 32));
  const float inverse = power_of_two(29 - exponent), scale = power_of_two(exponent - 29);
  // Digits from -128 to 127 are the bytes of the integer plus 0x80808080, less 128 each.
  uint32_t bytes[32];
  int32_t pair[2][32];
  for (int i = 0; i < 32; i++) bytes[i] = uint32_t(int32_t(std::nearbyint(x[i] * inverse))) + 0x80808080u;
  for (int i = 0; i < 32; i++) pair[0][i] = int32_t(bytes[i] >> 16) - 0x8080;
  for (int i = 0; i < 32; i++) pair[1][i] = int32_t(bytes[i] & 0xffff) - 0x8080;
  for (int plane = 0; plane < 4; plane++) {
    int8_t digits[32];
    for (int i = 0; i < 32; i++) digits[i] = int8_t(uint8_t(bytes[i] >> (24 - 8 * plane)) ^ 0x80);
    std::copy(digits, digits + 32, out.codes_of(row, b, plane));
  }
  billfish::finish_block(out, row, b, scale, pair, 65536);
}

// Blocks [first, last) of a row of x [k], which is padded with zeros to whole blocks: quantize(block of 32, number of the block).
template <class F> inline void each_block(const float* x, int64_t k, int64_t first, int64_t last, F quantize) {
  for (int64_t b = first; b < std::min(last, k / 32); b++) quantize(x + b * 32, b);
  if (last > k / 32) {
    float padded[32] = {};
    std::copy(x + k / 32 * 32, x + k, padded);
    quantize(padded, k / 32);
  }
}

// Blocks [first, last) of row `row`. False: it was to be exact, and is not finite.
inline bool quantize_row(const float* x, int64_t k, const Activations8& out, int64_t row, int64_t first, int64_t last) {
  if (out.planes == billfish::EXACT_PLANES) {
    const int exponent = largest_exponent(x, k);
    if (exponent == 128) return false;
    if (first == 0) out.power[row] = power_of_two(exponent);
    const float once = power_of_two(-exponent / 2), again = power_of_two(-exponent + exponent / 2);  // 2^149 is no float
    each_block(x, k, first, last, [&](const float* block, int64_t b) {
      float divided[32];
      for (int i = 0; i < 32; i++) divided[i] = block[i] * once * again;
      quantize_exactly(divided, out, row, b);
    });
  } else if (out.planes == 2) {
    each_block(x, k, first, last, [&](const float* block, int64_t b) INLINED { quantize_block<2>(block, out, row, b); });
  } else {
    each_block(x, k, first, last, [&](const float* block, int64_t b) INLINED { quantize_block<1>(block, out, row, b); });
  }
  return true;
}

// Blocks [first, last) of a row of x [k] as it is, padded with zeros to whole blocks.
inline void lay_out_row(const float* x, int64_t k, const billfish::ActivationsExact& out, int64_t row, int64_t first, int64_t last) {
  float* to = out.x + row / 4 * out.blocks * 32 * 4 + row % 4;
  for (int64_t i = first * 32; i < last * 32; i++) to[i * 4] = i < k ? x[i] : 0.0f;
}

}  // namespace BILLFISH_ISA
