// Attention: queries with the keys and values of one head, for one ISA level.
//
// A slice of SLICE positions is seen block by block with a running maximum: weights are e^(score - largest so far), and a block with
// a larger score scales down what was there. Slices are then merged in their order. A row gets the same numbers whoever it is seen with, and whether
// its slices are seen by one thread or by several.
#pragma once
#include "decoder/kernels.h"
#include "simd/room.h"

namespace BILLFISH_ISA {

using billfish::CACHE_BLOCK;
using billfish::HeadCache;
using billfish::Queries;
using billfish::Sight;
using billfish::SLICE;

// What a row has of the positions that it has seen: the largest score, the sum of weights, and from OUT on the weighted values [head_size].
enum : int64_t { LARGEST, TOTAL, OUT = billfish::SEEN_HEAD };

inline void begin_seen(float* seen, int64_t rows, int64_t stride) {
  std::fill_n(seen, rows * stride, 0.0f);
  for (int64_t row = 0; row < rows; row++) seen[row * stride + LARGEST] = -INFINITY;
}

constexpr int VECTORS16 = COLUMNS / LANES;  // that go together, as one would wait for itself

// Of scores of a block, the row sees those from `first` to before `last`, some at least. The others up to `count`, which is at least `last` and a
// multiple of 16, become -infinity. What it returns is the largest of all that the row has seen.
inline float see_scores(float* scores, int64_t first, int64_t last, int64_t count, const float* seen) {
  std::fill(scores, scores + first, -INFINITY);
  std::fill(scores + last, scores + count, -INFINITY);
  Floats top[VECTORS16];
  unroll<VECTORS16>([&](auto c) { top[c] = splat(seen[LARGEST]); });
  for (int64_t i = 0; i < count; i += COLUMNS)
    unroll<VECTORS16>([&](auto c) { top[c] = larger(top[c], load_floats(scores + i + c * LANES)); });
  for (int c = 1; c < VECTORS16; c++) top[0] = larger(top[0], top[c]);
  return largest(top[0]);
}

// The scores become weights, e^(score - top), and 0 where the row does not see.
inline void weigh(float* scores, int64_t first, int64_t last, int64_t count, float top, float* seen, int64_t head_size) {
  Floats sums[VECTORS16];
  unroll<VECTORS16>([&](auto c) { sums[c] = splat(0); });
  const Floats minus_top = splat(-top);
  for (int64_t i = 0; i < count; i += COLUMNS) {
    Floats weights[VECTORS16];
    unroll<VECTORS16>([&](auto c) { weights[c] = add(load_floats(scores + i + c * LANES), minus_top); });
    exponentials(weights);
    unroll<VECTORS16>([&](auto c) { store_floats(scores + i + c * LANES, weights[c]), sums[c] = add(sums[c], weights[c]); });
  }
  std::fill(scores, scores + first, 0.0f);  // exponentials() have a least number that is not 0, though nothing beside a sum of 1 or more
  std::fill(scores + last, scores + count, 0.0f);
  if (top > seen[LARGEST]) {
    const float factor = exponential(seen[LARGEST] - top);
    seen[LARGEST] = top, seen[TOTAL] *= factor;
    for (int64_t i = OUT; i < OUT + head_size; i++) seen[i] *= factor;
  }
  float sixteen[COLUMNS];
  unroll<VECTORS16>([&](auto c) { store_floats(sixteen + c * LANES, sums[c]); });
  seen[TOTAL] += total_of(sixteen);
}

// Positions of a block that some of T rows see. sight: relative to the block.
template <int T> int64_t some_see(const Sight& sight) { return std::min(CACHE_BLOCK, sight.seen + (T - 1) * sight.more); }

// T rows and one block: their scores [T][CACHE_BLOCK] become weights.
template <int T, class Number> void weigh_block(const float* q, int64_t q_stride, const Number* keys, const Sight& sight, int64_t head_size, float* scores, float* seen) {
  const int64_t stride = OUT + head_size, count = (some_see<T>(sight) + COLUMNS - 1) / COLUMNS * COLUMNS;
  for (int64_t i = 0; i < count; i += COLUMNS) combine<T, true>(q, q_stride, keys + i * head_size, head_size, scores + i, CACHE_BLOCK);
  // First the largest scores of all rows, then the weights: no row waits for another's.
  int64_t first[T], last[T];
  float top[T];
  for (int t = 0; t < T; t++) {
    float* row = scores + t * CACHE_BLOCK;
    if (sight.cap > 0) soften(row, count, sight.cap);
    first[t] = std::max<int64_t>(sight.behind + t * sight.more, 0), last[t] = std::min(CACHE_BLOCK, sight.seen + t * sight.more);
    if (first[t] < last[t]) top[t] = see_scores(row, first[t], last[t], count, seen + t * stride);
  }
  for (int t = 0; t < T; t++) {
    float* row = scores + t * CACHE_BLOCK;
    if (first[t] < last[t]) weigh(row, first[t], last[t], count, top[t], seen + t * stride, head_size);
    else std::fill_n(row, count, 0.0f);
  }
}

// And the values of the block are added, times their weights.
template <int T, class Number> void add_values_of_block(const float* weights, const Number* values, const Sight& sight, int64_t head_size, float* seen) {
  const int64_t padded = (some_see<T>(sight) + 3) / 4 * 4;
  for (int64_t i = 0; i < head_size; i += COLUMNS) combine<T, false>(weights, CACHE_BLOCK, values + i * CACHE_BLOCK, padded, seen + OUT + i, OUT + head_size);
}

// Rows that see a block together. Where 16 columns are one vector, four rows would have four sums, and those of eight fill two pipes.
constexpr int SEE_TOGETHER = VECTORS16 == 1 ? 8 : 4;

// f(row, together, sight) for rows that go together, if they see any of the block from `at` on: sight is relative to it.
template <class F> void each_together(int64_t rows, int64_t at, const Sight& sight, F f) {
  for (int64_t row = 0, left; (left = rows - row) > 0;) {
    const auto see = [&](auto together) {
      constexpr int T = decltype(together)::value;
      const int64_t before = at - row * sight.more;
      const Sight here{sight.seen - before, sight.more, sight.behind - before, sight.cap, nullptr};
      if (here.seen + (T - 1) * here.more > 0 && here.behind < CACHE_BLOCK) f(row, together, here);
      row += T;
    };
    if (left >= SEE_TOGETHER) see(std::integral_constant<int, SEE_TOGETHER>{});
    else if (left >= 4) see(std::integral_constant<int, 4>{});
    else if (left == 3) see(std::integral_constant<int, 3>{});
    else if (left == 2) see(std::integral_constant<int, 2>{});
    else see(std::integral_constant<int, 1>{});
  }
}

// All rows see one block: first its keys, then its values, so that a first-level cache need not hold both.
template <class Number>
void see_block(const Queries& queries, const Number* keys, const Number* values, int64_t at, const Sight& sight, int64_t head_size, float* seen) {
  static thread_local Room room;
  float* scores = room.take(queries.rows * CACHE_BLOCK);
  const int64_t stride = OUT + head_size;
  each_together(queries.rows, at, sight, [&](int64_t row, auto together, const Sight& here) {
    weigh_block<decltype(together)::value>(queries.q + row * queries.stride, queries.stride, keys, here, head_size, scores + row * CACHE_BLOCK, seen + row * stride);
  });
  each_together(queries.rows, at, sight, [&](int64_t row, auto together, const Sight& here) {
    add_values_of_block<decltype(together)::value>(scores + row * CACHE_BLOCK, values, here, head_size, seen + row * stride);
  });
}

inline void to_floats(const Half* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += COLUMNS)
    for (int j = 0; j < COLUMNS; j += LANES) store_floats(to + i + j, load_numbers(from + i + j));
}

