// The integer sums of a block, and what they are as floats: what all kernels of gemm8.h have in common.
#pragma once
#include "gemm/tiles.h"

namespace BILLFISH_ISA {

#define KERNEL __attribute__((flatten, noinline))

template <int LINES> INLINED inline void ask_for(const uint8_t* at) {
  repeat<LINES>([&](int line) INLINED { __builtin_prefetch(at + line * 64); });
}

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
    repeat<T>([&](int t) INLINED { repeat<COUNT>([&](int r) INLINED { f(t, r); }); });
  }
  // The same in the order in which dot products leave most registers for sums.
  template <class F> static INLINED void each_dot(F&& f) {
    if constexpr (ROW_OF_X_FIRST) each(f);
    else repeat<COUNT>([&](int r) INLINED { repeat<T>([&](int t) INLINED { f(t, r); }); });
  }
  static INLINED void load(Totals& total, const float* sums) {
    each([&](int t, int r) INLINED { total[t][r] = load_floats(sums + t * TILE_ROWS + (FIRST + r) * LANES); });
  }
  static INLINED void store(const Totals& total, float* sums) {
    each([&](int t, int r) INLINED { store_floats(sums + t * TILE_ROWS + (FIRST + r) * LANES, total[t][r]); });
  }
  // The first of the tile's rows that a row vector has.
  static constexpr int row_at(int r) { return (FIRST + r) * LANES; }
  // Whether a row vector's sums are 16 times too large, and have those of the one before in them: see Nibbles.
  static constexpr bool in_place(int r) { return Decoder::in_place && (FIRST + r) % 2; }
};

// Leaves totals in memory until they are used next. Sixteen registers do not hold eight of them beside eight sums, and of all these clang
// keeps the totals, which are used once for a group, where gcc puts aside what it should.
template <class P> INLINED inline void put_aside([[maybe_unused]] typename P::Totals& total) {
#if defined(__clang__) && (defined(BILLFISH_simd_avx2) || defined(BILLFISH_simd_avx_vnni))
  P::each([&](int t, int r) INLINED { asm("" : "+m"(total[t][r])); });
#endif
}

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
  INLINED Ints start(int half, int row_vector, int t, int digit) const {
    constexpr int parts = P::DIGITS == 1 ? 1 : 2, each = P::DIGITS / parts;
    if (digit % each != each - 1) return splat_int(0);
    return load_start(starts + (((half * 2 + row_vector % 2) * parts + digit / each) * P::lanes + t) * START_INTS);
  }
  // Of all rows: scales, or a sixteenth of each, and totals.
  INLINED FloatActivations scales(bool sixteenth) const { return load_x(scale + sixteenth * P::lanes); }
  INLINED FloatActivations total(int half) const { return load_x(totals + (P::HALVES == 2 ? half : 2) * P::lanes); }
};

// Adds the dot products of a half of a block, or of all of it, with the codes of x to sum, which begins here unless it GOES_ON.
// Of four digits, each pair makes one sum, in digits 1 and 3. The order of statements is that of the instructions, and was chosen by measurement.
template <class P, int HALF, bool GOES_ON> INLINED inline void sum_lanes_of_x(const uint8_t* codes, const uint8_t* table, const BlockOfX<P>& x, typename P::Sums& sum) {
  constexpr int quads = 8 / P::HALVES;
  Activations x_now[P::T][P::DIGITS];
  [[maybe_unused]] typename P::Sums narrow;  // where a level has them: of 16 bits, from 0 on, and then added to sums that have a start
  unroll<quads / P::TOGETHER>([&](auto step) INLINED {
    constexpr int nth = decltype(step)::value, quad = HALF * quads + nth * P::TOGETHER;
    if constexpr (quad % 4 == 0)
      repeat<P::T>([&](int t) INLINED {
        repeat<P::DIGITS>([&](int p) INLINED { x_now[t][p] = load_activations(x.codes + (p * P::lanes + t) * 32 + quad * 4); });
      });
    typename P::Codes bytes;
    unroll<P::TOGETHER>([&](auto i) INLINED {
      unroll<P::COUNT>([&](auto r) INLINED {
        bytes[i][r] = P::Decoder::template dotted<(quad + decltype(i)::value) * ROW_VECTORS + P::FIRST + decltype(r)::value>(codes, table);
      });
    });
    P::each_dot([&](int t, int r) INLINED {
      repeat<P::DIGITS>([&](int p) INLINED {
        if constexpr (narrow_quads(P::Decoder::operand) == 0) {
          if constexpr (nth == 0 && !GOES_ON) sum[t][p][r] = x.start(HALF, P::FIRST + r, t, p);
          sum[t][p][r] = dot<quad % 4, P::Decoder::operand>(sum[t][p][r], bytes[0][r], x_now[t][p]);
          static_assert(P::TOGETHER <= 2);
          if constexpr (P::TOGETHER == 2) sum[t][p][r] = dot<quad % 4 + 1, P::Decoder::operand>(sum[t][p][r], bytes[1][r], x_now[t][p]);
        } else {
          constexpr int round = std::min(narrow_quads(P::Decoder::operand), quads);
          narrow[t][p][r] = dot<quad % 4, P::Decoder::operand>(nth % round == 0 ? splat_int(0) : narrow[t][p][r], bytes[0][r], x_now[t][p]);
          if constexpr (nth % round == round - 1)
            sum[t][p][r] = add(nth < round && !GOES_ON ? x.start(HALF, P::FIRST + r, t, p) : sum[t][p][r], widen(narrow[t][p][r]));
        }
      });
    });
  });
}

