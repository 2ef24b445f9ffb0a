// What all kernels of attention share: what a row has seen, and how the scores of a slice become weights.
#pragma once
#include "decoder/kernels.h"
#include "simd/room.h"

namespace BILLFISH_ISA {

using billfish::CACHE_BLOCK;
using billfish::CacheType;
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

constexpr int VECTORS16 = COLUMNS / LANES;
// Where 16 columns are one vector, inner loops take two groups of them: a coefficient then serves two sums, and loads leave room for arithmetic.
constexpr int GROUPS = VECTORS16 == 1 ? 2 : 1;
// Rows that go together: four by four sums fill the registers of other levels, and two by four those of SSE2.
#if defined(BILLFISH_simd_portable)
constexpr int SEE_TOGETHER = 2;
#else
constexpr int SEE_TOGETHER = VECTORS16 == 1 ? 8 : 4;
#endif
// Vectors of weights that go together, as one would wait for itself. They divide a block.
constexpr int WEIGHTS_TOGETHER = VECTORS16 == 1 ? 4 : VECTORS16;
// How far scores of rows are apart: by a line more than a power of two, so that rows do not share the sets of a cache.
constexpr int64_t SCORES = SLICE + COLUMNS;

// Of the scores of a slice a row sees those from `first` to before `last`, some at least. They become weights, e^(score - largest), and the others of
// `count`, a multiple of CACHE_BLOCK, become 0. A sum has the same order wherever `first` and `last` are.
inline void weigh(float* scores, int64_t first, int64_t last, int64_t count, float* seen) {
  constexpr int N = WEIGHTS_TOGETHER, STEP = N * LANES;
  const int64_t begin = first / STEP * STEP, end = (last + STEP - 1) / STEP * STEP;
  std::fill(scores + begin, scores + first, -INFINITY);
  std::fill(scores + last, scores + end, -INFINITY);
  Floats top[N], sums[N];
  repeat<N>([&](int c) INLINED { top[c] = splat(-INFINITY), sums[c] = splat(0); });
  for (int64_t i = begin; i < end; i += STEP) repeat<N>([&](int c) INLINED { top[c] = larger(top[c], load_floats(scores + i + c * LANES)); });
  for (int c = 1; c < N; c++) top[0] = larger(top[0], top[c]);
  seen[LARGEST] = largest(top[0]);
  const Floats minus_top = splat(-seen[LARGEST]);
  for (int64_t i = begin; i < end; i += STEP) {
    Floats weights[N];
    repeat<N>([&](int c) INLINED { weights[c] = add(load_floats(scores + i + c * LANES), minus_top); });
    exponentials(weights);
    repeat<N>([&](int c) INLINED { store_floats(scores + i + c * LANES, weights[c]), sums[c] = add(sums[c], weights[c]); });
  }
  // exponentials() have a least number that is not 0, though nothing beside a sum of 1 or more.
  std::fill(scores, scores + first, 0.0f);
  std::fill(scores + last, scores + count, 0.0f);
  if constexpr (N > VECTORS16)
    for (int c = VECTORS16; c < N; c++) sums[c % VECTORS16] = add(sums[c % VECTORS16], sums[c]);
  float sixteen[COLUMNS];
  repeat<VECTORS16>([&](int c) INLINED { store_floats(sixteen + c * LANES, sums[c]); });
  seen[TOTAL] = total_of(sixteen);
}

// f(row, together, count) for up to MOST rows that go together, if they see any of the block from `at` on: `count` is how many of its first positions
// some of them see, or have behind their windows.
template <int MOST, class F> void each_together(int64_t rows, int64_t at, const Sight& sight, F f) {
  for (int64_t row = 0, left; (left = rows - row) > 0;) {
    const auto see = [&](auto together) {
      constexpr int T = decltype(together)::value;
      const int64_t last = sight.seen + (row + T - 1) * sight.more - at, behind = sight.behind + row * sight.more - at;
      if (last > 0 && behind < CACHE_BLOCK) f(row, together, std::min(CACHE_BLOCK, last));
      row += T;
    };
    if (left >= MOST) see(std::integral_constant<int, MOST>{});
    else if (MOST > 4 && left >= 4) see(std::integral_constant<int, std::min(MOST, 4)>{});
    else if (MOST > 3 && left == 3) see(std::integral_constant<int, std::min(MOST, 3)>{});
    else if (left >= 2) see(std::integral_constant<int, std::min(MOST, 2)>{});
    else see(std::integral_constant<int, 1>{});
  }
}

// What all rows of all heads have of one slice, as `kind` of a cache has keys and values: first the scores, block by block, so that a first-level cache
// holds the keys of a block; then the weights; then the values. seen [heads][rows][OUT + head_size].
template <class Kind>
void see_slice_of(const Kind& kind, const Queries& queries, const HeadCache& cache, const Sight& sight, int64_t slice, int64_t head_size, float* seen) {
  const int64_t rows = queries.rows, all = queries.heads * rows, stride = OUT + head_size, most = sight.seen + (rows - 1) * sight.more;
  begin_seen(seen, all, stride);
  const int64_t first = std::max(slice * SLICE, std::max<int64_t>(sight.behind, 0) / CACHE_BLOCK * CACHE_BLOCK), end = std::min((slice + 1) * SLICE, most);
  if (first >= end) return;
  const int64_t count = (end - first + CACHE_BLOCK - 1) / CACHE_BLOCK * CACHE_BLOCK;
  static thread_local Room room;
  float* scores = room.take(all * SCORES);
  for (int64_t at = first; at < end; at += CACHE_BLOCK) {
    const auto keys = kind.block(cache.keys, at % cache.positions);
    for (int64_t head = 0; head < queries.heads; head++)
      each_together<SEE_TOGETHER>(rows, at, sight, [&](int64_t row, auto together, int64_t seen_here) {
        kind.template score<decltype(together)::value>(keys, head, row, seen_here, scores + (head * rows + row) * SCORES + at - first);
      });
  }
  for (int64_t i = 0; i < all; i++) {
    const int64_t row = i % rows;
    float* own = scores + i * SCORES;
    const int64_t from = std::max<int64_t>(sight.behind + row * sight.more - first, 0), to = std::min(count, sight.seen + row * sight.more - first);
    if (from >= to) {
      std::fill_n(own, count, 0.0f);
      continue;
    }
    if (sight.cap > 0) soften(own + from / COLUMNS * COLUMNS, to - from / COLUMNS * COLUMNS, sight.cap);
    weigh(own, from, to, count, seen + i * stride);
  }
  for (int64_t at = first; at < end; at += CACHE_BLOCK) {
    const auto values = kind.block(cache.values, at % cache.positions);
    for (int64_t head = 0; head < queries.heads; head++)
      each_together<Kind::ADD_TOGETHER>(rows, at, sight, [&](int64_t row, auto together, int64_t seen_here) {
        const int64_t i = head * rows + row;
        kind.template add<decltype(together)::value>(values, scores + i * SCORES + at - first, seen_here, seen + i * stride);
      });
  }
}

}  // namespace BILLFISH_ISA
