// x to integers: per block of 32, or per span of them, one scale and integers of one int8 digit, or of two that make 16 bits.
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

// Up to BATCH blocks of 32 values of x, whole spans, from block b of a row on. The codes are those that billfish.core.activations computes, and so are
// the scales, times `divide`, a power of two.
// First the largest of each, then the divisions, then the codes, so that no block waits for the one before. Loops that become
// eight vectors or fewer are unrolled, which the compiler does not do by itself and which spares a tenth of the time.
constexpr int BATCH = 8;
template <int DIGITS> inline void quantize_blocks(const float* x, float divide, const RowOfX& out, int64_t b, int count) {
  constexpr float top = DIGITS == 2 ? 32639.0f : 127.0f;
  // Magnitudes compare as their bits do, and integers are something a compiler takes the largest of in vectors.
  uint32_t bits[BATCH] = {};
  for (int block = 0; block < count; block++) {
    uint32_t largest = 0;
#pragma GCC unroll 8
    for (int i = 0; i < 32; i++) largest = std::max(largest, float_to_bits(x[block * 32 + i]) & 0x7fffffff);
    bits[block] = largest;
  }
  const int span = out.span();
  for (int first = 0; span > 1 && first < count; first += span) {
    const int last = std::min(count, first + span);
    std::fill(bits + first, bits + last, *std::max_element(bits + first, bits + last));
  }
  float scale[BATCH], inverse[BATCH];
  for (int i = 0; i < BATCH; i++) scale[i] = bits_to_float(bits[i]) / top, inverse[i] = top / bits_to_float(bits[i]);
  for (int block = 0; block < count; block++, x += 32) {
    // To the nearest integer, ties to even: the magic number again. 1.5 * 2^23 has its last bit worth 1, so adding it rounds,
    // and of its bits the last 16 are zero, so they are the integer's afterwards.
    int16_t whole[32];
#pragma GCC unroll 8
    for (int i = 0; i < 32; i++) whole[i] = int16_t(float_to_bits(x[i] * inverse[block] + 12582912.0f));
    float factor = scale[block] * divide;
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
  for (int first = 0; span > 1 && first < count; first += span) out.join(b + first, std::min(span, count - first));
}

// 2^exponent, for -149 .. 127.
inline float power_of_two(int exponent) {
  return bits_to_float(exponent >= -126 ? uint32_t(exponent + 127) << 23 : 1u << (exponent + 149));
}

// The exponent of a magnitude, given as its bits: 2^exponent <= magnitude < 2^(exponent + 1). 128 where it is not finite, and less than
// all others for 0.
inline int exponent_of(uint32_t bits) { return bits >= 1 << 23 ? int(bits >> 23) - 127 : std::ilogb(bits_to_float(bits)); }

// Rows are divided by a power of two that brings the largest value of a row between 2^-64 and 2^65: the exponent of it, 0 for most rows.
// So the product of 32 values with codes and scales of up to 2^32 is finite, and no scale of x is subnormal.
inline int power_of_row(const float* x, int64_t k) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < k; i++) largest = std::max(largest, float_to_bits(x[i]) & 0x7fffffff);
  const int exponent = largest ? std::min(exponent_of(largest), 127) : 0;
  return exponent - std::clamp(exponent, -64, 64);
}

// Four digits hold 30 bits below the largest value of a block, so values of at least 2^-6 of it are exact, and what is 2^-spread of it
// is off by up to 2^(spread - 30) of itself. A float32 sum of k products may be off by k * 2^-24 of the sum of their magnitudes, and so
// may each value of x be here, 2^-12 of itself at most.
constexpr int EXACT_SPREAD = 6, LARGEST_SPREAD = 18;
inline int spread_of(int64_t k) { return std::min(EXACT_SPREAD + 63 - __builtin_clzll(uint64_t(k)), LARGEST_SPREAD); }
// Where values differ by more, none goes in digits: next to the largest of them, minimums and zero points would drown the others.
constexpr int DROWNING_SPREAD = 20;

// The magnitudes of a block of 32 values, as bits: the largest, and the smallest of those that are not 0, less 1.
struct Magnitudes { uint32_t largest, smallest; };
inline Magnitudes magnitudes_of(const float* x) {
  uint32_t largest = 0, smallest = ~0u;  // 0 is more than all others when 1 is taken off
#pragma GCC unroll 8
  for (int i = 0; i < 32; i++) {
    const uint32_t magnitude = float_to_bits(x[i]) & 0x7fffffff;
    largest = std::max(largest, magnitude), smallest = std::min(smallest, magnitude - 1);
  }
  return {largest, smallest};
}

