// Which experts each row takes, and with what weight.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace billfish {

struct Routing {
  std::vector<int32_t> ids;    // [rows, chosen], the largest score first; of equal scores the lower index goes first
  std::vector<float> weights;  // [rows, chosen]
};

// Of scores [rows, experts]. Weights are `scale` times a softmax over the chosen scores if `renormalized`, else over all. Scores that
// are not numbers spoil the weights of their row, and no index.
inline Routing route(const float* scores, int64_t rows, int64_t experts, int64_t chosen, bool renormalized, float scale) {
  Routing routing{std::vector<int32_t>(size_t(rows * chosen)), std::vector<float>(size_t(rows * chosen))};
  std::vector<char> taken(static_cast<size_t>(experts));
  for (int64_t row = 0; row < rows; row++) {
    const float* own = scores + row * experts;
    int32_t* ids = routing.ids.data() + row * chosen;
    std::fill(taken.begin(), taken.end(), 0);
    for (int64_t j = 0; j < chosen; j++) {
      int64_t best = std::find(taken.begin(), taken.end(), 0) - taken.begin();
      for (int64_t e = best + 1; e < experts; e++)
        if (!taken[size_t(e)] && own[e] > own[best]) best = e;
      ids[j] = int32_t(best), taken[size_t(best)] = 1;
    }
    const double largest = own[ids[0]];
    double sum = 0;
    if (renormalized)
      for (int64_t j = 0; j < chosen; j++) sum += std::exp(double(own[ids[j]]) - largest);
    else
      for (int64_t e = 0; e < experts; e++) sum += std::exp(double(own[e]) - largest);
    for (int64_t j = 0; j < chosen; j++) routing.weights[size_t(row * chosen + j)] = float(std::exp(double(own[ids[j]]) - largest) / sum * scale);
  }
  return routing;
}

}  // namespace billfish
