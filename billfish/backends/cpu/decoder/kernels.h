// The parts of a decoder that are not products with weights, for one ISA level. Counts are multiples of 16, so loops over
// 16 numbers have no rest, and a compiler turns them into vectors.
#pragma once
#include <algorithm>
#include <cmath>

#include "decoder/decoder.h"
#include "simd/exponential.h"
#include "simd/halves.h"
#include "simd/room.h"
#include "simd/unroll.h"

namespace BILLFISH_ISA {

constexpr int COLUMNS = 16;

// Sixteen sums to one, always in the same order.
inline float total_of(const float* sums) {
  float total[4];
  for (int i = 0; i < 4; i++) total[i] = (sums[i] + sums[i + 4]) + (sums[i + 8] + sums[i + 12]);
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

// gate * sigmoid(gate) * up, or GELU by its tanh formula, which is gate * sigmoid(2 sqrt(2 / pi) (gate + 0.044715 gate^3)).
inline void open_gate(const float* gate, const float* up, bool gelu, int64_t count, float* out) {
  const float cubic = gelu ? 0.0713548163f : 0.0f, linear = gelu ? 1.59576912f : 1.0f;
  for (int64_t i = 0; i < count; i += COLUMNS)
    for (int j = 0; j < COLUMNS; j++) {
      const float g = gate[i + j], z = g * (linear + cubic * (g * g));
      out[i + j] = g / (1.0f + exponential(-z)) * up[i + j];
    }
}

inline void rotate(float* head, const float* cosine, const float* sine, int64_t pairs, bool adjacent) {
  const int64_t stride = adjacent ? 2 : 1, other = adjacent ? 1 : pairs;
  for (int64_t i = 0; i < pairs; i++) {
    const float a = head[i * stride], b = head[i * stride + other];
    head[i * stride] = a * cosine[i] - b * sine[i];
    head[i * stride + other] = a * sine[i] + b * cosine[i];
  }
}

// out [T][SIXTEENS][16] += coefficients [T][count] rows [count][SIXTEENS][16]: the inner loop of both halves of attention. Every sum is
// added up in the order of the rows, so it does not depend on T and SIXTEENS.
template <int T, int SIXTEENS>
__attribute__((flatten)) inline void combine(const float* coefficients, int64_t coefficient_stride, const float* rows, int64_t row_stride,
                                             int64_t count, float* out, int64_t out_stride) {
  constexpr int VECTORS16 = COLUMNS / LANES;
  Floats total[T][SIXTEENS][VECTORS16];
  auto each = [&](auto f) { unroll<T>([&](auto t) { unroll<SIXTEENS>([&](auto g) { unroll<VECTORS16>([&](auto c) { f(t, g, c); }); }); }); };
  each([&](auto t, auto g, auto c) { total[t][g][c] = load_floats(out + t * out_stride + g * COLUMNS + c * LANES); });
  for (int64_t i = 0; i < count; i += 4) {
    FloatActivations coefficients_now[T];
    unroll<T>([&](auto t) { coefficients_now[t] = load_x(coefficients + t * coefficient_stride + i); });
    unroll<4>([&](auto j) {
      unroll<SIXTEENS>([&](auto g) {
        unroll<VECTORS16>([&](auto c) {
          const Floats row = load_floats(rows + (i + j) * row_stride + g * COLUMNS + c * LANES);
          unroll<T>([&](auto t) { total[t][g][c] = multiply_add_x<decltype(j)::value>(total[t][g][c], row, coefficients_now[t]); });
        });
      });
    });
  }
  each([&](auto t, auto g, auto c) { store_floats(out + t * out_stride + g * COLUMNS + c * LANES, total[t][g][c]); });
}

// Scores of `count` keys to weights, e^(score - largest), zeros behind them up to `padded`; returns their sum, to which the
// least numbers of exponential() for what is behind add nothing: it is at least 1.
inline float exponentials(float* scores, int64_t count, int64_t padded) {
  float largest[COLUMNS], sums[COLUMNS] = {};
  std::fill(scores + count, scores + padded, -INFINITY);
  std::copy_n(scores, COLUMNS, largest);
  for (int64_t i = 0; i < padded; i += COLUMNS)
    for (int j = 0; j < COLUMNS; j++) largest[j] = std::max(largest[j], scores[i + j]);
  const float top = *std::max_element(largest, largest + COLUMNS);
  for (int64_t i = 0; i < padded; i += COLUMNS)
    for (int j = 0; j < COLUMNS; j++) {
      scores[i + j] = exponential(scores[i + j] - top);
      sums[j] += scores[i + j];
    }
  std::fill(scores + count, scores + padded, 0.0f);
  return total_of(sums);
}

constexpr int64_t POSITIONS = 64;  // whose values stay in the first-level cache while all rows are made of them

template <int T>
void attend_rows(const float* q, int64_t stride, const float* keys, const float* values, int64_t seen, int64_t more, int64_t head_size, float* out) {
  const int64_t padded = (seen + (T - 1) * more + COLUMNS - 1) / COLUMNS * COLUMNS;
  static thread_local Room room;
  float* scores = room.take((T * padded + 4095) / 4096 * 4096);  // in steps, as each token sees one position more
  std::fill_n(scores, T * padded, 0.0f);
  for (int64_t block = 0; block < padded; block += COLUMNS)
    combine<T, 1>(q, stride, keys + block * head_size, COLUMNS, head_size, scores + block, padded);
  float sums[T];
  for (int t = 0; t < T; t++) sums[t] = exponentials(scores + t * padded, seen + t * more, padded);
  for (int t = 0; t < T; t++) std::fill_n(out + t * stride, head_size, 0.0f);
  if (T > 1 && more > 0) {  // rows of a prompt: they come in such numbers that values are in a cache already
    for (int64_t c = 0; c < head_size; c += COLUMNS) combine<T, 1>(scores, padded, values + c, head_size, padded, out + c, stride);
  } else {  // values come from memory, so they are read in the order in which they lie
    for (int64_t i = 0; i < padded; i += POSITIONS)
      for (int t = 0; t < T; t++) {
        const float *weights = scores + t * padded + i, *rows = values + i * head_size;
        const int64_t count = std::min(POSITIONS, padded - i);
        int64_t c = 0;
        for (; c + 64 <= head_size; c += 64) combine<1, 4>(weights, 0, rows + c, head_size, count, out + t * stride + c, 0);
        for (; c < head_size; c += COLUMNS) combine<1, 1>(weights, 0, rows + c, head_size, count, out + t * stride + c, 0);
      }
  }
  for (int t = 0; t < T; t++)
    for (int64_t i = 0; i < head_size; i++) out[t * stride + i] /= sums[t];
  room.keep_at_most(billfish::KEPT_BYTES);
}

inline void attend(const float* q, int64_t rows, int64_t stride, const float* keys, const float* values, int64_t seen, int64_t more,
                   int64_t head_size, float* out) {
  switch (rows) {
    case 1: return attend_rows<1>(q, stride, keys, values, seen, more, head_size, out);
    case 2: return attend_rows<2>(q, stride, keys, values, seen, more, head_size, out);
    case 3: return attend_rows<3>(q, stride, keys, values, seen, more, head_size, out);
    default: return attend_rows<4>(q, stride, keys, values, seen, more, head_size, out);
  }
}

}  // namespace BILLFISH_ISA
