// The kernels of few8.h: codes and scales are decoded as they are read, in the order in which they lie.
#pragma once
#include "gemm/few8.h"
#include "gemm/held8.h"

namespace BILLFISH_ISA {

// Lines of 64 bytes that each block asks for ahead with several rows of x, so that memory works while products are made, not only while
// codes are read: half the lines of a block's codes, and perhaps one for scales, where NEON passes over a tile twice, with two of its four row
// vectors at a time, and twice as many where it passes once.
template <class P> constexpr int STREAM_LINES = (P::Decoder::block_bytes / 128 + LINES_OF_SCALES) * P::COUNT / 2;

// With one row, and where a level asks at all.
template <class P> INLINED inline void ask_for_stream(const uint8_t* p) {
  if constexpr (ONE_ROW_AHEAD > 0) ask_for<P::Decoder::block_bytes / 64 + 1>(p + ONE_ROW_AHEAD);
}

// ---- one row of x ----------------------------------------------------------------------------------------------------

// Adds blocks of a tile times row `row` of x to sums [TILE_ROWS]. With one and two digits, a row gets the bits that it gets beside others: see add_rows
// and many8.h.
template <class P, class Source> KERNEL void add_one_row(const Weights& w, Blocks run, const Activations8& x, int64_t row, float* sums) {
  Source source;
  typename P::Totals total;
  P::load(total, sums);
  BlockOfX<P> x_block(x, row, run.first);
  typename P::GroupFloats scale = {}, minimum = {};  // of this span
  const uint8_t* p = run.stream;
  const auto ask = [&]() INLINED { ask_for_stream<P>(p); };
  for (int64_t b = 0; b < run.count; b += x_block.step, p += P::Decoder::block_bytes, x_block.next()) {
    if constexpr (Source::two_levels)
      if ((b & 7) == 0) source.template begin_chunk<P::FIRST, P::COUNT>(p), p += run.chunk_header;
    const bool begins = begins_span(run, b);
    if (begins) source.group = p, p += run.span_header;
    ask();
    unroll<P::HALVES>([&](auto half) INLINED {
      typename P::Sums sum;
      sum_codes<P, decltype(half)::value>(p, x_block, run.count - b, w.table, sum, ask);
      if (__builtin_expect(begins, 1))
        unroll<P::COUNT>([&](auto r) INLINED {
          scale[half][r] = source.template scale<P::row_at(r)>(half);
          if constexpr (Source::minimums) minimum[half][r] = source.template minimum<P::row_at(r)>(half);
        });
      const FloatActivations x_scales[2] = {x_block.scales(false), x_block.scales(true)}, x_total = x_block.total(half);
      repeat<P::COUNT>([&](int r) INLINED {
        if constexpr (P::DIGITS == 1) total[0][r] = multiply_add_x<0>(total[0][r], multiply(sum_as_floats<P>(sum, 0, r), scale[half][r]), x_scales[P::in_place(r)]);
        else total[0][r] = add_scaled<P, 0>(total[0][r], sum, r, x_scales[P::in_place(r)], scale[half][r]);
        if constexpr (Source::minimums) total[0][r] = multiply_add_x<0>(total[0][r], minimum[half][r], x_total);
      });
    });
  }
  P::store(total, sums);
}

// The same for exact products where scales have two levels: sums are multiplied by their small integers, and once for a chunk by what these have in
// common. Rounded in another order than by whole scales, so with one and two digits it would give a row other bits than it gets beside others.
template <class P, class Source> KERNEL void add_one_row_by_level(const Weights& w, Blocks run, const Activations8& x, int64_t row, float* sums) {
  Source source;
  typename P::Totals total, of_scales = {}, of_minimums = {};  // the latter of this chunk
  P::load(total, sums);
  BlockOfX<P> x_block(x, row, run.first);
  typename P::GroupFloats scale = {}, minimum = {};  // of this span
  const uint8_t *p = run.stream, *chunk = p;
  const auto ask = [&]() INLINED { ask_for_stream<P>(p); };
  for (int64_t b = 0; b < run.count; b += x_block.step, p += P::Decoder::block_bytes, x_block.next()) {
    if ((b & 7) == 0) {
      chunk = p, p += run.chunk_header;
      repeat<P::COUNT>([&](int r) INLINED { of_scales[0][r] = of_minimums[0][r] = splat(0); });
    }
    const bool begins = begins_span(run, b);
    if (begins) source.group = p, p += run.span_header;
    ask();
    unroll<P::HALVES>([&](auto half) INLINED {
      typename P::Sums sum;
      sum_codes<P, decltype(half)::value>(p, x_block, run.count - b, w.table, sum, ask);
      if (__builtin_expect(begins, 1))
        unroll<P::COUNT>([&](auto r) INLINED {
          scale[half][r] = source.template lower_scale<P::row_at(r)>(half);
          if constexpr (Source::minimums) minimum[half][r] = source.template lower_minimum<P::row_at(r)>(half);
        });
      const FloatActivations x_scales[2] = {x_block.scales(false), x_block.scales(true)}, x_total = x_block.total(half);
      repeat<P::COUNT>([&](int r) INLINED {
        of_scales[0][r] = add_scaled<P, 0>(of_scales[0][r], sum, r, x_scales[P::in_place(r)], scale[half][r]);
        if constexpr (Source::minimums) of_minimums[0][r] = multiply_add_x<0>(of_minimums[0][r], minimum[half][r], x_total);
      });
    });
    if ((b & 7) == 7 || b + 1 == run.count)
      unroll<P::COUNT>([&](auto r) INLINED {
        total[0][r] = multiply_add(total[0][r], of_scales[0][r], Source::template upper_scale<P::row_at(r)>(chunk));
        if constexpr (Source::minimums) total[0][r] = multiply_add(total[0][r], of_minimums[0][r], Source::template upper_minimum<P::row_at(r)>(chunk));
      });
  }
  P::store(total, sums);
}

// ---- several rows of x -----------------------------------------------------------------------------------------------

// Adds blocks of row vectors of a tile times the rows of x [row, row + T) to sums [T][TILE_ROWS]. Each sum is multiplied by the scale of
// its group first, so that one vector of four scales of x serves all rows.
template <class P, class Source> KERNEL void add_rows(const Weights& w, Blocks run, const Activations8& x, int64_t row, float* sums) {
  Source source;
  typename P::Totals total;
  P::load(total, sums);
  BlockOfX<P> x_block(x, row, run.first);
  typename P::GroupFloats scale = {}, minimum = {};  // of this span
  alignas(64) float offset[P::HALVES][P::COUNT * LANES];  // as scale_sum wants it
  const uint8_t *p = run.stream, *ahead = run.ahead;
  const auto ask = [&]() INLINED { ask_for<STREAM_LINES<P>>(ahead), ahead += STREAM_LINES<P> * 64; };
  for (int64_t b = 0; b < run.count; b += x_block.step, p += P::Decoder::block_bytes, x_block.next()) {
    if constexpr (Source::two_levels)
      if ((b & 7) == 0) source.template begin_chunk<P::FIRST, P::COUNT>(p), p += run.chunk_header;
    const bool begins = begins_span(run, b);
    if (begins) source.group = p, p += run.span_header;
    ask();
    unroll<P::HALVES>([&](auto half) INLINED {
      // Before the sums, which would have to wait for what is stored and loaded again.
      if (__builtin_expect(begins, 1))
        unroll<P::COUNT>([&](auto r) INLINED {
          scale[half][r] = source.template scale<P::row_at(r)>(half);
          if constexpr (SUM_OFFSET != 0 && !P::in_place(r)) store_floats(offset[half] + r * LANES, multiply(scale[half][r], splat(-SUM_OFFSET)));
          if constexpr (Source::minimums) minimum[half][r] = source.template minimum<P::row_at(r)>(half);
        });
      if constexpr (P::T == X_ROWS) put_aside<P>(total);
      typename P::Sums sum;
      sum_codes<P, decltype(half)::value>(p, x_block, run.count - b, w.table, sum, ask);
      repeat<P::COUNT>([&](int r) INLINED {
        const FloatActivations x_scales = x_block.scales(P::in_place(r)), x_totals = x_block.total(half);
        Floats scaled[P::T];
        repeat<P::T>([&](int t) INLINED {
          if (P::in_place(r)) scaled[t] = multiply(sum_as_floats<P>(sum, t, r), scale[half][r]);
          else scaled[t] = scale_sum<P::MAGIC>(sum[t][0][r], scale[half][r], offset[half] + r * LANES);
        });
        unroll<P::T>([&](auto t) INLINED { total[t][r] = multiply_add_x<decltype(t)::value>(total[t][r], scaled[t], x_scales); });
        if constexpr (Source::minimums)
          unroll<P::T>([&](auto t) INLINED { total[t][r] = multiply_add_x<decltype(t)::value>(total[t][r], minimum[half][r], x_totals); });
      });
    });
  }
  P::store(total, sums);
}

// ---- which kernel ----------------------------------------------------------------------------------------------------

// Whether there are kernels for two and three rows of x: for the codes that most models have.
template <class Decoder> constexpr bool has_tails = TAILS && std::is_same_v<Decoder, Nibbles>;

// Adds chunks of a tile times the rows of x [row, row + x.lanes) to sums [x.lanes][TILE_ROWS]: there is room for so many.
template <class Decoder, Scales S, Reach REACH>
void add_chunks(const Weights& w, Blocks run, const Activations8& x, int64_t row, float* sums) {
  using Source = Reader<S>;
  const auto one_row = [&](auto digits) {
    using P = Piece<Decoder, 1, decltype(digits)::value, REACH, decltype(digits)::value != EXACT_DIGITS, 0, ROW_VECTORS>;
    if constexpr (Source::two_levels && decltype(digits)::value == EXACT_DIGITS) add_one_row_by_level<P, Source>(w, run, x, row, sums);
    else add_one_row<P, Source>(w, run, x, row, sums);
  };
  const auto rows = [&](auto count, auto vectors) {  // as many row vectors at a time as leave registers for their sums
    unroll<ROW_VECTORS / decltype(vectors)::value>([&](auto part) {
      using P = Piece<Decoder, decltype(count)::value, 1, REACH, true, decltype(part)::value * decltype(vectors)::value, decltype(vectors)::value>;
      add_rows<P, Source>(w, run, x, row, sums);
      run.ahead += run.count * STREAM_LINES<P> * 64;
    });
  };
  constexpr std::integral_constant<int, 2> two;
  if constexpr (has_held<Decoder, S, REACH>)
    if (x.lanes > X_ROWS) return add_held_rows<Source>(run, x, row, sums);
  if (x.lanes == X_ROWS) {
    if constexpr (has_tails<Decoder>) {
      if (x.m - row <= 2) return rows(two, std::integral_constant<int, ROW_VECTORS>{});
      if (x.m - row == 3) return rows(std::integral_constant<int, 3>{}, two);
    }
    rows(std::integral_constant<int, X_ROWS>{}, two);
  }
  else if (x.digits == 1) one_row(std::integral_constant<int, 1>{});
  else if constexpr (REACH != Reach::blocks) {  // which is for one digit
    if (x.digits == 2) one_row(std::integral_constant<int, 2>{});
    else if constexpr (EXACT_IN_DIGITS) one_row(std::integral_constant<int, EXACT_DIGITS>{});
  }
}

// The kernels for the combinations of codes, scales and reach that formats have, each of which is four more to compile; or null.
template <class Decoder, Scales S> FewKernel few_kernel(Reach reach) { return reach == Reach::block ? add_chunks<Decoder, S, Reach::block> : nullptr; }
template <class Decoder, Scales S> FewKernel few_kernel_of_groups(Reach reach) {
  return reach == Reach::blocks ? add_chunks<Decoder, S, Reach::blocks> : few_kernel<Decoder, S>(reach);
}
template <class Decoder, Scales S> FewKernel few_kernel_of_halves(Reach reach) { return reach == Reach::half ? add_chunks<Decoder, S, Reach::half> : nullptr; }

// For codes that are indices into a table. FP4's has small values, and IQ4's large ones.
template <class Decoder> FewKernel few_kernel_of_tables(Scales scales, Reach reach) {
  constexpr bool small = SMALL_TABLES && std::is_same_v<Decoder, SmallLooked>, large = SMALL_TABLES && !small;
  if (scales == Scales::f16) return reach == Reach::half ? add_chunks<Decoder, Scales::f16, Reach::half> : few_kernel_of_groups<Decoder, Scales::f16>(reach);
  if constexpr (!large) {
    if (scales == Scales::e8m0) return few_kernel<Decoder, Scales::e8m0>(reach);
    if (scales == Scales::e4m3) return few_kernel_of_halves<Decoder, Scales::e4m3>(reach);
  }
  if constexpr (!small)
    if (scales == Scales::sub) return few_kernel<Decoder, Scales::sub>(reach);
  return nullptr;
}

}  // namespace BILLFISH_ISA
