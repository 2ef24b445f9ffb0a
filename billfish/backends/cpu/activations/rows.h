// Rows of x, made and prepared once for any number of products with them.
#pragma once
#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "activations/prepared.h"

namespace billfish {

// What x is multiplied with and added to, and where the result goes.
struct LinearInto {
  const Weights& weights;
  const float* bias;  // or null
  float* y;           // [m, n]
};

// Whoever keeps one of these keeps its memory, which would cost more to get afresh than to fill; begin() starts over.
class Rows {
 public:
  Rows() = default;
  Rows(const Level& level, int64_t m, int64_t k, int digits) { begin(level, m, k, digits); }

  // For m rows of x; digits: 0 for exact, 1 for q8, 2 for q16.
  void begin(const Level& level, int64_t m, int64_t k, int digits) { level_ = &level, m_ = m, k_ = k, digits_ = digits, used_ = 0; }

  // The same, unless it has begun so already.
  void begin_for(const Level& level, int64_t m, int64_t k, int digits) {
    if (level_ != &level || m_ != m || k_ != k || digits_ != digits) begin(level, m, k, digits);
  }

  // make(row, out) writes row `row` of x [k], on several threads. `weights` are those that come next in multiply().
  template <class Make> void fill(const std::vector<const Weights*>& weights, Make make) {
    expect(weights);
    if (bundle() > SEVERAL_ROWS && (m_ + bundle() - 1) / bundle() < threads()) {
      made_.resize(size_t(m_ * k_));
      parallel_for(m_, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; row++) make(row, made_.data() + row * k_);
      });
      return share_out(made_.data());
    }
    for_each_part(m_, bundle(), blocks_of(k_), false, [&](const Prepared::Part& part) { fill_part(part, make); });
  }

  // The same with x [m, k] that is there already.
  void take(const std::vector<const Weights*>& weights, const float* x) {
    expect(weights);
    share_out(x);
  }

  // y = x W^T + bias for several W, whose tiles are shared out among the threads together.
  void multiply(const std::vector<LinearInto>& products) const {
    int64_t tiles = 0;
    for (const LinearInto& product : products) tiles += tiles_of(product.weights);
    parallel_for(tiles, [&](int64_t first, int64_t last) {
      for (const LinearInto& product : products) {
        const int64_t count = tiles_of(product.weights), from = std::max<int64_t>(first, 0), to = std::min(last, count);
        if (from < to) multiply_tiles(product, from, to);
        first -= count, last -= count;
      }
    });
  }

  // ---- the same in steps, for whoever shares out the rows or the tiles of several Rows --------------------------------

  // Which weights are multiplied next.
  void expect(const std::vector<const Weights*>& weights) {
    wanted_.clear();
    for (const Weights* w : weights) {
      Prepared* prepared = &prepared_for(*w);
      if (std::find(wanted_.begin(), wanted_.end(), prepared) == wanted_.end()) wanted_.push_back(prepared);
    }
  }

  template <class Make> void fill_part(const Prepared::Part& part, Make make) {
    const std::unique_ptr<float[]> made(new float[size_t(k_)]);  // not zeros, as a vector's
    put(part, [&](int64_t row) {
      make(row, made.get());
      return made.get();
    });
  }

  // Tiles [first, last) of a product.
  void multiply_tiles(const LinearInto& product, int64_t first, int64_t last) const {
    find(product.weights)->multiply(product.weights, product.bias, product.y, first, last);
  }

  size_t bytes() const {
    size_t all = made_.capacity() * sizeof(float);
    for (const Prepared& p : prepared_) all += p.bytes();
    return all;
  }

 private:
  const Prepared* find(const Weights& w) const {
    for (size_t i = 0; i < used_; i++)
      if (prepared_[i].is_for(w)) return &prepared_[i];
    return nullptr;
  }

  Prepared& prepared_for(const Weights& w) {
    if (const Prepared* found = find(w)) return const_cast<Prepared&>(*found);
    if (used_ == prepared_.size()) prepared_.emplace_back();
    Prepared& p = prepared_[used_++];
    p.begin(*level_, w, m_, digits_, span_of_x(w, digits_));
    return p;
  }

  void share_out(const float* x) {
    for_each_part(m_, bundle(), blocks_of(k_), true, [&](const Prepared::Part& part) { put(part, [&](int64_t row) { return x + row * k_; }); });
  }

  // The rows of a part, of which row_of(number) gives one [k] at a time.
  template <class RowOf> void put(const Prepared::Part& part, RowOf row_of) {
    for (int64_t row = part.first_row; row < part.first_row + part.rows; row++) {
      const float* x = row_of(row);
      for (Prepared* prepared : wanted_) prepared->put(x, row, part);
    }
    for (Prepared* prepared : wanted_) prepared->finish(part);
  }

  // A thread prepares whole bundles as it makes their rows. Where bundles are larger than this and fewer than threads, some of these would have
  // nothing to do: rows are made first, and then shared out block by block, since rows of a bundle share cache lines.
  static constexpr int64_t SEVERAL_ROWS = 4;

  // Rows of the largest bundle: all others are parts of it.
  int64_t bundle() const {
    int64_t rows = 1;
    for (const Prepared* prepared : wanted_) rows = std::max(rows, prepared->bundle());
    return rows;
  }

  int64_t tiles_of(const Weights& w) const { return (w.n + level_->tile_rows - 1) / level_->tile_rows; }

  const Level* level_ = nullptr;
  int64_t m_ = 0, k_ = 0;
  int digits_ = 0;
  std::deque<Prepared> prepared_;  // one for each kind, mostly a single one
  size_t used_ = 0;                // of them
  std::vector<float> made_;        // rows of x, where they are made before they are prepared
  std::vector<Prepared*> wanted_;  // for the weights that come next
};

}  // namespace billfish
