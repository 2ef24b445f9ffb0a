// Rows of x, prepared once for any number of products with them.
#pragma once
#include <algorithm>
#include <deque>
#include <initializer_list>
#include <vector>

#include "problem.h"
#include "threads.h"

namespace billfish {

struct Product {
  const Weights& weights;
  const float* bias;  // or null
  float* y;           // [m, n]
};

class Rows {
 public:
  // planes: 0 for exact, 1 for q8, 2 for q16.
  Rows(const Level& level, int64_t m, int64_t k, int planes) : level_(level), m_(m), k_(k), planes_(planes) {}

  // make(row, out) writes row `row` of x [k], on several threads. `weights` are those that come next in multiply().
  template <class Make> void fill(std::initializer_list<const Weights*> weights, Make make) {
    std::vector<Prepared*> wanted;
    for (const Weights* w : weights) {
      Prepared* prepared = &prepared_for(*w);
      if (std::find(wanted.begin(), wanted.end(), prepared) == wanted.end()) wanted.push_back(prepared);
    }
    parallel_for((m_ + 7) / 8, [&](int64_t first, int64_t last) {
      std::vector<float> made(size_t(k_ * std::min<int64_t>(8, m_)));
      for (int64_t group = first; group < last; group++) {
        const int64_t begin = group * 8, count = std::min<int64_t>(8, m_ - begin);
        for (int64_t i = 0; i < count; i++) make(begin + i, made.data() + i * k_);
        for (Prepared* prepared : wanted) put(*prepared, made.data(), begin, count);
      }
    });
  }

  // y = x W^T + bias for several W, whose tiles are shared out among the threads together.
  void multiply(std::initializer_list<Product> products) {
    int64_t tiles = 0;
    for (const Product& product : products) tiles += tiles_of(product.weights), prepared_for(product.weights);
    parallel_for(tiles, [&](int64_t first, int64_t last) {
      for (const Product& product : products) {
        const int64_t count = tiles_of(product.weights), from = std::max<int64_t>(first, 0), to = std::min(last, count);
        if (from < to) {
          const Prepared& x = prepared_for(product.weights);
          if (planes_ > 0) level_.multiply8(product.weights, x.integers, product.bias, product.y, from, to);
          else level_.multiply_exact(product.weights, x.exact, product.bias, product.y, from, to);
        }
        first -= count, last -= count;
      }
    });
  }

 private:
  // x for one kind of weights. Kernels may read a group of rows, and a vector, past the end.
  struct Prepared {
    Weights kind;
    Activations8 integers{};
    ActivationsExact exact{};
    std::vector<int8_t> codes;
    std::vector<float> scale, totals, x;
    std::vector<int32_t> sums, starts;
  };

  Prepared& prepared_for(const Weights& w) {
    for (Prepared& p : prepared_)
      if (p.kind.codes == w.codes && p.kind.scales == w.scales && p.kind.group == w.group && p.kind.bias == w.bias) return p;
    Prepared& p = prepared_.emplace_back();
    p.kind = w;
    const int64_t blocks = blocks_of(k_);
    if (planes_ > 0) {
      p.integers = {nullptr, nullptr, nullptr, nullptr, nullptr, 0, m_, blocks, planes_, level_.lanes(w, m_, planes_)};
      p.integers.start_stride = level_.start_stride(w, p.integers);
      const size_t all = size_t(p.integers.groups() * blocks), rows = all * size_t(p.integers.lanes);
      p.codes.resize(rows * planes_ * 32 + 64), p.scale.resize(rows * 2 + 4), p.totals.resize(rows * 3 + 4), p.sums.resize(rows * 3 + 4);
      p.starts.resize(all * size_t(p.integers.start_stride) + 128);
      p.integers.codes = p.codes.data(), p.integers.scale = p.scale.data(), p.integers.totals = p.totals.data();
      p.integers.sums = p.sums.data(), p.integers.starts = p.starts.data();
    } else {
      const bool transposed = level_.wants_transposed(w, m_);
      p.x.resize(size_t(m_ + 7) / 8 * 8 * blocks * BLOCK), p.totals.resize(transposed ? 0 : size_t(m_) * blocks * 2);
      p.exact = {transposed ? nullptr : p.x.data(), p.totals.data(), transposed ? p.x.data() : nullptr, m_};
    }
    return p;
  }

  // `count` rows of x from `begin` on, up to eight.
  void put(Prepared& p, const float* made, int64_t begin, int64_t count) {
    const int64_t blocks = blocks_of(k_), lanes = p.integers.lanes;
    if (planes_ > 0) {
      for (int64_t i = 0; i < count; i++) level_.quantize_row(made + i * k_, k_, p.integers, begin + i);
      level_.fill_starts(p.kind, p.integers, begin / lanes, (begin + count + lanes - 1) / lanes);
    } else if (p.exact.transposed) {
      level_.transpose_rows(made, k_, count, p.x.data() + begin * blocks * BLOCK);
    } else {
      for (int64_t i = 0; i < count; i++)
        level_.copy_row(made + i * k_, k_, p.x.data() + (begin + i) * blocks * BLOCK, p.totals.data() + (begin + i) * blocks * 2);
    }
  }

  int64_t tiles_of(const Weights& w) const { return (w.n + level_.tile_rows - 1) / level_.tile_rows; }

  const Level& level_;
  int64_t m_, k_;
  int planes_;
  std::deque<Prepared> prepared_;  // one for each kind, mostly a single one
};

}  // namespace billfish
