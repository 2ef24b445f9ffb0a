// x to integers: per block of 32, one scale and integers of one int8 digit, or of two that make 16 bits.
#pragma once
#include <algorithm>
#include <cmath>

#include "layout/problem.h"
#include "simd/halves.h"
#include "simd/unroll.h"

namespace BILLFISH_ISA {

using billfish::Activations8;
using billfish::RowOfX;

// Of 32 codes, what each half adds up to.
inline void add_halves(const int16_t* codes, int32_t (&halves)[2]) {
  for (int half = 0; half < 2; half++) {
    int16_t sum = 0;
#pragma GCC unroll 8
    for (int i = 0; i < 16; i++) sum = int16_t(sum + codes[half * 16 + i]);
    halves[half] = sum;
  }
}

// Up to BATCH blocks of 32 values of x, from block b of a row on. The codes are those that billfish.activations computes.
// First the largest of each, then the divisions, then the codes, so that no block waits for the one before. Loops that become
// eight vectors or fewer are unrolled, which the compiler does not do by itself and which spares a tenth of the time.
constexpr int BATCH = 8;
template <int DIGITS> inline void quantize_blocks(const float* x, const RowOfX& out, int64_t b, int count) {
  constexpr float top = DIGITS == 2 ? 32639.0f : 127.0f;
  // Magnitudes compare as their bits do, and integers are something a compiler takes the largest of in vectors.
  uint32_t bits[BATCH] = {};
  for (int block = 0; block < count; block++) {
    uint32_t largest = 0;
#pragma GCC unroll 8
    for (int i = 0; i < 32; i++) largest = std::max(largest, float_to_bits(x[block * 32 + i]) & 0x7fffffff);
    bits[block] = largest;
  }
  float scale[BATCH], inverse[BATCH];
  for (int i = 0; i < BATCH; i++) scale[i] = bits_to_float(bits[i]) / top, inverse[i] = top / bits_to_float(bits[i]);
  for (int block = 0; block < count; block++, x += 32) {
    // To the nearest integer, ties to even: the magic number again. 1.5 * 2^23 has its last bit worth 1, so adding it rounds,
    // and of its bits the last 16 are zero, so they are the integer's afterwards.
    int16_t whole[32];
#pragma GCC unroll 8
    for (int i = 0; i < 32; i++) whole[i] = int16_t(float_to_bits(x[i] * inverse[block] + 12582912.0f));
    float factor = scale[block];
    if (!(inverse[block] <= 3.4e38f) || bits[block] >= 0x7f800000) {  // zeros, or so small that 1/x overflows, or not finite
      std::fill(whole, whole + 32, int16_t(0));
      factor = bits[block] < 0x7f800000 ? 0.0f : std::nanf("");
    }
    int8_t* codes = out.codes(b + block, DIGITS - 1);
#pragma GCC unroll 8
    for (int i = 0; i < 32; i++) codes[i] = int8_t(whole[i]);  // of 16 bits, the digit with the same last 8
    int32_t halves[DIGITS][2];
    if constexpr (DIGITS == 1) {
      add_halves(whole, halves[0]);
    } else {
      int16_t low[32], high[32];
#pragma GCC unroll 8
      for (int i = 0; i < 32; i++) low[i] = int8_t(whole[i]), high[i] = int16_t((whole[i] - low[i]) >> 8);
      codes = out.codes(b + block, 0);
#pragma GCC unroll 8
      for (int i = 0; i < 32; i++) codes[i] = int8_t(high[i]);
      add_halves(high, halves[0]), add_halves(low, halves[1]);
    }
    out.finish(b + block, factor, halves, 256);
  }
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

// A block of 32 values of x, which `once` and `again` bring below 2 in magnitude, in four digits to the base of 256, 30 bits
// of fixed point below the largest of them. Values of at least 1/64 of it are exact, and what others lose is 1/256 of what a
// float32 sum with the largest among its terms loses; the sums of products with codes are exact.
inline void quantize_exactly(const float* x, float once, float again, const RowOfX& out, int64_t b) {
  float divided[32];
#pragma GCC unroll 8
  for (int i = 0; i < 32; i++) divided[i] = x[i] * once * again;
  const int exponent = std::max(-96, largest_exponent(divided, 32));
  const float inverse = power_of_two(29 - exponent), scale = power_of_two(exponent - 29);
  // Digits from -128 to 127 are the bytes of the integer plus 0x80808080, less 128 each.
  uint32_t whole[32];
#pragma GCC unroll 8
  for (int i = 0; i < 32; i++) whole[i] = uint32_t(int32_t(std::nearbyint(divided[i] * inverse))) + 0x80808080u;
  unroll<4>([&](auto digit) INLINED {
    int8_t* digits = out.codes(b, digit);
    for (int i = 0; i < 32; i++) digits[i] = int8_t(uint8_t(whole[i] >> (24 - 8 * digit)) ^ 0x80);
  });
  int32_t halves[2][2];
  for (int half = 0; half < 2; half++) {
    uint32_t high = 0, low = 0;
    for (int i = 0; i < 16; i++) high += whole[half * 16 + i] >> 16, low += whole[half * 16 + i] & 0xffff;
    halves[0][half] = int32_t(high) - 16 * 0x8080, halves[1][half] = int32_t(low) - 16 * 0x8080;
  }
  out.finish(b, scale, halves, 65536);
}

// Blocks [first, last) of a row of x [k], which is padded with zeros to whole blocks: quantize(blocks of 32, number of the first, how
// many), which are up to BATCH.
template <class F> inline void each_batch(const float* x, int64_t k, int64_t first, int64_t last, F quantize) {
  const int64_t whole = std::min(last, k / 32);
  for (int64_t b = first; b < whole; b += BATCH) quantize(x + b * 32, b, int(std::min<int64_t>(BATCH, whole - b)));
  if (last > k / 32) {
    float padded[32] = {};
    std::copy(x + k / 32 * 32, x + k, padded);
    quantize(padded, k / 32, 1);
  }
}

// Blocks [first, last) of row `row`. False: it was to be exact, and is not finite.
inline bool quantize_row(const float* x, int64_t k, const Activations8& all, int64_t row, int64_t first, int64_t last) {
  const RowOfX out(all, row);
  if (all.digits == billfish::EXACT_DIGITS) {
    const int exponent = largest_exponent(x, k);
    if (exponent == 128) return false;
    if (first == 0) all.power[row] = power_of_two(exponent);
    const float once = power_of_two(-exponent / 2), again = power_of_two(-exponent + exponent / 2);  // 2^149 is no float
    each_batch(x, k, first, last, [&](const float* blocks, int64_t b, int count) {
      for (int i = 0; i < count; i++) quantize_exactly(blocks + i * 32, once, again, out, b + i);
    });
  } else {
    each_batch(x, k, first, last, [&](const float* blocks, int64_t b, int count) {
      all.digits == 2 ? quantize_blocks<2>(blocks, out, b, count) : quantize_blocks<1>(blocks, out, b, count);
    });
  }
  return true;
}

// Blocks [first, last) of a row of x [k] as it is, padded with zeros to whole blocks.
inline void lay_out_row(const float* x, int64_t k, const billfish::ActivationsExact& out, int64_t row, int64_t first, int64_t last) {
  const int64_t lanes = out.lanes;
  float* to = out.x + row / lanes * lanes * out.blocks * 32 + row % lanes;
  for (int64_t i = first * 32; i < last * 32; i++) to[i * lanes] = i < k ? x[i] : 0.0f;
}

}  // namespace BILLFISH_ISA