// What all rows have of one slice: seen [rows][OUT + head_size].
inline void see_slice(const Queries& queries, const HeadCache& cache, const Sight& sight, int64_t slice, int64_t head_size, float* seen) {
  begin_seen(seen, queries.rows, OUT + head_size);
  const int64_t most = sight.seen + (queries.rows - 1) * sight.more, size = CACHE_BLOCK * head_size;
  const int64_t first = std::max(slice * SLICE, std::max<int64_t>(sight.behind, 0) / CACHE_BLOCK * CACHE_BLOCK);
  static thread_local Room room;
  for (int64_t at = first; at < std::min((slice + 1) * SLICE, most); at += CACHE_BLOCK) {
    const int64_t offset = at % cache.positions * head_size;
    if (!cache.half) {
      see_block(queries, static_cast<const float*>(cache.keys) + offset, static_cast<const float*>(cache.values) + offset, at, sight, head_size, seen);
      continue;
    }
    const Half *keys = static_cast<const Half*>(cache.keys) + offset, *values = static_cast<const Half*>(cache.values) + offset;
    if (queries.rows > 4) {  // numbers that are read several times are converted once
      float* floats = room.take(2 * size);
      to_floats(keys, size, floats), to_floats(values, size, floats + size);
      see_block(queries, floats, floats + size, at, sight, head_size, seen);
    } else see_block(queries, keys, values, at, sight, head_size, seen);
  }
}

