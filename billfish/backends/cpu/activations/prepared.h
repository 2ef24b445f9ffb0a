// Rows of x as the kernels of a level want them for one kind of weights, and room for them.
#pragma once
#include <algorithm>
#include <vector>

#include "layout/problem.h"
#include "threads/threads.h"

namespace billfish {

// Kernels may read a block of a bundle (tile of rows), and a vector, past the end. The object owns the memory.
class Prepared {
 public:
  // For m rows; digits: 0 for exact, 1 for q8, 2 for q16. Weights that want floats get none. span: of x, see span_of_x.
  void begin(const Level& level, const Weights& w, int64_t m, int digits, int span) {
    level_ = &level, kind_ = w;
    digits_ = wants_floats(w) ? 0 : digits > 0 ? digits : level.exact_in_digits(w, m) ? EXACT_DIGITS : 0;
    const int64_t blocks = blocks_of(w.k);
    if (digits_ > 0) {
      integers = {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0, m, blocks, digits_, level.lanes(w, m, digits_, span), span, nullptr, nullptr};
      integers.start_stride = level.start_stride(w, integers);
      const size_t all = size_t(integers.bundles() * blocks), rows = all * size_t(integers.lanes);
      codes_.resize((rows + size_t(integers.lanes)) * size_t(digits_) * 32 + 64 + LINE), scale_.resize(rows * 2 + 4), totals_.resize(rows * 3 + 4), power_.resize(size_t(m));
      sums_.resize(rows * 3 * size_t(integers.parts()) + 4), starts_.resize(all * size_t(integers.start_stride) + 128);
      integers.codes = at_line(codes_.data()), integers.scale = scale_.data(), integers.totals = totals_.data();
      integers.sums = sums_.data(), integers.starts = starts_.data(), integers.power = power_.data();
      if (digits_ == EXACT_DIGITS) wide_.resize(rows), integers.wide = wide_.data(), values_.resize(rows * BLOCK), integers.rest = values_.data();
    } else {
      // Groups a multiple of 16 KiB apart would share the same few sets of a first-level cache, so then they are a chunk further apart.
      exact = {nullptr, m, blocks % 32 == 0 ? blocks + 8 : blocks, lanes_of_floats(w, m)};
      values_.resize(size_t(exact.bundles() * exact.lanes * exact.blocks * BLOCK)), exact.x = values_.data();
    }
  }

  // How many rows a tile has: a part is of whole tiles.
  int64_t bundle() const { return digits_ > 0 ? integers.lanes : exact.lanes; }

  // Some of the rows, and some of their blocks.
  struct Part {
    int64_t first_row, rows, first_block, last_block;
  };

  // x [k] of one row of a part, in the order of the weights' columns; finish() comes after all of them.
  void put(const float* x, int64_t number, const Part& part) {
    const int64_t k = kind_.k;
    std::vector<float> ordered(kind_.order ? size_t(k) : 0);
    const float* row = x;
    if (kind_.order) {
      for (int64_t j = 0; j < k; j++) ordered[size_t(j)] = row[kind_.order[j]];
      row = ordered.data();
    }
    if (digits_ > 0) level_->quantize_row(row, k, integers, number, part.first_block, part.last_block);
    else level_->lay_out_row(row, k, exact, number, part.first_block, part.last_block);
  }

  // When all rows of a part have been put, or have come into `integers` by somebody else.
  void finish(const Part& part) {
    if (digits_ > 0) level_->finish_x(kind_, integers, part.first_row, part.first_row + part.rows, part.first_block, part.last_block);
  }

  // Tiles [first, last) of w, which is of the kind that this was made for.
  void multiply(const Weights& w, const float* bias, float* y, int64_t first, int64_t last) const {
    if (digits_ > 0) level_->multiply8(w, integers, bias, y, first, last);
    else (wants_floats(w) ? level_->multiply_floats : level_->multiply_exact)(w, exact, bias, y, first, last);
  }

  // All weights that want floats want the same of x.
  bool is_for(const Weights& w) const {
    if (kind_.order != w.order || wants_floats(kind_) != wants_floats(w)) return false;
    return wants_floats(w) || (kind_.codes == w.codes && kind_.scales == w.scales && kind_.group == w.group && kind_.bias == w.bias);
  }

  size_t bytes() const { return bytes_of(codes_, scale_, totals_, power_, values_, sums_, starts_, wide_); }

  Activations8 integers{};
  ActivationsExact exact{};

 private:
  // Large vectors begin 16 bytes after a line. Half of the rows of a tile register would then lie in two.
  static constexpr size_t LINE = 64;
  static int8_t* at_line(int8_t* p) { return p + (LINE - reinterpret_cast<uintptr_t>(p) % LINE) % LINE; }

  template <class... Vectors> static size_t bytes_of(const Vectors&... all) { return (... + (all.capacity() * sizeof(all[0]))); }

  const Level* level_ = nullptr;
  Weights kind_{};
  int digits_ = 0;
  std::vector<int8_t> codes_;
  std::vector<float> scale_, totals_, power_, values_;
  std::vector<int32_t> sums_, starts_;
  std::vector<uint8_t> wide_;
};

// f(part) for m rows, tile by tile, on several threads. Where there are fewer tiles than threads, each thread gets some of the
// blocks, in whole spans, if `cut` and they are worth a hand-over.
template <class F> void for_each_part(int64_t m, int64_t bundle, int64_t blocks, bool cut, F f) {
  const int64_t bundles = (m + bundle - 1) / bundle, spans = (blocks + LARGEST_SPAN_OF_X - 1) / LARGEST_SPAN_OF_X;
  const int64_t cuts = !cut || bundles == 0 || m * blocks < 64 ? 1 : std::min<int64_t>(spans, (threads() + bundles - 1) / bundles);
  const auto cut_at = [&](int64_t nth) { return std::min(blocks, spans * nth / cuts * LARGEST_SPAN_OF_X); };
  parallel_for(bundles * cuts, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const int64_t row = i / cuts * bundle, nth = i % cuts;
      f(Prepared::Part{row, std::min<int64_t>(bundle, m - row), cut_at(nth), cut_at(nth + 1)});
    }
  }, 1);
}

}  // namespace billfish
