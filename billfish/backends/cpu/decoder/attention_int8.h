// Attention with keys and values in int8, in integer dot products.
//
// A position of a head has codes k and v of -127 to 127, and a scale for each, its largest number / 127. Keys are rotated first: H k, where H is a
// Hadamard matrix, spreads what stands out in one column over all, and (H q) (H k) is n q k. A score is then the integer product of codes, times both
// scales. Weights e^(score - largest), times the scales of the values, become integers up to 127 for each block of 64 positions, and so the values
// are added in integers, too. A block lies in memory as 64 scales and then codes, four of a column or position in each 32 bits:
//   keys    [64 / 16][head_size / 4][16 positions][4 columns]
//   values  [head_size / 16][64 / 4][16 columns][4 positions]
#pragma once
#include "decoder/attention_scores.h"

namespace BILLFISH_ISA {

// Digits of q, and of weights: q * 127 / largest, or weights * 32639 / largest, which is 256 * a digit and another one, of -128 to 127 both.
constexpr int Q_DIGITS = 1, WEIGHT_DIGITS = 1;
constexpr int64_t QUAD = 4, LINE_CODES = QUAD * COLUMNS;  // numbers that a lane holds, and those of 16 lanes

// x = H x with the Hadamard matrix of the largest power of two that divides `count`, once or for each part of that size. Returns n.
inline float hadamard(float* x, int64_t count) {
  const int64_t size = count & -count;
  for (int64_t half = 1; half < size; half *= 2)
    for (int64_t i = 0; i < count; i += 2 * half)
      for (int64_t j = i; j < i + half; j++) {
        const float a = x[j], b = x[j + half];
        x[j] = a + b, x[j + half] = a - b;
      }
  return float(size);
}

// What codes of 1 or 2 digits are times: their sum, times SIGNED_BIAS, is what a dot product with biased bytes has too much.
struct Quantized {
  float scale;
  int32_t sum;
};

// x [count], a multiple of 16, to codes [D][stride].
template <int D> inline Quantized quantize(const float* x, int64_t count, int8_t* codes, int64_t stride) {
  constexpr float top = D == 2 ? 32639.0f : 127.0f;
  uint32_t bits = 0;
  for (int64_t i = 0; i < count; i++) bits = std::max(bits, float_to_bits(x[i]) & 0x7fffffff);
  const float inverse = top / bits_to_float(bits);
  if (!(inverse <= 3.4e38f) || bits >= 0x7f800000) {  // zeros, or so small that 1/x overflows, or not finite
    for (int digit = 0; digit < D; digit++) std::fill_n(codes + digit * stride, count, int8_t(0));
    return {bits < 0x7f800000 ? 0.0f : bits_to_float(0x7fc00000), 0};
  }
  int32_t sums[COLUMNS] = {};
  for (int64_t i = 0; i < count; i += COLUMNS) {
    int32_t whole[COLUMNS];  // to the nearest integer; see activations/quantize.h
    for (int j = 0; j < COLUMNS; j++) whole[j] = int32_t(float_to_bits(x[i + j] * inverse + ROUNDING) - float_to_bits(ROUNDING));
    for (int j = 0; j < COLUMNS; j++) sums[j] += whole[j];
    for (int j = 0; j < COLUMNS; j++) codes[(D - 1) * stride + i + j] = int8_t(whole[j]);
    if constexpr (D == 2)
      for (int j = 0; j < COLUMNS; j++) codes[i + j] = int8_t((whole[j] + 128) >> 8);
  }
  typedef int32_t Four __attribute__((vector_size(16)));
  Four four[4];
  std::memcpy(four, sums, sizeof four);
  const Four sum = (four[0] + four[1]) + (four[2] + four[3]);
  return {bits_to_float(bits) / top, sum[0] + sum[1] + sum[2] + sum[3]};
}

// finish(row, vector, sums) for T rows of codes [D][digit_stride], `stride` apart, times G groups of 16 columns, `group_stride` bytes apart. count:
// numbers that are multiplied, a multiple of 16. Sums in integers are the same in any order.
template <int T, int G, int D, class Finish>
__attribute__((flatten)) inline void dot_groups(const int8_t* x, int64_t stride, int64_t digit_stride, const int32_t* starts, const uint8_t* codes, int64_t group_stride,
                                                int64_t count, Finish finish) {
  constexpr int VECTORS = G * VECTORS16, BYTES = LANES * QUAD;
  Ints sums[T][D][VECTORS];
  const auto each = [](auto f) INLINED {
    repeat<T>([&](int t) INLINED { repeat<D>([&](int d) INLINED { repeat<VECTORS>([&](int c) INLINED { f(t, d, c); }); }); });
  };
  each([&](int t, int d, int c) INLINED { sums[t][d][c] = splat_int(d == D - 1 ? starts[t] : 0); });
  for (int64_t i = 0; i < count; i += 16, codes += 4 * LINE_CODES) {
    Activations now[T][D];
    repeat<T>([&](int t) INLINED { repeat<D>([&](int d) INLINED { now[t][d] = load_activations(x + t * stride + d * digit_stride + i); }); });
    unroll<4>([&](auto quad) INLINED {
      Bytes w[VECTORS];
      repeat<VECTORS>([&](int c) INLINED { w[c] = load_operand(codes + c / VECTORS16 * group_stride + quad * LINE_CODES + c % VECTORS16 * BYTES); });
      each([&](int t, int d, int c) INLINED { sums[t][d][c] = dot<decltype(quad)::value, billfish::Operand::values>(sums[t][d][c], w[c], now[t][d]); });
    });
  }
  repeat<T>([&](int t) INLINED {
    repeat<VECTORS>([&](int c) INLINED {
      if constexpr (D == 2) finish(t, c, add(shift_left<8>(sums[t][0][c]), sums[t][1][c]));
      else finish(t, c, sums[t][0][c]);
    });
  });
}

// Rows of q for one pass over keys: codes, and what their sums start at and are multiplied with.
struct QuantizedQueries {
  const int8_t* codes;  // [heads][rows][Q_DIGITS][head_size]
  const int32_t* starts;
  const float* scales;
};

// All rows of all heads, one after the other, in `room`.
inline QuantizedQueries quantize_queries(const Queries& queries, int64_t head_size, Room& room) {
  const int64_t rows = queries.heads * queries.rows, bytes = Q_DIGITS * head_size;
  float* floats = room.take(2 * rows + head_size + rows * bytes / 4);
  float *scales = floats + head_size, *after = scales + 2 * rows;
  int32_t* starts = reinterpret_cast<int32_t*>(scales + rows);
  int8_t* codes = reinterpret_cast<int8_t*>(after);
  for (int64_t row = 0; row < rows; row++) {
    std::copy_n(queries.q + row / queries.rows * queries.head_stride + row % queries.rows * queries.stride, head_size, floats);
    const float n = hadamard(floats, head_size);
    const Quantized made = quantize<Q_DIGITS>(floats, head_size, codes + row * bytes, head_size);
    scales[row] = made.scale / n, starts[row] = -SIGNED_BIAS * made.sum;
  }
  return {codes, starts, scales};
}

struct Int8Kind {
  static constexpr int ADD_TOGETHER = SEE_TOGETHER / WEIGHT_DIGITS;  // a product of two digits has twice the sums
  const QuantizedQueries& q;
  int64_t rows, head_size;