// `seen` takes in what a row has of a later slice.
inline void merge_seen(const float* slice, int64_t head_size, float* seen) {
  if (slice[LARGEST] == -INFINITY) return;  // the row sees nothing of the slice
  const float top = std::max(seen[LARGEST], slice[LARGEST]);
  const float before = exponential(seen[LARGEST] - top), now = exponential(slice[LARGEST] - top);
  seen[LARGEST] = top, seen[TOTAL] = seen[TOTAL] * before + slice[TOTAL] * now;
  for (int64_t i = OUT; i < OUT + head_size; i++) seen[i] = seen[i] * before + slice[i] * now;
}

// The mean of values, weighted. The sink has a weight too, and no value.
inline void finish_seen(const float* seen, float sink, int64_t head_size, float* out) {
  const float top = std::max(seen[LARGEST], sink), factor = exponential(seen[LARGEST] - top);
  const float total = seen[TOTAL] * factor + (sink > -INFINITY ? exponential(sink - top) : 0.0f);
  for (int64_t i = 0; i < head_size; i++) out[i] = seen[OUT + i] * factor / total;
}

// A row of `out`, from its slices [count], which are slice_stride floats apart.
inline void gather(const float* slices, int64_t count, int64_t slice_stride, float sink, int64_t head_size, float* out) {
  static thread_local Room room;
  float* seen = room.take(OUT + head_size);
  begin_seen(seen, 1, OUT + head_size);
  for (int64_t i = 0; i < count; i++) merge_seen(slices + i * slice_stride, head_size, seen);
  finish_seen(seen, sink, head_size, out);
}

// All slices of all rows, to out [rows], which is as far apart as q.
inline void attend(const Queries& queries, const HeadCache& cache, const Sight& sight, int64_t head_size, float* out) {
  const int64_t rows = queries.rows, stride = OUT + head_size, most = sight.seen + (rows - 1) * sight.more;
  static thread_local Room room;
  float *seen = room.take(2 * rows * stride), *slice_seen = seen + rows * stride;
  begin_seen(seen, rows, stride);
  for (int64_t slice = std::max<int64_t>(sight.behind, 0) / SLICE; slice * SLICE < most; slice++) {
    see_slice(queries, cache, sight, slice, head_size, slice_seen);
    for (int64_t row = 0; row < rows; row++) merge_seen(slice_seen + row * stride, head_size, seen + row * stride);
  }
  for (int64_t row = 0; row < rows; row++)
    finish_seen(seen + row * stride, sight.sinks ? sight.sinks[row * (1 - sight.more)] : -INFINITY, head_size, out + row * queries.stride);
}

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

// k and v [head_size] of a position go into the cache.
inline void store(const HeadCache& cache, int64_t position, const float* k, const float* v, int64_t head_size) {
  const int64_t at = position % cache.positions;
  if (cache.half) store(static_cast<Half*>(cache.keys), static_cast<Half*>(cache.values), at, k, v, head_size);
  else store(static_cast<float*>(cache.keys), static_cast<float*>(cache.values), at, k, v, head_size);
}

}  // namespace BILLFISH_ISA
