// The parts of a decoder that are not products with weights, for one ISA level. Counts are multiples of 16, so loops over
// 16 numbers have no rest, and a compiler turns them into vectors.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "decoder/kernel_table.h"
#include "simd/exponential.h"
#include "simd/halves.h"
#include "simd/unroll.h"

namespace BILLFISH_ISA {

constexpr int COLUMNS = 16;

// Sixteen sums to one, always in the same order: four by four, in the compiler's own vectors, and then these.
inline float total_of(const float* sums) {
  typedef float Four __attribute__((vector_size(16)));
  Four four[4];
  std::memcpy(four, sums, sizeof four);
  const Four total = (four[0] + four[1]) + (four[2] + four[3]);
  return (total[0] + total[1]) + (total[2] + total[3]);
}

// RMSNorm: x / sqrt(mean(x^2) + epsilon) * weight. `out` may be x.
inline void normalize(const float* x, const float* weight, float epsilon, int64_t count, float* out) {
  float sums[COLUMNS] = {};
  for (int64_t i = 0; i < count; i += COLUMNS)
    for (int j = 0; j < COLUMNS; j++) sums[j] += x[i + j] * x[i + j];
  const float scale = 1.0f / std::sqrt(total_of(sums) / float(count) + epsilon);
  for (int64_t i = 0; i < count; i += COLUMNS)
    for (int j = 0; j < COLUMNS; j++) out[i + j] = x[i + j] * scale * weight[i + j];
}

// LayerNorm: (x - mean) / sqrt(variance + epsilon) * weight + bias, if there is one. `out` may be x.
inline void normalize_centered(const float* x, const float* weight, const float* bias, float epsilon, int64_t count, float* out) {
  float sums[COLUMNS] = {}, squares[COLUMNS] = {};
  for (int64_t i = 0; i < count; i += COLUMNS)
    for (int j = 0; j < COLUMNS; j++) sums[j] += x[i + j];
  const float mean = total_of(sums) / float(count);
  for (int64_t i = 0; i < count; i += COLUMNS)
    for (int j = 0; j < COLUMNS; j++) squares[j] += (x[i + j] - mean) * (x[i + j] - mean);
  const float scale = 1.0f / std::sqrt(total_of(squares) / float(count) + epsilon);
  for (int64_t i = 0; i < count; i++) out[i] = (x[i] - mean) * scale * weight[i];
  for (int64_t i = 0; bias && i < count; i++) out[i] += bias[i];
}

// x += more * scale.
inline void add_scaled(float* x, const float* more, float scale, int64_t count) {
  for (int64_t i = 0; i < count; i++) x[i] += more[i] * scale;
}

// The numbers of a pair are side by side where it is ADJACENT, else `pairs` apart.
template <bool ADJACENT> inline void rotate(float* head, const float* cosine, const float* sine, int64_t pairs) {
  float* other = head + (ADJACENT ? 1 : pairs);
  for (int64_t i = 0; i < pairs; i++) {
    const int64_t at = ADJACENT ? 2 * i : i;
    const float a = head[at], b = other[at];
    head[at] = a * cosine[i] - b * sine[i];
    other[at] = a * sine[i] + b * cosine[i];
  }
}

inline void rotate(float* head, const float* cosine, const float* sine, int64_t pairs, bool adjacent) {
  (adjacent ? rotate<true> : rotate<false>)(head, cosine, sine, pairs);
}

inline void scale(float* x, float factor, int64_t count) {
  for (int64_t i = 0; i < count; i++) x[i] *= factor;
}

// float16 numbers as a cache has them.
struct Half {
  uint16_t bits;
};
inline Floats load_numbers(const float* p) { return load_floats(p); }
inline Floats load_numbers(const Half* p) { return halves_to_floats(reinterpret_cast<const uint8_t*>(p)); }

// out [T][G * 16] += coefficients [T][count] rows [count][16] of G groups, or where it is FRESH, out = that: the inner loop of both halves of
// attention. Rows lie one behind the other, groups `group_stride` apart, and `count` is a multiple of 4. Every sum is added up in the order of the rows,
// so it depends neither on T nor on G. A number of a row serves T sums, and a coefficient those of all groups.
template <int T, int G, bool FRESH, class Number>
__attribute__((flatten)) inline void combine_groups(const float* coefficients, int64_t coefficient_stride, const Number* rows, int64_t group_stride, int64_t count,
                                                    float* out, int64_t out_stride) {
  constexpr int VECTORS = G * COLUMNS / LANES, VECTORS16 = COLUMNS / LANES;
  Floats total[T][VECTORS];
  const auto each = [](auto f) INLINED { repeat<T>([&](int t) INLINED { repeat<VECTORS>([&](int c) INLINED { f(t, c); }); }); };
  each([&](int t, int c) INLINED { total[t][c] = FRESH ? splat(0) : load_floats(out + t * out_stride + c * LANES); });
  for (int64_t i = 0; i < count; i += 4) {
    FloatActivations coefficients_now[T];
    repeat<T>([&](int t) INLINED { coefficients_now[t] = load_x(coefficients + t * coefficient_stride + i); });
    unroll<4>([&](auto j) INLINED {
      if constexpr (G == 1) {
        repeat<VECTORS>([&](int c) INLINED {
          const Floats row = load_numbers(rows + (i + j) * COLUMNS + c * LANES);
          repeat<T>([&](int t) INLINED { total[t][c] = multiply_add_x<decltype(j)::value>(total[t][c], row, coefficients_now[t]); });
        });
      } else {
        Floats now[VECTORS];
        repeat<VECTORS>([&](int c) INLINED { now[c] = load_numbers(rows + c / VECTORS16 * group_stride + (i + j) * COLUMNS + c % VECTORS16 * LANES); });
        repeat<T>([&](int t) INLINED { repeat<VECTORS>([&](int c) INLINED { total[t][c] = multiply_add_x<decltype(j)::value>(total[t][c], now[c], coefficients_now[t]); }); });
      }
    });
  }
  each([&](int t, int c) INLINED { store_floats(out + t * out_stride + c * LANES, total[t][c]); });
}

template <int T, bool FRESH, class Number>
inline void combine(const float* coefficients, int64_t coefficient_stride, const Number* rows, int64_t count, float* out, int64_t out_stride) {
  combine_groups<T, 1, FRESH>(coefficients, coefficient_stride, rows, 0, count, out, out_stride);
}

// x becomes cap tanh(x / cap) = cap - 2 cap / (e^(2x / cap) + 1).
inline void soften(float* x, int64_t count, float cap) {
  const float steep = 2.0f / cap, twice = 2.0f * cap;
  for (int64_t i = 0; i < count; i++) x[i] = cap - twice / (exponential(x[i] * steep) + 1.0f);
}

}  // namespace BILLFISH_ISA
