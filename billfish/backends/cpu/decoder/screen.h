// The LM head for greedy decoding: int8 pre-selection, int16 re-scoring. The largest logit of each row is that of q16.
//
// Rounding x to 8 bits moves logits by 0.02 of the standard deviation of their row (its *spread*), and none of 49,152 by more than 0.13 (SmolLM2). A
// logit that is more than one spread below the largest of its row could only be the largest in 16 bits if one of both moved by half a spread. So tiles
// with a logit above that are computed again. How far their logits move tells how far others may: if any moves by FAR, all tiles are computed again.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "activations/rows.h"

namespace billfish {

// Of a spread. Errors of a thousand logits are below it where their deviation is a sixteenth: then none of a million reaches half a spread.
constexpr float FAR = 0.2f;

struct Spread {
  float largest, deviation;  // NaN where a score is not finite
};

inline Spread spread_of(const float* scores, int64_t n) {
  constexpr int LANES = 16;  // as many sums side by side, so that compilers make vectors of them
  float largest[LANES], sums[LANES] = {}, squares[LANES] = {};
  std::fill_n(largest, LANES, -INFINITY);
  const auto add = [&](int lane, float score) {
    largest[lane] = std::max(largest[lane], score);
    sums[lane] += score, squares[lane] += score * score;
  };
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int lane = 0; lane < LANES; lane++) add(lane, scores[i + lane]);
  for (; i < n; i++) add(0, scores[i]);
  double sum = 0, square = 0;
  for (int lane = 0; lane < LANES; lane++) sum += sums[lane], square += squares[lane];
  if (!std::isfinite(square)) return {NAN, NAN};
  const double mean = sum / double(n);
  return {*std::max_element(largest, largest + LANES), float(std::sqrt(std::max(square / double(n) - mean * mean, 0.0)))};
}

// The tiles, of tile_rows logits each, with a logit that is within a spread of the largest of its row. scores: [rows, n].
inline std::vector<int64_t> tiles_near_best(const float* scores, const std::vector<Spread>& spreads, int64_t n, int64_t tile_rows) {
  std::vector<char> near(static_cast<size_t>((n + tile_rows - 1) / tile_rows));
  parallel_for(int64_t(near.size()), [&](int64_t first, int64_t last) {
    for (size_t row = 0; row < spreads.size(); row++) {
      const float least = spreads[row].largest - spreads[row].deviation, *own = scores + int64_t(row) * n;
      for (int64_t tile = first; tile < last; tile++) {
        bool above = false;
        for (int64_t i = tile * tile_rows; i < std::min((tile + 1) * tile_rows, n); i++) above |= !(own[i] < least);  // and where either is NaN
        near[size_t(tile)] |= above;
      }
    }
  });
  std::vector<int64_t> tiles;
  for (size_t tile = 0; tile < near.size(); tile++)
    if (near[tile]) tiles.push_back(int64_t(tile));
  return tiles;
}

// product.y [m, n] has logits of x in q8. Those that may be the largest of their row become logits of x in q16, which `x` holds.
inline void settle_best(const Rows& x, const LinearInto& product, int64_t m, int64_t tile_rows) {
  const int64_t n = product.weights.n;
  std::vector<Spread> spreads(static_cast<size_t>(m));
  parallel_for(m, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) spreads[size_t(row)] = spread_of(product.y + row * n, n);
  });
  const std::vector<int64_t> tiles = tiles_near_best(product.y, spreads, n, tile_rows);
  std::atomic<bool> moved_far{false};
  parallel_for(int64_t(tiles.size()), [&](int64_t first, int64_t last) {
    std::vector<float> before(static_cast<size_t>(m * tile_rows));
    for (int64_t t = first; t < last; t++) {
      const int64_t tile = tiles[size_t(t)], column = tile * tile_rows, count = std::min(tile_rows, n - column);
      for (int64_t row = 0; row < m; row++) std::copy_n(product.y + row * n + column, count, before.data() + row * tile_rows);
      x.multiply_tiles(product, tile, tile + 1);
      bool far = false;
      for (int64_t row = 0; row < m; row++)
        for (int64_t i = 0; i < count; i++)
          far |= !(std::abs(product.y[row * n + column + i] - before[size_t(row * tile_rows + i)]) <= FAR * spreads[size_t(row)].deviation);
      if (far) moved_far = true;
    }
  });
  if (moved_far && int64_t(tiles.size()) * tile_rows < n) x.multiply({product});
}

}  // namespace billfish
