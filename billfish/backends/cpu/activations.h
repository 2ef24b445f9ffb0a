// x to integers: per block of 32, one scale and int8 codes, or two planes of them that make 16 bits.
#pragma once
#include <algorithm>
#include <cmath>

#include "halves.h"
#include "problem.h"

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
  billfish::finish_block(out, row, b, usable ? largest / top : finite ? 0.0f : std::nanf(""), whole);
  int8_t* low = out.codes_of(row, b, PLANES - 1);
  for (int i = 0; i < 32; i++) low[i] = int8_t(whole[i]);  // of 16 bits, the digit with the same last 8
  if constexpr (PLANES == 2) {
    int8_t* high = out.codes_of(row, b, 0);
    for (int i = 0; i < 32; i++) high[i] = int8_t((whole[i] - low[i]) >> 8);
  }
}

// One row of x [k], padded with zeros to whole blocks.
template <int PLANES> inline void quantize_row_to(const float* x, int64_t k, const Activations8& out, int64_t row) {
  for (int64_t b = 0; b < k / 32; b++) quantize_block<PLANES>(x + b * 32, out, row, b);
  if (k % 32) {
    float padded[32] = {};
    std::copy(x + k / 32 * 32, x + k, padded);
    quantize_block<PLANES>(padded, out, row, k / 32);
  }
}

inline void quantize_row(const float* x, int64_t k, const Activations8& out, int64_t row) {
  (out.planes == 2 ? quantize_row_to<2> : quantize_row_to<1>)(x, k, out, row);
}

// 2^exponent, for -149 .. 127.
inline float power_of_two(int exponent) {
  return bits_to_float(exponent >= -126 ? uint32_t(exponent + 127) << 23 : 1u << (exponent + 149));
}

// One row of x [k]. False: it was to be divided, and is not finite.
inline bool lay_out_row(const float* x, int64_t k, const billfish::ActivationsExact& out, int64_t row) {
  const int64_t lanes = out.lanes, group = row / lanes * out.blocks, lane = row % lanes;
  float once = 1, again = 1, factors[4] = {1, 1, 1, 1};
  if (out.power) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < k; i++) largest = std::max(largest, float_to_bits(x[i]) & 0x7fffffff);
    if (largest >= 0x7f800000) return false;
    // 2^exponent <= largest < 2^(exponent + 1). It is taken off in two steps, because 2^149 is no float.
    const int exponent = largest ? std::ilogb(bits_to_float(largest)) : 0;
    once = power_of_two(-exponent / 2), again = power_of_two(-exponent + exponent / 2);
    out.power[row] = power_of_two(exponent);
    std::copy(BYTE_FACTORS, BYTE_FACTORS + 4, factors);
  }
  for (int64_t b = 0; b < out.blocks; b++) {
    float block[32] = {}, halves[2] = {}, all = 0;
    const int64_t count = std::min<int64_t>(32, k - b * 32);
    for (int64_t i = 0; i < count; i++) block[i] = x[b * 32 + i] * once * again;
    // Sums are taken in the order of the kernels.
    for (int i = 0; i < 16; i++) halves[0] += block[i], halves[1] += block[16 + i];
    for (int i = 0; i < 32; i++) all += block[i];
    float* sums = out.sums + (group + b) * 3 * lanes + lane;
    sums[0] = halves[0], sums[lanes] = halves[1], sums[2 * lanes] = all;
    float* to = out.x + (group + b) * 32 * lanes + lane;
    for (int i = 0; i < 32; i++) to[i * lanes] = block[i] * factors[i % 4];
  }
  return true;
}

}  // namespace BILLFISH_ISA