// The same where dot() takes x from memory: one function for the dot products of all quads, which takes half the time to compile.
template <class P, int HALF, bool GOES_ON> INLINED inline void sum_x_in_memory(const uint8_t* codes, const uint8_t* table, const BlockOfX<P>& x, typename P::Sums& sum) {
  static_assert(P::TOGETHER == 1);
  constexpr int quads = 8 / P::HALVES, narrow_most = narrow_quads(P::Decoder::operand), round = std::min(narrow_most, quads);
  [[maybe_unused]] typename P::Sums narrow;
  const auto multiply = [&](int nth, const Bytes (&bytes)[P::COUNT]) INLINED {
    P::each_dot([&](int t, int r) INLINED {
      repeat<P::DIGITS>([&](int p) INLINED {
        const Activations now = load_activations(x.codes + (p * P::lanes + t) * 32 + (HALF * quads + nth) * 4);
        if constexpr (narrow_most == 0) {
          if (nth == 0 && !GOES_ON) sum[t][p][r] = x.start(HALF, P::FIRST + r, t, p);
          sum[t][p][r] = dot<0, P::Decoder::operand>(sum[t][p][r], bytes[r], now);
        } else {
          narrow[t][p][r] = dot<0, P::Decoder::operand>(nth % round == 0 ? splat_int(0) : narrow[t][p][r], bytes[r], now);
          if (nth % round == round - 1) sum[t][p][r] = add(nth < round && !GOES_ON ? x.start(HALF, P::FIRST + r, t, p) : sum[t][p][r], widen(narrow[t][p][r]));
        }
      });
    });
  };
  unroll<quads>([&](auto step) INLINED {
    constexpr int nth = decltype(step)::value;
    Bytes bytes[P::COUNT];
    unroll<P::COUNT>([&](auto r) INLINED { bytes[r] = P::Decoder::template dotted<(HALF * quads + nth) * ROW_VECTORS + P::FIRST + decltype(r)::value>(codes, table); });
    multiply(nth, bytes);
  });
}

// The same in a loop over quads, for levels that have all codes as bytes in a buffer: an eighth to compile.
template <class P, int HALF, bool GOES_ON> INLINED inline void sum_in_loop(const uint8_t* codes, const BlockOfX<P>& x, typename P::Sums& sum) {
  static_assert(P::Decoder::block_bytes == VECTORS * VECTOR_BYTES && narrow_quads(P::Decoder::operand) == 0 && P::DIGITS <= 2);
  constexpr int quads = 8 / P::HALVES;
  if constexpr (!GOES_ON)
    P::each([&](int t, int r) INLINED { repeat<P::DIGITS>([&](int p) INLINED { sum[t][p][r] = x.start(HALF, P::FIRST + r, t, p); }); });
  for (int quad = HALF * quads; quad < (HALF + 1) * quads; quad++)
    P::each_dot([&](int t, int r) INLINED {
      const Bytes bytes = load_operand(codes + (quad * ROW_VECTORS + P::FIRST + r) * VECTOR_BYTES);
      repeat<P::DIGITS>([&](int p) INLINED {
        sum[t][p][r] = dot<0, P::Decoder::operand>(sum[t][p][r], bytes, load_activations(x.codes + (p * P::lanes + t) * 32 + quad * 4));
      });
    });
}

template <class P, int HALF, bool GOES_ON> INLINED inline void sum_block(const uint8_t* codes, const uint8_t* table, const BlockOfX<P>& x, typename P::Sums& sum) {
  if constexpr (!FEW_FROM_STREAM) sum_in_loop<P, HALF, GOES_ON>(codes, x, sum);
  else if constexpr (X_IN_MEMORY) sum_x_in_memory<P, HALF, GOES_ON>(codes, table, x, sum);
  else sum_lanes_of_x<P, HALF, GOES_ON>(codes, table, x, sum);
  if constexpr (P::DIGITS == 4)
    P::each([&](int t, int r) INLINED {
      repeat<2>([&](int pair) INLINED { sum[t][pair * 2 + 1][r] = add(sum[t][pair * 2 + 1][r], shift_left<8>(sum[t][pair * 2][r])); });
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
template <class P> INLINED inline Floats sum_as_floats(const typename P::Sums& sum, int t, int r) {
  const auto digit = [&](int p) INLINED { return P::in_place(r) ? difference_to_floats<P::MAGIC>(sum[t][p][r], sum[t][p][r - (r > 0)]) : sum_to_floats<P::MAGIC>(sum[t][p][r]); };
  const Floats last = digit(P::DIGITS - 1);
  if constexpr (P::DIGITS == 1) return last;
  else return multiply_add(last, digit(P::DIGITS / 2 - 1), splat(P::DIGITS == 2 ? 256 : 65536));
}

// total + sum * (scale of x) * scale. The scale of x comes first: a product of two scales might be too small for a float, and one with
// any float32 scale too large.
template <class P, int T> INLINED inline Floats add_scaled(Floats total, const typename P::Sums& sum, int r, FloatActivations x_scales, Floats scale) {
  return multiply_add(total, multiply_x<T>(sum_as_floats<P>(sum, T, r), x_scales), scale);
}

}  // namespace BILLFISH_ISA
