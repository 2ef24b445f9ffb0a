// Which tiles of the head may have the best score of a row, as seen from scores of x in q8.
//
// Rounding x to 8 bits moves a score by 0.02 of the spread of its row's scores (their standard deviation), and none of 49,152 by more than 0.13 of
// it (SmolLM2); with one value of x that is 1000 times the others, by 0.09. So the score that is best in 16 bits is within one spread of the best
// in 8 bits: the errors of both would have to be 4 times the largest.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "threads/threads.h"

namespace billfish {

// What the best score of a row in 16 bits has at least in 8 bits: the largest score less the spread. NaN where a score is.
inline float least_of_best(const float* scores, int64_t n) {
  constexpr int LANES = 16;  // as many sums side by side, so that compilers make vectors of them
  float largest[LANES], sums[LANES] = {}, squares[LANES] = {};
  std::fill_n(largest, LANES, -INFINITY);
  const auto add = [&](int lane, float score) {
    largest[lane] = score < largest[lane] ? largest[lane] : score;
    sums[lane] += score, squares[lane] += score * score;
  };
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int lane = 0; lane < LANES; lane++) add(lane, scores[i + lane]);
  for (; i < n; i++) add(0, scores[i]);
  double sum = 0, square = 0;
  for (int lane = 0; lane < LANES; lane++) sum += sums[lane], square += squares[lane];
  const double mean = sum / double(n);
  return float(*std::max_element(largest, largest + LANES) - std::sqrt(std::max(square / double(n) - mean * mean, 0.0)) + (sum - sum));
}

// The numbers of the tiles, of tile_rows scores each, that may have the best score of any of m rows [m, n].
inline std::vector<int64_t> tiles_near_best(const float* scores, int64_t m, int64_t n, int64_t tile_rows) {
  std::vector<float> least(static_cast<size_t>(m));
  parallel_for(m, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) least[size_t(row)] = least_of_best(scores + row * n, n);
  });
  std::vector<char> near(static_cast<size_t>((n + tile_rows - 1) / tile_rows));
  parallel_for(int64_t(near.size()), [&](int64_t first, int64_t last) {
    for (int64_t row = 0; row < m; row++)
      for (int64_t tile = first; tile < last; tile++) {
        const float *begin = scores + row * n + tile * tile_rows, *end = std::min(begin + tile_rows, scores + (row + 1) * n);
        bool above = false;
        for (const float* score = begin; score < end; score++) above |= !(*score < least[size_t(row)]);  // and where either is NaN
        near[size_t(tile)] |= above;
      }
  });
  std::vector<int64_t> tiles;
  for (size_t tile = 0; tile < near.size(); tile++)
    if (near[tile]) tiles.push_back(int64_t(tile));
  return tiles;
}

}  // namespace billfish
