// Which experts each row takes, and with what weight.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "decoder/decoder.h"

namespace billfish {

struct Choice {
  std::vector<int32_t> ids;    // [rows, chosen], the largest score first; of equal scores the lower index goes first
  std::vector<float> weights;  // [rows, chosen]
};

// The index of the largest number that is not taken; of equal ones the first.
inline int64_t best_of(const float* numbers, const std::vector<char>& taken, int64_t count) {
  int64_t best = std::find(taken.begin(), taken.end(), 0) - taken.begin();
  for (int64_t i = best + 1; i < count; i++)
    if (!taken[size_t(i)] && numbers[i] > numbers[best]) best = i;
  return best;
}

// Groups of experts that nothing is chosen from are taken: all but the `used` ones with the largest sums of their two best scores.
inline void take_groups(const float* scores, int64_t experts, int64_t groups, int64_t used, std::vector<char>& taken) {
  const int64_t size = experts / groups;
  std::vector<float> sums;
  for (int64_t g = 0; g < groups; g++) {
    float first = -std::numeric_limits<float>::infinity(), second = first;
    for (int64_t e = g * size; e < (g + 1) * size; e++)
      if (scores[e] > first) second = first, first = scores[e];
      else if (scores[e] > second) second = scores[e];
    sums.push_back(size > 1 ? first + second : first);
  }
  std::vector<char> chosen(static_cast<size_t>(groups));
  for (int64_t i = 0; i < used; i++) chosen[size_t(best_of(sums.data(), chosen, groups))] = 1;
  for (int64_t e = 0; e < experts; e++) taken[size_t(e)] = !chosen[size_t(std::min(e / size, groups - 1))];
}

// Of logits [rows, experts]. Logits that are not numbers spoil the weights of their row, and no index.
inline Choice route(const float* logits, int64_t rows, int64_t experts, const Routing& how) {
  const int64_t chosen = how.chosen;
  Choice choice{std::vector<int32_t>(size_t(rows * chosen)), std::vector<float>(size_t(rows * chosen))};
  std::vector<char> taken(static_cast<size_t>(experts));
  std::vector<float> scores;  // that experts are chosen by, where they are not the logits
  for (int64_t row = 0; row < rows; row++) {
    const float *own = logits + row * experts, *by = own;
    int32_t* ids = choice.ids.data() + row * chosen;
    float* weights = choice.weights.data() + row * chosen;
    const auto sigmoid = [&](int64_t e) { return 1 / (1 + std::exp(-double(own[e]))); };
    if (how.sigmoid || how.selection_bias) {
      scores.resize(size_t(experts));
      double top = -INFINITY, all = 0;
      for (int64_t e = 0; e < experts; e++) top = std::max(top, double(own[e]));
      for (int64_t e = 0; e < experts; e++) all += std::exp(double(own[e]) - top);
      for (int64_t e = 0; e < experts; e++)
        scores[size_t(e)] = float(how.sigmoid ? sigmoid(e) : std::exp(double(own[e]) - top) / all) + (how.selection_bias ? how.selection_bias[e] : 0.0f);
      by = scores.data();
    }
    std::fill(taken.begin(), taken.end(), 0);
    if (how.groups > 1) take_groups(by, experts, how.groups, how.groups_used, taken);
    for (int64_t j = 0; j < chosen; j++) {
      const int64_t best = best_of(by, taken, experts);
      ids[j] = int32_t(best), taken[size_t(best)] = 1;
    }
    const double largest = own[ids[0]];
    const auto score = [&](int64_t e) { return how.sigmoid ? sigmoid(e) : std::exp(double(own[e]) - largest); };
    double sum = how.sigmoid ? how.renormalized ? 1e-20 : 1 : 0;
    if (how.renormalized)
      for (int64_t j = 0; j < chosen; j++) sum += score(ids[j]);
    else if (!how.sigmoid)
      for (int64_t e = 0; e < experts; e++) sum += score(e);
    for (int64_t j = 0; j < chosen; j++) weights[j] = float(score(ids[j]) / sum * double(how.scale));
    if (how.expert_scale)
      for (int64_t j = 0; j < chosen; j++) weights[j] *= how.expert_scale[ids[j]];
  }
  return choice;
}

}  // namespace billfish
