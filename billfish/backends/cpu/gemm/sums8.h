// The integer sums of a block, and what they are as floats: what all kernels of gemm8.h have in common.
#pragma once
#include "gemm/tiles.h"

namespace BILLFISH_ISA {

#define KERNEL __attribute__((flatten, noinline))

// Whether a block is the first of its span.
inline bool begins_span(const Blocks& run, int64_t b) { return (b & (run.span - 1)) == 0; }

// What a kernel holds in registers: T rows of x, of DIGITS digits each, by the row vectors FIRST .. FIRST + COUNT - 1 of a tile.
// MAGIC: whether sums start at SUM_START.
template <class DECODER, int ROWS, int X_DIGITS, Reach REACH, bool FROM_START, int FIRST_VECTOR, int VECTOR_COUNT, int X_LANES = X_ROWS> struct Piece {
  using Decoder = DECODER;
  static constexpr int T = ROWS, DIGITS = X_DIGITS, HALVES = REACH == Reach::half ? 2 : 1, FIRST = FIRST_VECTOR, COUNT = VECTOR_COUNT;
  static constexpr bool MAGIC = FROM_START, over_blocks = REACH == Reach::blocks;
  static constexpr int lanes = T == 1 ? 1 : X_LANES;  // rows of x that lie together; T may be less
  static constexpr int TOGETHER = T * COUNT * DIGITS <= 8 ? QUADS_TOGETHER : 1;  // quads of k whose codes are decoded before dot products
  using Sums = Ints[T][DIGITS][COUNT];
  using Codes = Bytes[TOGETHER][COUNT];
  using Totals = Floats[T][COUNT];
  using GroupFloats = Floats[HALVES][COUNT];  // a scale or a minimum for each row and group

  // f(t, r) for each row of x and each row vector.
  template <class F> static INLINED void each(F&& f) {
    unroll<T>([&](auto t) INLINED { unroll<COUNT>([&](auto r) INLINED { f(t, r); }); });
  }
  // The same in the order in which dot products leave most registers for sums.
  template <class F> static INLINED void each_dot(F&& f) {
    if constexpr (ROW_OF_X_FIRST) each(f);
    else unroll<COUNT>([&](auto r) INLINED { unroll<T>([&](auto t) INLINED { f(t, r); }); });
  }
  static INLINED void load(Totals& total, const float* sums) {
    each([&](auto t, auto r) INLINED { total[t][r] = load_floats(sums + t * TILE_ROWS + (FIRST + r) * LANES); });
  }
  static INLINED void store(const Totals& total, float* sums) {
    each([&](auto t, auto r) INLINED { store_floats(sums + t * TILE_ROWS + (FIRST + r) * LANES, total[t][r]); });
  }
  // The first of the tile's rows that a row vector has.
  template <class R> static constexpr int row_at(R) { return (FIRST + R::value) * LANES; }
  // Whether a row vector's sums are 16 times too large, and have those of the one before in them: see Nibbles.
  template <class R> static constexpr bool in_place(R) { return Decoder::in_place && (FIRST + R::value) % 2; }
};

// Where the next block of x is, for the rows of a piece, and what belongs to its span.
template <class P> struct BlockOfX {
  const int8_t* codes;
  const float *scale, *totals;
  const int32_t* starts;
  const int64_t start_stride;
  const int step;  // blocks that a sum goes over

  // A constant number of lanes, and not x.lanes: divisions are slow.
  INLINED BlockOfX(const Activations8& x, int64_t row, int64_t block) : start_stride(x.start_stride), step(P::over_blocks ? x.span : 1) {
    const int64_t at = row / P::lanes * x.blocks + block, lane = row % P::lanes;
    codes = x.codes + (at * P::DIGITS * P::lanes + lane) * 32;
    scale = x.scale + at * 2 * P::lanes + lane;
    totals = x.totals + at * 3 * P::lanes + lane;
    starts = x.starts + at * start_stride + lane * START_INTS;
  }
  INLINED void next_codes() { codes += P::DIGITS * P::lanes * 32; }
  INLINED void next() { next_codes(), scale += step * 2 * P::lanes, totals += step * 3 * P::lanes, starts += step * start_stride; }

  // What the sums of a digit begin with: the sums of a part begin with its last digit's.
  template <int HALF, int ROW_VECTOR, int T, int DIGIT> INLINED Ints start() const {
    constexpr int parts = P::DIGITS == 1 ? 1 : 2, each = P::DIGITS / parts, part = DIGIT / each;
    if constexpr (DIGIT % each == each - 1) return load_start(starts + (((HALF * 2 + ROW_VECTOR % 2) * parts + part) * P::lanes + T) * START_INTS);
    else return splat_int(0);
  }
  // Of all rows: scales, or a sixteenth of each, and totals.
  INLINED FloatActivations scales(bool sixteenth) const { return load_x(scale + sixteenth * P::lanes); }
  INLINED FloatActivations total(int half) const { return load_x(totals + (P::HALVES == 2 ? half : 2) * P::lanes); }
};

// Adds the dot products of a half of a block, or of all of it, with the codes of x to sum, which begins here unless it GOES_ON.
// Of four digits, each pair makes one sum, in digits 1 and 3. The order of statements is that of the instructions, and was chosen by measurement.
template <class P, int HALF, bool GOES_ON> INLINED inline void sum_block(const uint8_t* codes, const uint8_t* table, const BlockOfX<P>& x, typename P::Sums& sum) {
  constexpr int quads = 8 / P::HALVES;
  Activations x_now[P::T][P::DIGITS];
  [[maybe_unused]] typename P::Sums narrow;  // where a level has them: of 16 bits, from 0 on, and then added to sums that have a start
  unroll<quads / P::TOGETHER>([&](auto step) INLINED {
    constexpr int nth = decltype(step)::value, quad = HALF * quads + nth * P::TOGETHER;
    if constexpr (quad % 4 == 0)
      unroll<P::T>([&](auto t) INLINED {
        unroll<P::DIGITS>([&](auto p) INLINED { x_now[t][p] = load_activations(x.codes + (p * P::lanes + t) * 32 + quad * 4); });
      });
    typename P::Codes bytes;
    unroll<P::TOGETHER>([&](auto i) INLINED {
      unroll<P::COUNT>([&](auto r) INLINED {
        bytes[i][r] = P::Decoder::template dotted<(quad + decltype(i)::value) * ROW_VECTORS + P::FIRST + decltype(r)::value>(codes, table);
      });
    });
    P::each_dot([&](auto t, auto r) INLINED {
      unroll<P::DIGITS>([&](auto p) INLINED {
        const auto start = [&]() INLINED { return x.template start<HALF, P::FIRST + decltype(r)::value, decltype(t)::value, decltype(p)::value>(); };
        if constexpr (narrow_quads(P::Decoder::operand) == 0) {
          if constexpr (nth == 0 && !GOES_ON) sum[t][p][r] = start();
          unroll<P::TOGETHER>([&](auto i) INLINED { sum[t][p][r] = dot<quad % 4 + decltype(i)::value, P::Decoder::operand>(sum[t][p][r], bytes[i][r], x_now[t][p]); });
        } else {
          constexpr int round = std::min(narrow_quads(P::Decoder::operand), quads);
          narrow[t][p][r] = dot<quad % 4, P::Decoder::operand>(nth % round == 0 ? splat_int(0) : narrow[t][p][r], bytes[0][r], x_now[t][p]);
          if constexpr (nth % round == round - 1) sum[t][p][r] = add(nth < round && !GOES_ON ? start() : sum[t][p][r], widen(narrow[t][p][r]));
        }
      });
    });
  });
  if constexpr (P::DIGITS == 4)
    P::each([&](auto t, auto r) INLINED {
      unroll<2>([&](auto pair) INLINED { sum[t][pair * 2 + 1][r] = add(sum[t][pair * 2 + 1][r], shift_left<8>(sum[t][pair * 2][r])); });
    });
}

// sum = all that it goes over, which are `blocks` blocks at most. p and x come to the last of them; ask() is called before each further one.
template <class P, int HALF, class F>
INLINED inline void sum_codes(const uint8_t*& p, BlockOfX<P>& x, int64_t blocks, const uint8_t* table, typename P::Sums& sum, F&& ask) {
  sum_block<P, HALF, false>(p, table, x, sum);
  if constexpr (P::over_blocks)
    for (int64_t left = std::min<int64_t>(x.step, blocks); left > 1; left--) {
      p += P::Decoder::block_bytes, x.next_codes();
      ask();
      sum_block<P, HALF, true>(p, table, x, sum);
    }
}

// The sums of a row of x and a row vector as floats, all digits together.
template <class P, class T, class R> INLINED inline Floats sum_as_floats(const typename P::Sums& sum, T t, R r) {
  const auto digit = [&](auto p) INLINED {
    if constexpr (P::in_place(R{})) return difference_to_floats<P::MAGIC>(sum[t][p][r], sum[t][p][r - 1]);
    else return sum_to_floats<P::MAGIC>(sum[t][p][r]);
  };
  const Floats last = digit(std::integral_constant<int, P::DIGITS - 1>{});
  if constexpr (P::DIGITS == 1) return last;
  else return multiply_add(last, digit(std::integral_constant<int, P::DIGITS / 2 - 1>{}), splat(P::DIGITS == 2 ? 256 : 65536));
}

// total + sum * (scale of x) * scale. The scale of x comes first: a product of two scales might be too small for a float, and one with
// any float32 scale too large.
template <class P, class T, class R> INLINED inline Floats add_scaled(Floats total, const typename P::Sums& sum, T t, R r, FloatActivations x_scales, Floats scale) {
  return multiply_add(total, multiply_x<T::value>(sum_as_floats<P>(sum, t, r), x_scales), scale);
}

}  // namespace BILLFISH_ISA
