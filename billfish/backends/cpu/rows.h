// Rows of x, made and prepared once for any number of products with them.
#pragma once
#include <algorithm>
#include <deque>
#include <initializer_list>
#include <vector>

#include "prepared.h"

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
    if (put_all(wanted, make)) return;
    for (Prepared* prepared : wanted) prepared->begin(level_, prepared->kind(), m_, planes_, true);
    put_all(wanted, make);
  }

  // y = x W^T + bias for several W, whose tiles are shared out among the threads together.
  void multiply(std::initializer_list<Product> products) {
    int64_t tiles = 0;
    for (const Product& product : products) tiles += tiles_of(product.weights), prepared_for(product.weights);
    parallel_for(tiles, [&](int64_t first, int64_t last) {
      for (const Product& product : products) {
        const int64_t count = tiles_of(product.weights), from = std::max<int64_t>(first, 0), to = std::min(last, count);
        if (from < to) prepared_for(product.weights).multiply(product.weights, product.bias, product.y, from, to);
        first -= count, last -= count;
      }
    });
  }

 private:
  Prepared& prepared_for(const Weights& w) {
    for (Prepared& p : prepared_)
      if (p.is_for(w)) return p;
    Prepared& p = prepared_.emplace_back();
    p.begin(level_, w, m_, planes_);
    return p;
  }

  template <class Make> bool put_all(const std::vector<Prepared*>& wanted, Make make) {
    return for_each_part(m_, blocks_of(k_), false, [&](const Prepared::Part& part) {
      std::vector<float> made(size_t(k_ * part.rows));
      for (int64_t i = 0; i < part.rows; i++) make(part.first_row + i, made.data() + i * k_);
      bool good = true;
      for (Prepared* prepared : wanted) good = prepared->put(made.data(), part) && good;
      return good;
    });
  }

  int64_t tiles_of(const Weights& w) const { return (w.n + level_.tile_rows - 1) / level_.tile_rows; }

  const Level& level_;
  int64_t m_, k_;
  int planes_;
  std::deque<Prepared> prepared_;  // one for each kind, mostly a single one
};

}  // namespace billfish