// A block of 32 values of x / 2^power, in four digits to the base of 256. The sums of products with codes are exact. A block is wide
// where digits do not hold all of its values well enough: then those that they do not hold exactly, or all 32, stay float32.
inline void quantize_exactly(const float* x, Magnitudes magnitudes, int power, int spread, const RowOfX& out, int64_t b) {
  const auto [largest, smallest] = magnitudes;
  const int top = largest ? exponent_of(largest) : power, bottom = largest ? exponent_of(smallest + 1) : power;
  const bool drowning = top == 128 || top < power - 96 || bottom < top - DROWNING_SPREAD, wide = drowning || bottom < top - spread;
  const float divide = power_of_two(-power);
  float divided[32];
#pragma GCC unroll 8
  for (int i = 0; i < 32; i++) divided[i] = x[i] * divide;
  if (__builtin_expect(wide, 0)) {
    float* rest = out.rest(b);
    for (int i = 0; i < 32; i++) {
      const bool stays = drowning || exponent_of(float_to_bits(x[i]) & 0x7fffffff) < top - EXACT_SPREAD;
      rest[i] = stays ? x[i] : 0.0f, divided[i] = stays ? 0.0f : divided[i];
    }
  }
  out.set_wide(b, wide);
  const int exponent = drowning ? 0 : top - power;
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
#if defined(__clang__)  // would take the loop apart first, and then add 16 single numbers
#pragma clang loop unroll(disable)
#endif
    for (int i = 0; i < 16; i++) high += whole[half * 16 + i] >> 16, low += whole[half * 16 + i] & 0xffff;
    halves[0][half] = int32_t(high) - 16 * 0x8080, halves[1][half] = int32_t(low) - 16 * 0x8080;
  }
  out.finish(b, scale, halves, 65536);
}

// Blocks [first, last) of a row of x [k], which is padded with zeros to whole blocks: quantize(blocks of 32, number of the first, how
// many), which are up to BATCH and whole spans, but for the last one.
template <class F> inline void each_batch(const float* x, int64_t k, int span, int64_t first, int64_t last, F quantize) {
  const int64_t whole = std::min<int64_t>(last, k / (span * 32) * span);
  for (int64_t b = first; b < whole; b += BATCH) quantize(x + b * 32, b, int(std::min<int64_t>(BATCH, whole - b)));
  if (last > whole) {
    float padded[billfish::LARGEST_SPAN_OF_X * 32] = {};
    std::copy(x + whole * 32, x + k, padded);
    quantize(padded, whole, int(last - whole));
  }
}

// Blocks [first, last) of row `row`.
inline void quantize_row(const float* x, int64_t k, const Activations8& all, int64_t row, int64_t first, int64_t last) {
  const RowOfX out(all, row);
  const int power = power_of_row(x, k), spread = spread_of(k);
  const float divide = power_of_two(-power);
  if (first == 0) out.set_power(power_of_two(power));
  each_batch(x, k, all.span, first, last, [&](const float* blocks, int64_t b, int count) {
    if (all.digits == 1) quantize_blocks<1>(blocks, divide, out, b, count);
    else if (all.digits == 2) quantize_blocks<2>(blocks, divide, out, b, count);
    else {
      // All magnitudes first: the many steps that each of them takes do not wait for another block's.
      Magnitudes magnitudes[BATCH];
      for (int i = 0; i < count; i++) magnitudes[i] = magnitudes_of(blocks + i * 32);
      for (int i = 0; i < count; i++) quantize_exactly(blocks + i * 32, magnitudes[i], power, spread, out, b + i);
    }
  });
}

// Blocks [first, last) of a row of x [k] as it is, padded with zeros to whole blocks.
inline void lay_out_row(const float* x, int64_t k, const billfish::ActivationsExact& out, int64_t row, int64_t first, int64_t last) {
  const int64_t lanes = out.lanes;
  float* to = out.x + row / lanes * lanes * out.blocks * 32 + row % lanes;
  for (int64_t i = first * 32; i < last * 32; i++) to[i * lanes] = i < k ? x[i] : 0.0f;
}

}  // namespace BILLFISH_ISA
