// Attention with keys and values in float32 or float16.
#pragma once
#include "decoder/attention_scores.h"

namespace BILLFISH_ISA {

inline void to_floats(const Half* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += COLUMNS)
    for (int j = 0; j < COLUMNS; j += LANES) store_floats(to + i + j, load_numbers(from + i + j));
}

// Numbers as a cache has them, or float16 that becomes float32 block by block.
template <class Number> struct FloatKind {
  static constexpr int ADD_TOGETHER = SEE_TOGETHER;
  const Queries& queries;
  int64_t head_size;
  float* converted;  // room for a block, if numbers are float16 and Number is float

  const Number* block(const void* numbers, int64_t position) const {
    const int64_t offset = position * head_size;
    if constexpr (std::is_same_v<Number, float>) {
      if (converted) return to_floats(static_cast<const Half*>(numbers) + offset, CACHE_BLOCK * head_size, converted), converted;
    }
    return static_cast<const Number*>(numbers) + offset;
  }

  // T rows with the first `count` keys, and up to 31 more: scores [T][SCORES].
  template <int T> void score(const Number* keys, int64_t head, int64_t row, int64_t count, float* scores) const {
    const float* q = queries.q + head * queries.head_stride + row * queries.stride;
    for (int64_t i = 0; i < count; i += GROUPS * COLUMNS)
      combine_groups<T, GROUPS, true>(q, queries.stride, keys + i * head_size, COLUMNS * head_size, head_size, scores + i, SCORES);
  }

  // T rows take in values, times their weights [T][SCORES].
  template <int T> void add(const Number* values, const float* weights, int64_t count, float* seen) const {
    const int64_t padded = (count + 3) / 4 * 4, stride = OUT + head_size;
    int64_t i = 0;
    for (; i + GROUPS * COLUMNS <= head_size; i += GROUPS * COLUMNS)
      combine_groups<T, GROUPS, false>(weights, SCORES, values + i * CACHE_BLOCK, COLUMNS * CACHE_BLOCK, padded, seen + OUT + i, stride);
    if (i < head_size) combine<T, false>(weights, SCORES, values + i * CACHE_BLOCK, padded, seen + OUT + i, stride);
  }
};

inline void put_number(float x, float* to) { *to = x; }
// A number that is too large for float16 becomes its largest one: an infinity would make NaN of all that comes after it.
inline void put_number(float x, Half* to) { to->bits = float_to_half_fast(std::min(std::max(x, -65504.0f), 65504.0f)); }

template <class Number> void store(Number* keys, Number* values, int64_t position, const float* k, const float* v, int64_t head_size) {
  const int64_t block = position / CACHE_BLOCK * CACHE_BLOCK * head_size, inside = position % CACHE_BLOCK;
  Number* key = keys + block + inside / COLUMNS * COLUMNS * head_size + inside % COLUMNS;
  Number* value = values + block + inside * COLUMNS;
  for (int64_t i = 0; i < head_size; i++) put_number(k[i], key + i * COLUMNS);
  for (int64_t i = 0; i < head_size; i += COLUMNS)
    for (int j = 0; j < COLUMNS; j++) put_number(v[i + j], value + i * CACHE_BLOCK + j);
}

}  // namespace BILLFISH_ISA
