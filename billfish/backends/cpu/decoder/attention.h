// Attention: queries with the keys and values of one head, for one ISA level.
//
// A slice of SLICE positions is seen by itself: its weights are e^(score - largest of the slice). Slices are then merged in their order, and one with
// a larger score scales down what was there. A row gets the same numbers whoever it is seen with, and whether
// its slices are seen by one thread or by several.
#pragma once
#include "decoder/attention_floats.h"
#include "decoder/attention_int8.h"

namespace BILLFISH_ISA {

// What all rows of all heads have of one slice: seen [heads][rows][OUT + head_size]. quantized: the queries, where keys are int8.
inline void see_slice(const Queries& queries, const QuantizedQueries& quantized, const HeadCache& cache, const Sight& sight, int64_t slice, int64_t head_size,
                      float* seen) {
  const auto see = [&](const auto& kind) { see_slice_of(kind, queries, cache, sight, slice, head_size, seen); };
  static thread_local Room room;
  if (cache.type == CacheType::int8) see(Int8Kind{quantized, queries.rows, head_size});
  else if (cache.type == CacheType::float32) see(FloatKind<float>{queries, head_size, nullptr});
  else if (queries.heads * queries.rows > 4) see(FloatKind<float>{queries, head_size, room.take(CACHE_BLOCK * head_size)});  // each number is read several times
  else see(FloatKind<Half>{queries, head_size, nullptr});
}

inline QuantizedQueries quantized_for(const HeadCache& cache, const Queries& queries, int64_t head_size) {
  static thread_local Room room;
  return cache.type == CacheType::int8 ? quantize_queries(queries, head_size, room) : QuantizedQueries{};
}

inline void see_slice(const Queries& queries, const HeadCache& cache, const Sight& sight, int64_t slice, int64_t head_size, float* seen) {
  see_slice(queries, quantized_for(cache, queries, head_size), cache, sight, slice, head_size, seen);
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

// All slices of all rows of all heads, to out, which is as far apart as q.
inline void attend(const Queries& queries, const HeadCache& cache, const Sight& sight, int64_t head_size, float* out) {
  const int64_t rows = queries.rows, all = queries.heads * rows, stride = OUT + head_size, most = sight.seen + (rows - 1) * sight.more;
  static thread_local Room room;
  float *seen = room.take(2 * all * stride), *slice_seen = seen + all * stride;
  const QuantizedQueries quantized = quantized_for(cache, queries, head_size);
  begin_seen(seen, all, stride);
  for (int64_t slice = std::max<int64_t>(sight.behind, 0) / SLICE; slice * SLICE < most; slice++) {
    see_slice(queries, quantized, cache, sight, slice, head_size, slice_seen);
    for (int64_t row = 0; row < all; row++) merge_seen(slice_seen + row * stride, head_size, seen + row * stride);
  }
  for (int64_t head = 0; head < queries.heads; head++)
    for (int64_t row = 0; row < rows; row++) {
      const float sink = sight.sinks ? sight.sinks[head + row * (1 - sight.more)] : -INFINITY;
      finish_seen(seen + (head * rows + row) * stride, sink, head_size, out + head * queries.head_stride + row * queries.stride);
    }
}

// k and v [head_size] of a position go into the cache.
inline void store(const HeadCache& cache, int64_t position, const float* k, const float* v, int64_t head_size) {
  const int64_t at = position % cache.positions;
  if (cache.type == CacheType::float32) return store(static_cast<float*>(cache.keys), static_cast<float*>(cache.values), at, k, v, head_size);
  if (cache.type == CacheType::float16) return store(static_cast<Half*>(cache.keys), static_cast<Half*>(cache.values), at, k, v, head_size);
  const size_t block = billfish::head_bytes(cache.type, head_size, at / CACHE_BLOCK * CACHE_BLOCK);
  store_int8(static_cast<uint8_t*>(cache.keys) + block, static_cast<uint8_t*>(cache.values) + block, at % CACHE_BLOCK, k, v, head_size);
}

}  // namespace BILLFISH_ISA