  const uint8_t* block(const void* bytes, int64_t position) const {
    return static_cast<const uint8_t*>(bytes) + billfish::head_bytes(CacheType::int8, head_size, position);
  }

  // T rows with the first `count` keys, and up to 31 more: scores [T][SCORES].
  template <int T> void score(const uint8_t* keys, int64_t head, int64_t row, int64_t count, float* scores) const {
    const float* key_scales = reinterpret_cast<const float*>(keys);
    const int64_t bytes = Q_DIGITS * head_size, first = head * rows + row;
    const uint8_t* codes = keys + CACHE_BLOCK * sizeof(float);
    for (int64_t i = 0; i < count; i += GROUPS * COLUMNS)
      dot_groups<T, GROUPS, Q_DIGITS>(q.codes + first * bytes, bytes, head_size, q.starts + first, codes + i * head_size, COLUMNS * head_size, head_size,
                                      [&](int t, int c, Ints sum) INLINED {
        const Floats scale = multiply(load_floats(key_scales + i + c * LANES), splat(q.scales[first + t]));
        store_floats(scores + t * SCORES + i + c * LANES, multiply(to_floats(sum), scale));
      });
  }

  // T rows take in the first `count` values of a block, and up to 15 more, times their weights [T][SCORES].
  template <int T> void add(const uint8_t* values, const float* weights, int64_t count, float* seen) const {
    const float* value_scales = reinterpret_cast<const float*>(values);
    const uint8_t* codes = values + CACHE_BLOCK * sizeof(float);
    const int64_t padded = (count + 15) / 16 * 16, stride = OUT + head_size;
    alignas(64) int8_t digits[T][WEIGHT_DIGITS][CACHE_BLOCK];
    alignas(64) float scaled[CACHE_BLOCK];
    float scale[T];
    int32_t starts[T];
    for (int t = 0; t < T; t++) {
      for (int64_t i = 0; i < CACHE_BLOCK; i++) scaled[i] = weights[t * SCORES + i] * value_scales[i];
      const Quantized made = quantize<WEIGHT_DIGITS>(scaled, CACHE_BLOCK, digits[t][0], CACHE_BLOCK);
      scale[t] = made.scale, starts[t] = -SIGNED_BIAS * made.sum;
    }
    const auto add_groups = [&](auto groups, int64_t i) {
      dot_groups<T, decltype(groups)::value, WEIGHT_DIGITS>(digits[0][0], WEIGHT_DIGITS * CACHE_BLOCK, CACHE_BLOCK, starts, codes + i * CACHE_BLOCK,
                                                            COLUMNS * CACHE_BLOCK, padded, [&](int t, int c, Ints sum) INLINED {
        float* out = seen + t * stride + OUT + i + c * LANES;
        store_floats(out, multiply_add(load_floats(out), to_floats(sum), splat(scale[t])));
      });
    };
    int64_t i = 0;
    for (; i + GROUPS * COLUMNS <= head_size; i += GROUPS * COLUMNS) add_groups(std::integral_constant<int, GROUPS>{}, i);
    if (i < head_size) add_groups(std::integral_constant<int, 1>{}, i);
  }
};

// k and v [head_size] of a position within its block.
inline void store_int8(uint8_t* keys, uint8_t* values, int64_t inside, const float* k, const float* v, int64_t head_size) {
  static thread_local Room room;
  float* rotated = room.take(head_size + head_size / 4);
  int8_t* codes = reinterpret_cast<int8_t*>(rotated + head_size);
  std::copy_n(k, head_size, rotated);
  hadamard(rotated, head_size);
  reinterpret_cast<float*>(keys)[inside] = quantize<1>(rotated, head_size, codes, head_size).scale;
  uint8_t* key = keys + CACHE_BLOCK * sizeof(float) + inside / COLUMNS * COLUMNS * head_size + inside % COLUMNS * QUAD;
  for (int64_t i = 0; i < head_size; i++) key[i / QUAD * LINE_CODES + i % QUAD] = uint8_t(codes[i] + SIGNED_BIAS);
  reinterpret_cast<float*>(values)[inside] = quantize<1>(v, head_size, codes, head_size).scale;
  uint8_t* value = values + CACHE_BLOCK * sizeof(float) + inside / QUAD * LINE_CODES + inside % QUAD;
  for (int64_t i = 0; i < head_size; i++) value[i / COLUMNS * COLUMNS * CACHE_BLOCK + i % COLUMNS * QUAD] = uint8_t(codes[i] + SIGNED_BIAS);
}

}  // namespace BILLFISH_ISA
