// Integer GEMM for many rows of x: a slice of a tile is decoded once into a buffer that stays in the L1 cache, then
// multiplied with all rows, MANY_TOGETHER at a time.
#pragma once
#include "gemm/few8.h"

namespace BILLFISH_ISA {

// Lines of 64 bytes that each block asks for ahead, for every four rows of x: nine rows, from which on NEON has a buffer, ask for 384 bytes with
// each block; a tile of 16 rows with nibbles and float16 scales has 288.
template <int ROWS> constexpr int BUFFER_LINES = 2 * std::max(1, ROWS / X_ROWS);

// Adds blocks of row vectors of a tile times the rows of x [row, row + T) to sums [T][TILE_ROWS]. Codes are in a buffer, or in the stream
// where they are whole bytes; `group` is the scales of the first block's, and `ahead` is asked for meanwhile.
template <class P, bool MINIMUMS>
KERNEL void add_buffered(const Weights& w, const Blocks& run, const uint8_t* ahead, const GroupScales* group, const Activations8& x, int64_t row, float* sums) {
  typename P::Totals total;
  P::load(total, sums);
  BlockOfX<P> x_block(x, row, run.first);
  const uint8_t* p = run.stream;
  const auto ask = [&]() INLINED { ask_for<BUFFER_LINES<P::T>>(ahead), ahead += BUFFER_LINES<P::T> * 64; };
  for (int64_t b = 0; b < run.count; b += x_block.step, p += P::Decoder::block_bytes, x_block.next()) {
    if (begins_span(run, b)) p += run.span_header, group += b > 0 ? P::HALVES : 0;
    ask();
    unroll<P::HALVES>([&](auto half) INLINED {
      if constexpr (!P::over_blocks) put_aside<P>(total);
      typename P::Sums sum;
      sum_codes<P, decltype(half)::value>(p, x_block, run.count - b, w.table, sum, ask);
      const FloatActivations x_scales = x_block.scales(false), x_total = x_block.total(half);
      repeat<P::COUNT>([&](int r) INLINED {
        const Floats scale = load_floats(group[half].scale + P::row_at(r));
        if constexpr (P::DIGITS > 1 || !P::MAGIC) {
          unroll<P::T>([&](auto t) INLINED { total[t][r] = add_scaled<P, decltype(t)::value>(total[t][r], sum, r, x_scales, scale); });
        } else {
          Floats scaled[P::T];
          repeat<P::T>([&](int t) INLINED { scaled[t] = scale_sum<true>(sum[t][0][r], scale, group[half].offset + P::row_at(r)); });
          unroll<P::T>([&](auto t) INLINED { total[t][r] = multiply_add_x<decltype(t)::value>(total[t][r], scaled[t], x_scales); });
        }
        if constexpr (MINIMUMS) {
          const Floats minimum = load_floats(group[half].minimum + P::row_at(r));
          unroll<P::T>([&](auto t) INLINED { total[t][r] = multiply_add_x<decltype(t)::value>(total[t][r], minimum, x_total); });
        }
      });
    });
  }
  P::store(total, sums);
}

// The same with x in two digits, whose sums one register makes: that of the first digit, times 256, and on top of it that of the second. 32 products
// of 16 bits and 8 are below 2^28, so the sum is exact, and rounded once, to a float. P has one digit.
template <class P, bool MINIMUMS>
KERNEL void add_buffered_16(const Weights& w, const Blocks& run, const uint8_t* ahead, const GroupScales* group, const Activations8& x, int64_t row, float* sums) {
  typename P::Totals total;
  P::load(total, sums);
  BlockOfX<P> high(x, row, run.first);
  high.codes += (row / P::lanes * x.blocks + run.first) * P::lanes * 32;  // blocks have two digits
  const uint8_t* p = run.stream;
  for (int64_t b = 0; b < run.count; b++, p += P::Decoder::block_bytes) {
    if (begins_span(run, b)) p += run.span_header, group += b > 0 ? P::HALVES : 0;
    ask_for<BUFFER_LINES<P::T>>(ahead), ahead += BUFFER_LINES<P::T> * 64;
    BlockOfX<P> low = high;
    low.next_codes();
    unroll<P::HALVES>([&](auto half) INLINED {
      constexpr int HALF = decltype(half)::value;
      typename P::Sums sum;
      P::each([&](int t, int r) INLINED { sum[t][0][r] = splat_int(0); });
      sum_block<P, HALF, true>(p, w.table, high, sum);
      P::each([&](int t, int r) INLINED {
        sum[t][0][r] = shift_left<8>(sum[t][0][r]);
        if constexpr (SIGNED_BIAS != 0) sum[t][0][r] = add(sum[t][0][r], high.start(HALF, r, t, 0));
      });
      sum_block<P, HALF, true>(p, w.table, low, sum);
      const FloatActivations x_scales = high.scales(false), x_total = high.total(half);
      repeat<P::COUNT>([&](int r) INLINED {
        const Floats scale = load_floats(group[half].scale + P::row_at(r));
        unroll<P::T>([&](auto t) INLINED { total[t][r] = add_scaled<P, decltype(t)::value>(total[t][r], sum, r, x_scales, scale); });
        if constexpr (MINIMUMS) {
          const Floats minimum = load_floats(group[half].minimum + P::row_at(r));
          unroll<P::T>([&](auto t) INLINED { total[t][r] = multiply_add_x<decltype(t)::value>(total[t][r], minimum, x_total); });
        }
      });
    });
    high.next_codes(), high.next();
  }
  P::store(total, sums);
}

// Adds blocks times the rows of x [row, row + x.lanes) to sums [x.lanes][TILE_ROWS]; there is room for so many, however many there are.
// Where dot() does not take any byte, whether there is a kernel for unsigned codes, or values, of this kind with such scales: for those that formats
// have. Other codes become signed bytes, which all scales have kernels for. Two digits have the kernels of MAGIC sums.
constexpr bool has_kernel(Operand operand, bool minimums, Reach reach, bool magic) {
  switch (operand) {
    case Operand::below_16: return magic || reach != Reach::half;
    case Operand::below_32: return reach == Reach::half ? magic && !minimums : magic || !minimums;
    case Operand::below_64: return magic && !minimums && reach == Reach::half;
    case Operand::values: return magic && !minimums && reach != Reach::half;
    default: return true;
  }
}

template <class Buffer, bool MINIMUMS> void add_blocks_to_rows(const Weights& w, Blocks& run, const GroupScales* scales, const Activations8& x, int64_t row, float* sums) {
  const auto call = [&](auto rows, auto digits, auto reach, auto magic) {
    constexpr int T = decltype(rows)::value;
    if constexpr (!has_kernel(Buffer::operand, MINIMUMS, decltype(reach)::value, decltype(magic)::value)) return;  // never asked for
    else for (int part = 0; part < (T == 1 ? 1 : X_ROWS); part += T)
      unroll<ROW_VECTORS / 2>([&](auto pair) {
        const uint8_t* ahead = run.ahead;  // the weights' next blocks are asked for in the first pass, those of x in the others
        if (pair > 0) ahead = reinterpret_cast<const uint8_t*>(RowOfX(x, row + x.lanes).codes(run.first, 0));
        else run.ahead += run.count * BUFFER_LINES<T> * 64;
        constexpr bool in_one_sum = decltype(digits)::value == 2 && DIGITS_IN_ONE_SUM;
        using P = Piece<Buffer, T, in_one_sum ? 1 : decltype(digits)::value, decltype(reach)::value, decltype(magic)::value, decltype(pair)::value * 2, 2, MANY_TOGETHER>;
        constexpr auto add = [] { if constexpr (in_one_sum) return add_buffered_16<P, MINIMUMS>; else return add_buffered<P, MINIMUMS>; }();
        add(w, run, ahead, scales, x, row + part, sums + part * TILE_ROWS);
      });
  };
  const auto call_with = [&](auto rows, auto digits, auto magic) {
    const Reach reach = reach_of(w, x.span);
    if (reach == Reach::half) call(rows, digits, std::integral_constant<Reach, Reach::half>{}, magic);
    else if (decltype(digits)::value == 2 || reach == Reach::block) call(rows, digits, std::integral_constant<Reach, Reach::block>{}, magic);
    else if constexpr (decltype(digits)::value == 1) call(rows, digits, std::integral_constant<Reach, Reach::blocks>{}, magic);
  };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  static_assert(DIGITS_IN_ONE_SUM || MANY_TOGETHER == X_ROWS, "two digits of two rows at a time make X_ROWS in all");
  const auto call_for = [&](auto rows) {
    if (x.digits == 2) {
      if constexpr (DIGITS_IN_ONE_SUM) call_with(rows, two, std::false_type{});
      else call_with(std::integral_constant<int, std::min(decltype(rows)::value, 2)>{}, two, std::true_type{});
    }
    else if (SUM_START != 0 && magic_sums(w, 1)) call_with(rows, one, std::bool_constant<SUM_START != 0>{});
    else call_with(rows, one, std::false_type{});
  };
  if constexpr (BUFFERED_ONE_BY_ONE > 0)
    if (x.lanes == 1) return call_for(one);
  if (MANY_TOGETHER > X_ROWS && x.m - row <= X_ROWS) call_for(std::integral_constant<int, X_ROWS>{});  // the last ones
  else call_for(std::integral_constant<int, MANY_TOGETHER>{});
}

// What the buffer holds: signed values, or where dot() does not take any byte, unsigned codes.
template <class Decoder> using BufferOf = std::conditional_t<WHOLE_BYTES_FIT, Whole, Unpacked<Decoder::operand>>;

// Whether it holds signed values of these weights.
inline bool buffered_as_values(const Weights& w, int digits, int span) {
  bool values = WHOLE_BYTES_FIT;
  const Reach reach = digits == 2 && span > 1 ? Reach::block : reach_of(w, span);
  if constexpr (!WHOLE_BYTES_FIT)
    with_decoder(w.codes, [&](auto decoder) { values = !has_kernel(decltype(decoder)::operand, has_minimum(w.scales), reach, magic_sums(w, digits)); });
  return values;
}

// Blocks of the stream to bytes, as the buffer has them.
template <class Decoder, class Buffer, bool CENTRED> __attribute__((flatten)) inline void decode_blocks(const Weights& w, Blocks run, uint8_t* out) {
  const Table table(w);
  const int bias = CENTRED ? 8 : w.bias;  // a copy, for the same reason
  const uint8_t* p = run.stream;
  for (int64_t b = 0; b < run.count; b++, p += Decoder::block_bytes, out += Whole::block_bytes) {
    p += ((b & 7) == 0 ? run.chunk_header : 0) + ((b & (run.span - 1)) == 0 ? run.span_header : 0);
    unroll<VECTORS>([&](auto v) {
      if constexpr (has_codes(Buffer::operand)) store_bytes(out + v * VECTOR_BYTES, Decoder::template code<decltype(v)::value>(p, table.values));
      else store_bytes(out + v * VECTOR_BYTES, Decoder::template byte<decltype(v)::value, CENTRED>(p, table.values, bias));
    });
  }
}

using DecodeBlocks = void (*)(const Weights&, Blocks, uint8_t*);
// Null where bytes are multiplied where they lie. Only nibbles gain from a constant bias.
template <class Decoder, class Buffer> DecodeBlocks decode_for(const Weights& w) {
  if constexpr (std::is_same_v<Decoder, Whole>) return nullptr;
  else if constexpr (std::is_same_v<Decoder, Nibbles>) return w.bias == 8 ? decode_blocks<Decoder, Buffer, true> : decode_blocks<Decoder, Buffer, false>;
  else return decode_blocks<Decoder, Buffer, false>;
}

template <class Buffer>
void multiply_many8(const Weights& w, const Activations8& x, const float* bias, float* y, int64_t first, int64_t last, DecodeBlocks decode_into) {
  alignas(64) uint8_t bytes[SLICE * 8 * Whole::block_bytes];
  GroupScales scales[SLICE * 16];
  auto decode = [&](const TileShape& shape, Blocks& run) {
    read_scales<SUM_OFFSET != 0>(w, shape, run.stream, run.count, scales, -SUM_OFFSET, 1);
    if (!decode_into) return;
    decode_into(w, run, bytes);
    run.stream = bytes, run.span_header = run.chunk_header = 0;
  };
  multiply_panels(w, x, bias, y, first, last, decode, [&](Blocks& run, int64_t row, float* sums) {
    (has_minimum(w.scales) ? add_blocks_to_rows<Buffer, true> : add_blocks_to_rows<Buffer, false>)(w, run, scales, x, row, sums);
  });
}

}  // namespace BILLFISH_ISA
