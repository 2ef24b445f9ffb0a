// y = x W^T in integers: q8 and q16 for any number of rows of x, exact for few.
//
// Few rows: codes and scales are decoded as they are read, in the order in which they lie.
// Many rows: a part of a tile is decoded once into a buffer that stays in the first-level cache, then multiplied with all
// rows, four at a time. It is the same kernel, and reads the buffer as if the stream were packed in whole bytes.
#pragma once
#include "gemm/wide.h"

namespace BILLFISH_ISA {

using billfish::EXACT_DIGITS;

// Scales in a buffer, as a source for add_blocks8; a Reader gets them from the stream.
template <bool MINIMUMS> struct Buffered {
  static constexpr bool minimums = MINIMUMS, direct = false, two_levels = false;
  const GroupScales* group;
};

// Lines of 64 bytes that each block asks for ahead, so that memory works while products are made, not only while codes are read.
// From the stream: half the lines of a block's codes and one for scales, since NEON passes over a tile twice, with two of its four
// row vectors at a time. From a buffer: two for every four rows of x. So nine rows, from which on NEON has a buffer, ask for 384 bytes
// with each block; a tile of 16 rows with nibbles and float16 scales has 288.
template <class Decoder, class Source> constexpr int LINES = Source::direct ? Decoder::block_bytes / 128 + 1 : 2;

// Adds blocks of row vectors FIRST .. FIRST + COUNT - 1 of a tile, times T rows of x from `row` on, to sums [T][TILE_ROWS].
// Source: Reader for scales in the stream, or Buffered for `scales`. HALVES: 2 where a group of weights is half a block. MAGIC:
// whether sums start at SUM_START. The order of statements is that of the instructions, and was chosen by measurement.
template <class Decoder, class Source, int T, int DIGITS, int HALVES, bool MAGIC, int FIRST, int COUNT>
__attribute__((flatten, noinline)) void add_blocks8(const Weights& w, Blocks run, const GroupScales* scales, const Activations8& x, int64_t row, float* sums) {
  // By level: sums are multiplied by their small integers, and once for a chunk by what these have in common.
  constexpr bool direct = Source::direct, by_level = T == 1 && Source::two_levels;
  Source source;
  if constexpr (!direct) source.group = scales;
  Floats total[T][COUNT];
  unroll<T>([&](auto t) INLINED { unroll<COUNT>([&](auto r) INLINED { total[t][r] = load_floats(sums + t * TILE_ROWS + (FIRST + r) * LANES); }); });
  constexpr int lanes = T == 1 ? 1 : X_ROWS;  // of x; T may be less where there are two digits
  const int64_t at = row / lanes * x.blocks + run.first, lane = row % lanes;  // a constant, and not x.lanes: divisions are slow
  const int8_t* x_codes = x.codes + (at * DIGITS * lanes + lane) * 32;
  const float* x_scale = x.scale + at * 2 * lanes + lane;
  const float* x_totals = x.totals + at * 3 * lanes + lane;
  const int32_t* starts = x.starts + at * x.start_stride + lane * START_INTS;
  const uint8_t *p = run.stream, *ahead = run.ahead;
  const uint8_t* chunk = p;
  Floats scale[HALVES][COUNT] = {}, minimum[HALVES][COUNT] = {};  // of this span
  Floats chunk_total[COUNT] = {}, chunk_minimum[COUNT] = {};
  for (int64_t b = 0; b < run.count; b++) {
    const bool begins = (b & (run.span - 1)) == 0;  // a span
    if constexpr (direct) {
      if constexpr (Source::two_levels)
        if ((b & 7) == 0) {
          if constexpr (by_level) chunk = p, unroll<COUNT>([&](auto r) INLINED { chunk_total[r] = chunk_minimum[r] = splat(0); });
          else source.template begin_chunk<FIRST, COUNT>(p);
          p += run.chunk_header;
        }
      if (begins) source.group = p;
    } else if (begins && b > 0) source.group += HALVES;
    if (begins) p += run.span_header;
    if constexpr (T > 1) {
      unroll<LINES<Decoder, Source>>([&](auto line) INLINED { __builtin_prefetch(ahead + line * 64); });
      ahead += LINES<Decoder, Source> * 64;
    } else if constexpr (ONE_ROW_AHEAD > 0) {
      unroll<Decoder::block_bytes / 64 + 1>([&](auto line) INLINED { __builtin_prefetch(p + ONE_ROW_AHEAD + line * 64); });
    }
    const uint8_t* codes = p;
    unroll<HALVES>([&](auto half) INLINED {
      constexpr int quads = 8 / HALVES, together = T * COUNT * DIGITS <= 8 ? QUADS_TOGETHER : 1;
      Ints sum[T][DIGITS][COUNT];
      Activations x_now[T][DIGITS];
      unroll<quads / together>([&](auto step) INLINED {
        constexpr int quad = decltype(half)::value * quads + decltype(step)::value * together;
        if constexpr (quad % 4 == 0)
          unroll<T>([&](auto t) INLINED {
            unroll<DIGITS>([&](auto p) INLINED { x_now[t][p] = load_activations(x_codes + (p * lanes + t) * 32 + quad * 4); });
          });
        Bytes bytes[together][COUNT];
        unroll<together>([&](auto i) INLINED {
          unroll<COUNT>([&](auto r) INLINED { bytes[i][r] = Decoder::template dotted<(quad + decltype(i)::value) * ROW_VECTORS + FIRST + decltype(r)::value>(codes, w.table); });
        });
        unroll<COUNT>([&](auto r) INLINED {
          unroll<T>([&](auto t) INLINED {
            unroll<DIGITS>([&](auto p) INLINED {
              if constexpr (decltype(step)::value == 0) {
                constexpr int parts = DIGITS == 1 ? 1 : 2, each = DIGITS / parts, part = decltype(p)::value / each;
                constexpr bool last_of_part = decltype(p)::value % each == each - 1;
                sum[t][p][r] = last_of_part ? load_start(starts + (((half * 2 + (FIRST + r) % 2) * parts + part) * lanes + t) * START_INTS) : splat_int(0);
              }
              unroll<together>([&](auto i) INLINED { sum[t][p][r] = dot<quad % 4 + decltype(i)::value, Decoder::operand>(sum[t][p][r], bytes[i][r], x_now[t][p]); });
            });
          });
        });
      });
      if constexpr (DIGITS == 4)
        unroll<T>([&](auto t) INLINED {
          unroll<COUNT>([&](auto r) INLINED {
            unroll<2>([&](auto pair) INLINED { sum[t][pair * 2 + 1][r] = add(sum[t][pair * 2 + 1][r], shift_left<8>(sum[t][pair * 2][r])); });
          });
        });
      if constexpr (direct)
        if (__builtin_expect(begins, 1))
          unroll<COUNT>([&](auto r) INLINED {
            constexpr int row_at = (FIRST + decltype(r)::value) * LANES;
            if constexpr (by_level) scale[half][r] = source.template lower_scale<row_at>(half);
            else scale[half][r] = source.template scale<row_at>(half);
            if constexpr (by_level && Source::minimums) minimum[half][r] = source.template lower_minimum<row_at>(half);
            else if constexpr (Source::minimums) minimum[half][r] = source.template minimum<row_at>(half);
          });
      const FloatActivations x_scales[2] = {load_x(x_scale), load_x(x_scale + lanes)}, totals = load_x(x_totals + (HALVES == 2 ? half : 2) * lanes);
      unroll<COUNT>([&](auto r) INLINED {
        constexpr int row_at = (FIRST + decltype(r)::value) * LANES;
        constexpr bool in_place = Decoder::in_place && (FIRST + decltype(r)::value) % 2;
        if constexpr (!direct) {
          scale[half][r] = load_floats(source.group[half].scale + row_at);
          if constexpr (Source::minimums) minimum[half][r] = load_floats(source.group[half].minimum + row_at);
        }
        auto value = [&](auto t, auto digit) INLINED {
          if constexpr (in_place) return difference_to_floats<MAGIC>(sum[t][digit][r], sum[t][digit][r - 1]);
          else return sum_to_floats<MAGIC>(sum[t][digit][r]);
        };
        auto whole = [&](auto t) INLINED {
          const Floats last = value(t, std::integral_constant<int, DIGITS - 1>{});
          if constexpr (DIGITS == 1) return last;
          else return multiply_add(last, value(t, std::integral_constant<int, DIGITS / 2 - 1>{}), splat(DIGITS == 2 ? 256 : 65536));
        };
        // The x scale first: a product of two scales might be too small for a float, and one with any float32 scale too large.
        if constexpr (T == 1 || DIGITS > 1 || !MAGIC) {
          unroll<T>([&](auto t) INLINED {
            Floats& to = by_level ? chunk_total[r] : total[t][r];
            to = multiply_add(to, multiply_x<decltype(t)::value>(whole(t), x_scales[in_place]), scale[half][r]);
          });
        } else {
          Floats scaled[T];
          unroll<T>([&](auto t) INLINED {
            if constexpr (direct) scaled[t] = multiply(whole(t), scale[half][r]);
            else scaled[t] = scale_sum<MAGIC>(sum[t][0][r], scale[half][r], source.group[half].offset + row_at);
          });
          unroll<T>([&](auto t) INLINED { total[t][r] = multiply_add_x<decltype(t)::value>(total[t][r], scaled[t], x_scales[in_place]); });
        }
        if constexpr (Source::minimums)
          unroll<T>([&](auto t) INLINED {
            Floats& to = by_level ? chunk_minimum[r] : total[t][r];
            to = multiply_add_x<decltype(t)::value>(to, minimum[half][r], totals);
          });
      });
    });
    if constexpr (by_level)
      if ((b & 7) == 7 || b + 1 == run.count)
        unroll<COUNT>([&](auto r) INLINED {
          constexpr int row_at = (FIRST + decltype(r)::value) * LANES;
          total[0][r] = multiply_add(total[0][r], chunk_total[r], Source::template upper_scale<row_at>(chunk));
          if constexpr (Source::minimums) total[0][r] = multiply_add(total[0][r], chunk_minimum[r], Source::template upper_minimum<row_at>(chunk));
        });
    p += Decoder::block_bytes;
    x_codes += DIGITS * lanes * 32, x_scale += 2 * lanes, x_totals += 3 * lanes, starts += x.start_stride;
  }
  unroll<T>([&](auto t) INLINED { unroll<COUNT>([&](auto r) INLINED { store_floats(sums + t * TILE_ROWS + (FIRST + r) * LANES, total[t][r]); }); });
}

// ---- few rows, straight from the stream -----------------------------------------------------------------------------

// Adds chunks of a tile times the rows of x [row, row + x.lanes) to sums [x.lanes][TILE_ROWS]: there is room for so many.
template <class Decoder, Scales S, int HALVES>
void add_chunks(const Weights& w, Blocks run, const Activations8& x, int64_t row, float* sums) {
  using Source = Reader<S>;
  if (x.lanes == X_ROWS)
    unroll<ROW_VECTORS / 2>([&](auto pair) {  // as many row vectors at a time as leave registers for their sums
      add_blocks8<Decoder, Source, X_ROWS, 1, HALVES, true, decltype(pair)::value * 2, 2>(w, run, nullptr, x, row, sums);
      run.ahead += run.count * LINES<Decoder, Source> * 64;
    });
  else if (x.digits == 1) add_blocks8<Decoder, Source, 1, 1, HALVES, true, 0, ROW_VECTORS>(w, run, nullptr, x, row, sums);
  else if (x.digits == EXACT_DIGITS) {
    if constexpr (EXACT_IN_DIGITS) add_blocks8<Decoder, Source, 1, EXACT_DIGITS, HALVES, false, 0, ROW_VECTORS>(w, run, nullptr, x, row, sums);
  } else add_blocks8<Decoder, Source, 1, 2, HALVES, true, 0, ROW_VECTORS>(w, run, nullptr, x, row, sums);
}

using FewKernel = void (*)(const Weights&, Blocks, const Activations8&, int64_t, float*);

// The kernel for the combinations of codes and scales that formats have, each of which is four more to compile; or null.
inline FewKernel few_kernel(const Weights& w) {
  const bool halves = w.group == 16;
  switch (w.codes) {
    case Codes::u2: return halves && w.scales == Scales::sub_nibbles ? add_chunks<Twos, Scales::sub_nibbles, 2> : nullptr;
    case Codes::u3: return halves && w.scales == Scales::sub ? add_chunks<Threes, Scales::sub, 2> : nullptr;
    case Codes::u4:
      if (halves) return nullptr;
      switch (w.scales) {
        case Scales::f16: return add_chunks<Nibbles, Scales::f16, 1>;
        case Scales::f16_minimum: return add_chunks<Nibbles, Scales::f16_minimum, 1>;
        case Scales::f16_zero8: return add_chunks<Nibbles, Scales::f16_zero8, 1>;
        case Scales::f16_zero16: return add_chunks<Nibbles, Scales::f16_zero16, 1>;
        case Scales::sub_minimum: return add_chunks<Nibbles, Scales::sub_minimum, 1>;
        default: return nullptr;
      }
    case Codes::u5:
      if (halves) return nullptr;
      switch (w.scales) {
        case Scales::f16: return add_chunks<Fives, Scales::f16, 1>;
        case Scales::f16_minimum: return add_chunks<Fives, Scales::f16_minimum, 1>;
        case Scales::sub_minimum: return add_chunks<Fives, Scales::sub_minimum, 1>;
        default: return nullptr;
      }
    case Codes::u6: return halves && w.scales == Scales::sub ? add_chunks<Sixes, Scales::sub, 2> : nullptr;
    case Codes::s8: return !halves && w.scales == Scales::f16 ? add_chunks<Whole, Scales::f16, 1> : nullptr;
    case Codes::table:
      switch (w.scales) {
        case Scales::f16: return halves ? add_chunks<Looked, Scales::f16, 2> : add_chunks<Looked, Scales::f16, 1>;
        case Scales::e8m0: return halves ? nullptr : add_chunks<Looked, Scales::e8m0, 1>;
        case Scales::e4m3: return halves ? add_chunks<Looked, Scales::e4m3, 2> : nullptr;
        case Scales::sub: return halves ? nullptr : add_chunks<Looked, Scales::sub, 1>;
        default: return nullptr;
      }
    case Codes::e4m3: case Codes::floats: case Codes::f32: case Codes::f16: case Codes::bf16: return nullptr;
  }
  return nullptr;
}

// Up to so many rows, one at a time is quicker than several. With two digits there is as much to multiply as to decode, and nibbles
// and bytes, which hardly need decoding, may be decoded again for every row.
inline int64_t one_by_one(const Weights& w, int32_t digits) {
  return digits == 1 ? 2 : w.codes == Codes::u4 || w.codes == Codes::s8 ? ONE_BY_ONE_16 : std::min(ONE_BY_ONE_16, 3);
}

inline bool buffered(const Weights& w, int64_t m, int32_t digits) {
  return m >= (digits == 1 ? BUFFER_ROWS : MANY_ROWS) || !few_kernel(w) || (digits == 2 && m > one_by_one(w, digits));
}

// Whether exact products of few rows are made here, in four digits.
inline bool exact_in_digits(const Weights& w, int64_t m) { return EXACT_IN_DIGITS && !buffered(w, m, EXACT_DIGITS); }

// How many rows of x go together, for this many of them.
inline int32_t lanes_of_x(const Weights& w, int64_t m, int32_t digits) {
  return digits == EXACT_DIGITS || (m <= one_by_one(w, digits) && !buffered(w, m, digits)) ? 1 : X_ROWS;
}

// ---- many rows, from the buffer -------------------------------------------------------------------------------------------------------

// Adds blocks times the rows of x [row, row + 4) to sums [4][TILE_ROWS]; there is room for four, however many there are.
template <class Buffer, bool MINIMUMS> void add_blocks_to_rows(const Weights& w, Blocks& run, const GroupScales* scales, const Activations8& x, int64_t row, float* sums) {
  using Source = Buffered<MINIMUMS>;
  auto call = [&](auto rows, auto digits, auto halves, auto magic) {
    constexpr int T = decltype(rows)::value;
    for (int part = 0; part < X_ROWS; part += T)
      unroll<ROW_VECTORS / 2>([&](auto pair) {
        Blocks now = run;  // the weights' next blocks are asked for in the first pass, those of x in the others
        if (pair > 0) now.ahead = reinterpret_cast<const uint8_t*>(RowOfX(x, row + X_ROWS).codes(run.first, 0));
        else run.ahead += run.count * LINES<Buffer, Source> * 64;
        add_blocks8<Buffer, Source, T, decltype(digits)::value, decltype(halves)::value, decltype(magic)::value, decltype(pair)::value * 2, 2>(
            w, now, scales, x, row + part, sums + part * TILE_ROWS);
      });
  };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  constexpr std::integral_constant<int, X_ROWS> four;
  constexpr std::true_type yes;
  constexpr std::false_type no;
  if (x.digits == 2) w.group == 16 ? call(two, two, two, yes) : call(two, two, one, yes);
  else if (magic_sums(w, 1)) w.group == 16 ? call(four, one, two, yes) : call(four, one, one, yes);
  else w.group == 16 ? call(four, one, two, no) : call(four, one, one, no);
}

// Whether dot() gets codes that have more than the weights' values, unsigned ones.
inline bool unsigned_codes(const Weights& w, const Activations8& x) {
  return w.codes != Codes::s8 && w.codes != Codes::table && !(WHOLE_BYTES_FIT && buffered(w, x.m, x.digits));
}

// What the integer sums of each block begin with: SUM_START, which stands for 0, less what the codes as dot() gets them
// have more than the weights' values, times the sum of x. [bundles, blocks, halves, even or odd row vector, parts, lanes,
// START_INTS]; `halves` is 2 where a group of weights is 16. Where the sum of x does not matter, one block serves all.
inline int64_t start_stride(const Weights& w, const Activations8& x) {
  return !unsigned_codes(w, x) && SIGNED_BIAS == 0 ? 0 : (w.group == 16 ? 2 : 1) * 2 * x.parts() * x.lanes * START_INTS;
}

// For bundles of rows [first, last) and blocks [begin, end).
inline void fill_starts(const Weights& w, const Activations8& x, int64_t first, int64_t last, int64_t begin, int64_t end) {
  if (x.start_stride == 0) {
    if (first > 0 || begin > 0) return;
    last = end = 1;
  }
  const int halves = w.group == 16 ? 2 : 1, lanes = x.lanes, parts = x.parts();
  const bool is_unsigned = unsigned_codes(w, x), in_place = is_unsigned && w.codes == Codes::u4 && WHOLE_BYTES_FIT;
  const int32_t zero = magic_sums(w, x.digits) ? SUM_START : 0, bias = is_unsigned ? w.bias : SIGNED_BIAS;
  for (int64_t bundle = first; bundle < last; bundle++)
    for (int64_t at = bundle * x.blocks + begin; at < bundle * x.blocks + end; at++) {
      int32_t* out = x.starts + at * x.start_stride;
      for (int half = 0; half < halves; half++, out += 2 * parts * lanes * START_INTS)
        for (int part = 0; part < parts; part++)
          for (int lane = 0; lane < lanes; lane++) {
            const int32_t sum = x.start_stride ? x.sums[((at * parts + part) * 3 + (halves == 2 ? half : 2)) * lanes + lane] : 0;
            const uint32_t even = uint32_t(zero - bias * sum);
            // In place: the odd sum has the even one in it, which is taken off later, and 16 times its own bias.
            const uint32_t odd = in_place ? even + uint32_t(16 * (HIGH_FLIP - bias) * sum) : even;
            std::fill_n(out + (part * lanes + lane) * START_INTS, START_INTS, int32_t(even));
            std::fill_n(out + ((parts + part) * lanes + lane) * START_INTS, START_INTS, int32_t(odd));
          }
    }
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

inline void multiply_few8(const Weights& w, const Activations8& x, const float* bias, float* y, int64_t first, int64_t last) {
  const TileShape shape(w, TILE_ROWS);
  const FewKernel kernel = few_kernel(w);
  auto add = [&](int64_t tile, int64_t chunk, int64_t blocks, float* sums) {
    Blocks run = blocks_in_stream(w, shape, tile, chunk, blocks);
    run.ahead = run.stream + shape.tile_bytes;
    for (int64_t row = 0; row < x.m; row += x.lanes) kernel(w, run, x, row, sums + row * TILE_ROWS);
  };
  if (x.lanes == 1) {
    for (int64_t tile = first; tile < last; tile++) {
      alignas(64) float sums[MANY_ROWS * TILE_ROWS];
      std::fill(sums, sums + x.m * TILE_ROWS, 0.0f);
      add(tile, 0, shape.blocks, sums);
      write_tile(sums, w.factor, x.power, bias, w.n, tile, 0, x.m, y);
      if (x.wide) add_wide_blocks(w, shape, x, tile, y);
    }
    return;
  }
  // Several rows of x, slice by slice: what a slice of x takes stays in the first-level cache while all tiles pass over it.
  const int64_t each = x.bundles() * x.lanes * TILE_ROWS;
  Room room;
  float* sums = room.take((last - first) * each);
  std::fill_n(sums, (last - first) * each, 0.0f);
  each_slice(shape, [&](int64_t chunk, int64_t blocks) {
    for (int64_t tile = first; tile < last; tile++) add(tile, chunk, blocks, sums + (tile - first) * each);
  });
  for (int64_t tile = first; tile < last; tile++) write_tile(sums + (tile - first) * each, w.factor, x.power, bias, w.n, tile, 0, x.m, y);
}

// What a buffer has: values, but where dot() does not take any byte, what it takes gladly.
template <class Decoder> using BufferOf = std::conditional_t<WHOLE_BYTES_FIT, Whole, Unpacked<Decoder::operand>>;

// Blocks of the stream to bytes, as the buffer has them.
template <class Decoder, bool CENTRED> __attribute__((flatten)) inline void decode_blocks(const Weights& w, Blocks run, uint8_t* out) {
  const Table table(w);
  const int bias = CENTRED ? 8 : w.bias;  // a copy, for the same reason
  const uint8_t* p = run.stream;
  for (int64_t b = 0; b < run.count; b++, p += Decoder::block_bytes, out += Whole::block_bytes) {
    p += ((b & 7) == 0 ? run.chunk_header : 0) + ((b & (run.span - 1)) == 0 ? run.span_header : 0);
    unroll<VECTORS>([&](auto v) {
      if constexpr (BufferOf<Decoder>::operand == Operand::codes) store_bytes(out + v * VECTOR_BYTES, Decoder::template code<decltype(v)::value>(p, table.values));
      else store_bytes(out + v * VECTOR_BYTES, Decoder::template byte<decltype(v)::value, CENTRED>(p, table.values, bias));
    });
  }
}

template <class Decoder>
void multiply_many8(const Weights& w, const Activations8& x, const float* bias, float* y, int64_t first, int64_t last) {
  alignas(64) uint8_t bytes[SLICE * 8 * Whole::block_bytes];
  GroupScales scales[SLICE * 16];
  auto decode = [&](const TileShape& shape, Blocks& run) {
    read_scales<SUM_OFFSET != 0>(w, shape, run.stream, run.count, scales, -SUM_OFFSET, 1);
    if (std::is_same_v<Decoder, Whole>) return;  // bytes are multiplied where they lie
    (w.bias == 8 ? decode_blocks<Decoder, true> : decode_blocks<Decoder, false>)(w, run, bytes);
    run.stream = bytes, run.span_header = run.chunk_header = 0;
  };
  multiply_panels(w, x, bias, y, first, last, decode, [&](Blocks& run, int64_t row, float* sums) {
    using Buffer = BufferOf<Decoder>;
    (has_minimum(w.scales) ? add_blocks_to_rows<Buffer, true> : add_blocks_to_rows<Buffer, false>)(w, run, scales, x, row, sums);
  });
}

inline void multiply8(const Weights& w, const Activations8& x, const float* bias, float* y, int64_t first, int64_t last) {
  if (!buffered(w, x.m, x.digits)) return multiply_few8(w, x, bias, y, first, last);
  with_decoder(w.codes, [&](auto decoder) { multiply_many8<decltype(decoder)>(w, x, bias, y, first, last); });
}

}  // namespace BILLFISH_ISA
