// Rows of x, prepared once for any number of products with them.
#pragma once
#include <algorithm>
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
  // planes: 0 for exact, 1 for q8, 2 for q16. Integer kernels may read a group of four rows, and a vector, past the end.
  Rows(const Level& level, int64_t m, int64_t k, int planes)
      : level_(level), m_(m), k_(k), blocks_(blocks_of(k)), planes_(planes), many_(m >= MANY_ROWS) {
    const size_t groups = size_t(m + 3) / 4 * blocks_;
    if (planes > 0) {
      codes_.resize(groups * planes * 128 + 64);
      scale_.resize(groups * 4 + 4), totals_.resize(groups * 8 + 4), sums_.resize(groups * 8 + 4);
    } else {
      x_.resize(size_t(m + 7) / 8 * 8 * blocks_ * BLOCK);
      totals_.resize(many_ ? 0 : size_t(m) * blocks_ * 2);
    }
  }

  // make(row, out) writes row `row` of x [k]; rows are made on several threads.
  template <class Make> void fill(Make make) {
    const Activations8 integers = activations8();
    parallel_for((m_ + 7) / 8, [&](int64_t first, int64_t last) {
      std::vector<float> made(size_t(k_ * std::min<int64_t>(8, m_)));
      for (int64_t group = first; group < last; group++) {
        const int64_t count = std::min<int64_t>(8, m_ - group * 8);
        for (int64_t i = 0; i < count; i++) {
          const int64_t row = group * 8 + i;
          float* x = made.data() + i * k_;
          make(row, x);
          if (planes_ > 0) level_.quantize_row(x, k_, integers, row);
          else if (!many_) level_.copy_row(x, k_, x_.data() + row * blocks_ * BLOCK, totals_.data() + row * blocks_ * 2);
        }
        if (planes_ == 0 && many_) level_.transpose_rows(made.data(), k_, count, x_.data() + group * 8 * blocks_ * BLOCK);
      }
    });
  }

  // y = x W^T + bias for several W, whose tiles are shared out among the threads together.
  void multiply(std::initializer_list<Product> products) {
    int64_t tiles = 0;
    for (const Product& product : products) tiles += tiles_of(product.weights);
    const Activations8 integers = activations8();
    const ActivationsExact exact{many_ ? nullptr : x_.data(), totals_.data(), many_ ? x_.data() : nullptr, m_};
    parallel_for(tiles, [&](int64_t first, int64_t last) {
      for (const Product& product : products) {
        const int64_t count = tiles_of(product.weights), from = std::max<int64_t>(first, 0), to = std::min(last, count);
        if (from < to) {
          if (planes_ > 0) level_.multiply8(product.weights, integers, product.bias, product.y, from, to);
          else level_.multiply_exact(product.weights, exact, product.bias, product.y, from, to);
        }
        first -= count, last -= count;
      }
    });
  }

 private:
  int64_t tiles_of(const Weights& w) const { return (w.n + level_.tile_rows - 1) / level_.tile_rows; }
  Activations8 activations8() { return {codes_.data(), scale_.data(), sums_.data(), totals_.data(), m_, blocks_, planes_}; }

  const Level& level_;
  int64_t m_, k_, blocks_;
  int planes_;
  bool many_;
  std::vector<int8_t> codes_;
  std::vector<float> scale_, totals_, x_;
  std::vector<int32_t> sums_;
};

}  // namespace billfish
