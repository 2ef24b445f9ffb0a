// Integer GEMM for 8 to 16 rows of x and 4-bit codes: the codes of a block are decoded once and stay in registers for all rows.
//
// A kernel takes one row vector of a tile, since 16 rows of x have as many sums in float32. Its codes come by a mask alone: those of
// odd vectors are 16 times their values, for which the scale of x makes up.
#pragma once
#include "gemm/sums8.h"

namespace BILLFISH_ISA {

// Whether products with so many rows of x are made here, and with how many of them together.
constexpr bool is_held(Scales scales) { return scales == Scales::f16 || scales == Scales::f16_minimum; }
template <class Decoder, Scales S, Reach REACH> constexpr bool has_held = HELD_ROWS > 0 && std::is_same_v<Decoder, Nibbles> && REACH == Reach::block && is_held(S);
inline bool is_held(const Weights& w, int64_t m, int32_t digits, int32_t span) {
  return w.codes == Codes::u4 && is_held(w.scales) && reach_of(w, span) == Reach::block && digits == 1 && m >= MANY_ROWS && m <= HELD_ROWS;
}
inline int32_t held_lanes(int64_t m) { return int32_t((m + 3) / 4 * 4); }

// Adds blocks of a row vector of a tile times ROWS rows of x to sums [ROWS][TILE_ROWS], TOGETHER of them at a time: 16 rows have 16 totals and
// 8 vectors of codes, which leaves registers for 8 sums; 8 and 12 rows leave as many as they have. A sum gets the dot products of 16 k in a row, so that one register for x
// serves all rows.
template <class Source, int VECTOR, int ROWS>
KERNEL void add_held(Blocks run, const Activations8& x, int64_t row, float* sums) {
  constexpr int TOGETHER = ROWS == 16 ? 8 : ROWS;
  Source source;
  Floats total[ROWS];
  repeat<ROWS>([&](int t) INLINED { total[t] = load_floats(sums + t * TILE_ROWS + VECTOR * LANES); });
  const int64_t at = row / ROWS * x.blocks + run.first;
  const int8_t* x_codes = x.codes + at * ROWS * 32;
  const float *x_scale = x.scale + (at * 2 + VECTOR % 2) * ROWS, *x_totals = x.totals + (at * 3 + 2) * ROWS;
  const int32_t* starts = x.starts + at * x.start_stride + VECTOR % 2 * ROWS * START_INTS;
  const uint8_t *p = run.stream, *ahead = run.ahead;
  Floats scale = splat(0), minimum = scale;  // of this span
  alignas(64) float offset[LANES];
  for (int64_t b = 0; b < run.count; b++) {
    if (begins_span(run, b)) {
      source.group = p, p += run.span_header;
      scale = source.template scale<VECTOR * LANES>(0);
      store_floats(offset, multiply(scale, splat(-SUM_OFFSET)));
      if constexpr (Source::minimums) minimum = source.template minimum<VECTOR * LANES>(0);
    }
    __builtin_prefetch(ahead), ahead += 64;  // with four passes, 256 of 288 bytes
    Bytes codes[8];
    repeat<8>([&](int quad) INLINED { codes[quad] = bit_and(load_bytes(p + (quad * ROW_VECTORS + VECTOR) / 2 * VECTOR_BYTES), splat_byte(VECTOR % 2 ? 0xf0 : 0x0f)); });
    repeat<ROWS / TOGETHER>([&](int part) INLINED {
      const int first = part * TOGETHER;
      Ints sum[TOGETHER];
      repeat<2>([&](int half) INLINED {
        repeat<TOGETHER>([&](int t) INLINED {
          if (half == 0) sum[t] = load_start(starts + (first + t) * START_INTS);
          const Activations now = load_activations(x_codes + (first + t) * 32 + half * 16);
          unroll<4>([&](auto quad) INLINED { sum[t] = dot<decltype(quad)::value, Operand::bytes>(sum[t], codes[half * 4 + quad], now); });
        });
      });
      repeat<TOGETHER / 4>([&](int four) INLINED {
        const int row = first + four * 4;
        const FloatActivations x_scales = load_x(x_scale + row), totals = load_x(x_totals + row);
        unroll<4>([&](auto lane) INLINED {
          constexpr int L = decltype(lane)::value;
          total[row + L] = multiply_add_x<L>(total[row + L], scale_sum<true>(sum[four * 4 + L], scale, offset), x_scales);
          if constexpr (Source::minimums) total[row + L] = multiply_add_x<L>(total[row + L], minimum, totals);
        });
      });
    });
    p += Nibbles::block_bytes, x_codes += ROWS * 32, x_scale += 2 * ROWS, x_totals += 3 * ROWS, starts += x.start_stride;
  }
  repeat<ROWS>([&](int t) INLINED { store_floats(sums + t * TILE_ROWS + VECTOR * LANES, total[t]); });
}

// All row vectors of a tile, and x.lanes rows of x.
template <class Source> void add_held_rows(Blocks run, const Activations8& x, int64_t row, float* sums) {
  unroll<ROW_VECTORS>([&](auto vector) {
    constexpr int V = decltype(vector)::value;
    (x.lanes == 8 ? add_held<Source, V, 8> : x.lanes == 12 ? add_held<Source, V, 12> : add_held<Source, V, 16>)(run, x, row, sums);
    run.ahead += run.count * 64;
  });
}

}  // namespace BILLFISH_ISA
