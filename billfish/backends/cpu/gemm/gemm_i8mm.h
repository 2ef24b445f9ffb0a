// y = x W^T in integers with many rows of x, by matrix products of int8: smmla multiplies two rows of W with two of x, 8 k of
// each, which is twice what a dot product does.
//
// Slices, scales and the order of all roundings are those of gemm8.h, so the bits are the same too. What differs is the order in
// which things lie: a *tile of sums* is two rows of W by two of x, {a s, a t, b s, b t}, and an operand is 8 k of one row, then 8 k
// of the other.
#pragma once
#include "gemm/tiles.h"

namespace BILLFISH_ISA {

inline Ints matrix_dot(Ints sums, Bytes w, Bytes x) {
  asm("smmla %0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(w), "w"(x));  // as dot()
  return sums;
}
inline Bytes operand_at(const int8_t* p) { return load_bytes(reinterpret_cast<const uint8_t*>(p)); }
// {p[0], p[1], p[0], p[1]}, as tiles of sums want what belongs to rows of x.
inline Floats two_twice(const float* p) { return vcombine_f32(vld1_f32(p), vld1_f32(p)); }
// {v[0], v[0], v[1], v[1]} and {v[2], v[2], v[3], v[3]}, as tiles of sums want what belongs to rows of W.
inline void store_each_twice(float* p, Floats v) { store_floats(p, vzip1q_f32(v, v)), store_floats(p + LANES, vzip2q_f32(v, v)); }

// ---- x --------------------------------------------------------------------------------------------------------------

// Whether products with x are made here. Where there are two digits, rows go together by four exactly where gemm8.h has a buffer.
inline bool in_pairs(const Activations8& x) { return x.lanes == X_ROWS && (x.digits == 2 || x.m >= MANY_ROWS); }

// Of rows [first, last) and blocks [begin, end), in place: codes [4 rows][32] become operands [4 times 8 k][2 pairs of
// rows][16], and the scales [2, 4], of which the latter four are not needed here, those of each pair twice.
inline void pair_rows(const Activations8& x, int64_t first, int64_t last, int64_t begin, int64_t end) {
  for (int64_t bundle = first / X_ROWS; bundle * X_ROWS < last; bundle++)
    for (int64_t at = bundle * x.blocks + begin; at < bundle * x.blocks + end; at++) {
      for (int digit = 0; digit < x.digits; digit++) {
        int8_t* codes = x.codes + (at * x.digits + digit) * X_ROWS * 32;
        int64x2_t rows[X_ROWS][2];
        unroll<X_ROWS>([&](auto row) {
          unroll<2>([&](auto half) { rows[row][half] = vreinterpretq_s64_s8(vld1q_s8(codes + row * 32 + half * 16)); });
        });
        unroll<2>([&](auto half) {
          unroll<2>([&](auto pair) {
            const int64x2_t upper = rows[pair * 2][half], lower = rows[pair * 2 + 1][half];
            vst1q_s8(codes + (half * 4 + pair) * 16, vreinterpretq_s8_s64(vzip1q_s64(upper, lower)));
            vst1q_s8(codes + (half * 4 + 2 + pair) * 16, vreinterpretq_s8_s64(vzip2q_s64(upper, lower)));
          });
        });
      }
      float* scale = x.scale + at * 2 * X_ROWS;
      const Floats upper = two_twice(scale), lower = two_twice(scale + 2);
      store_floats(scale, upper), store_floats(scale + X_ROWS, lower);
    }
}

// ---- W --------------------------------------------------------------------------------------------------------------

constexpr int ROW_PAIRS = 4;  // of W that a kernel takes at a time: half of a tile

// Blocks of the stream to operands [4 times 8 k][8 pairs of rows][16]: two k-quads of the same rows, put together row by row.
template <class Decoder, bool CENTRED> __attribute__((flatten)) void decode_pairs(const Weights& w, Blocks run, uint8_t* out) {
  const uint8_t* p = run.stream;
  for (int64_t b = 0; b < run.count; b++, p += Decoder::block_bytes, out += Whole::block_bytes) {
    p += ((b & 7) == 0 ? run.chunk_header : 0) + ((b & (run.span - 1)) == 0 ? run.span_header : 0);
    unroll<VECTORS / 2>([&](auto i) INLINED {
      constexpr int v = decltype(i)::value / ROW_VECTORS * 2 * ROW_VECTORS + decltype(i)::value % ROW_VECTORS;
      const uint32x4_t even = vreinterpretq_u32_u8(Decoder::template byte<v, CENTRED>(p, w.table, w.bias));
      const uint32x4_t odd = vreinterpretq_u32_u8(Decoder::template byte<v + ROW_VECTORS, CENTRED>(p, w.table, w.bias));
      store_bytes(out + i * 2 * VECTOR_BYTES, vreinterpretq_u8_u32(vzip1q_u32(even, odd)));
      store_bytes(out + (i * 2 + 1) * VECTOR_BYTES, vreinterpretq_u8_u32(vzip2q_u32(even, odd)));
    });
  }
}

using DecodePairs = void (*)(const Weights&, Blocks, uint8_t*);
inline DecodePairs pair_decoder(const Weights& w) {
  DecodePairs chosen = nullptr;
  with_decoder(w.codes, [&](auto decoder) {
    constexpr bool nibbles = std::is_same_v<decltype(decoder), Nibbles>;  // which alone gain from a constant bias
    chosen = nibbles && w.bias == 8 ? decode_pairs<decltype(decoder), nibbles> : decode_pairs<decltype(decoder), false>;
  });
  return chosen;
}

// ---- products -------------------------------------------------------------------------------------------------------

// What sums begin with, unless MAGIC or if; loaded each time, because copies of a register are not free.
alignas(16) const float FROM_ZERO[4] = {}, FROM_OFFSET[4] = {SUM_OFFSET, SUM_OFFSET, SUM_OFFSET, SUM_OFFSET};

// The scales of a group, each twice.
struct alignas(64) PairScales {
  float scale[2 * TILE_ROWS], offset[2 * TILE_ROWS], minimum[2 * TILE_ROWS];
};

// Adds blocks of 8 rows of W, from row `first` of the tile on, times 4 rows of x from `row` on, or 2 where there are two digits, to
// sums [rows of x][TILE_ROWS]; `run` and `sums` are at the first of these rows of W.
template <int DIGITS, Reach REACH, bool MAGIC, bool MINIMUMS>
__attribute__((flatten, noinline)) void add_pairs(Blocks run, const PairScales* scales, int first, const Activations8& x, int64_t row, float* sums) {
  constexpr int X_PAIRS = X_ROWS / 2 / DIGITS, HALVES = REACH == Reach::half ? 2 : 1, STEPS = 4 / HALVES;
  Floats total[X_PAIRS][ROW_PAIRS];
  unroll<X_PAIRS>([&](auto t) INLINED {
    unroll<ROW_PAIRS / 2>([&](auto r) INLINED {
      const Floats upper = load_floats(sums + t * 2 * TILE_ROWS + r * LANES), lower = load_floats(sums + (t * 2 + 1) * TILE_ROWS + r * LANES);
      total[t][r * 2] = vzip1q_f32(upper, lower), total[t][r * 2 + 1] = vzip2q_f32(upper, lower);
    });
  });
  const int64_t at = x.block_of(row, run.first), lane = row % X_ROWS;
  const int8_t* x_codes = x.codes + at * DIGITS * X_ROWS * 32 + lane / 2 * 16;
  const float *x_scale = x.scale + at * 2 * X_ROWS + lane * 2, *x_totals = x.totals + at * 3 * X_ROWS + lane;
  const uint8_t *codes = run.stream, *ahead = run.ahead;
  const int shift = __builtin_ctz(unsigned(run.span)), blocks = REACH == Reach::blocks ? x.span : 1;
  const auto ask = [&]() INLINED { unroll<2>([&](auto line) INLINED { __builtin_prefetch(ahead + line * 64); }), ahead += 128; };
  for (int64_t b = 0; b < run.count; b += blocks) {
    ask();
    unroll<HALVES>([&](auto half) INLINED {
      Ints sum[X_PAIRS][DIGITS][ROW_PAIRS];
      unroll<X_PAIRS>([&](auto t) INLINED {
        unroll<DIGITS>([&](auto p) INLINED {
          unroll<ROW_PAIRS>([&](auto r) INLINED { sum[t][p][r] = load_alone<Ints>(MAGIC ? FROM_OFFSET : FROM_ZERO); });
        });
      });
      const auto sum_steps = [&](auto step) INLINED {
        constexpr int k8 = decltype(half)::value * STEPS + decltype(step)::value;
        Bytes x_now[X_PAIRS][DIGITS];
        unroll<X_PAIRS>([&](auto t) INLINED {
          unroll<DIGITS>([&](auto p) INLINED { x_now[t][p] = operand_at(x_codes + p * X_ROWS * 32 + (k8 * 2 + t) * 16); });
        });
        unroll<ROW_PAIRS>([&](auto r) INLINED {
          const Bytes bytes = load_bytes(codes + (k8 * 2 * ROW_PAIRS + r) * VECTOR_BYTES);
          unroll<X_PAIRS>([&](auto t) INLINED {
            unroll<DIGITS>([&](auto p) INLINED { sum[t][p][r] = matrix_dot(sum[t][p][r], bytes, x_now[t][p]); });
          });
        });
      };
      unroll<STEPS>(sum_steps);
      if constexpr (REACH == Reach::blocks)
        for (int64_t left = std::min<int64_t>(blocks, run.count - b); left > 1; left--) {
          codes += Whole::block_bytes, x_codes += X_ROWS * 32;
          ask();
          unroll<STEPS>(sum_steps);
        }
      const PairScales& group = scales[(b >> shift) * HALVES + half];
      unroll<ROW_PAIRS>([&](auto r) INLINED {
        const int at = 2 * first + r * LANES;
        const Floats scale = load_floats(group.scale + at);
        unroll<X_PAIRS>([&](auto t) INLINED {
          Ints whole = sum[t][DIGITS - 1][r];
          if constexpr (DIGITS == 2) whole = add(whole, shift_left<8>(sum[t][0][r]));
          const Floats x_scales = load_floats(x_scale + t * X_ROWS);
          if constexpr (MAGIC) total[t][r] = multiply_add(total[t][r], scale_sum<true>(whole, scale, group.offset + at), x_scales);
          else total[t][r] = multiply_add(total[t][r], multiply(to_floats(whole), x_scales), scale);
          if constexpr (MINIMUMS) {
            const Floats minimum = load_floats(group.minimum + at);
            total[t][r] = multiply_add(total[t][r], minimum, two_twice(x_totals + (HALVES == 2 ? half : 2) * X_ROWS + t * 2));
          }
        });
      });
    });
    codes += Whole::block_bytes, x_codes += DIGITS * X_ROWS * 32;
    x_scale += blocks * 2 * X_ROWS, x_totals += blocks * 3 * X_ROWS;
  }
  unroll<X_PAIRS>([&](auto t) INLINED {
    unroll<ROW_PAIRS / 2>([&](auto r) INLINED {
      store_floats(sums + t * 2 * TILE_ROWS + r * LANES, vuzp1q_f32(total[t][r * 2], total[t][r * 2 + 1]));
      store_floats(sums + (t * 2 + 1) * TILE_ROWS + r * LANES, vuzp2q_f32(total[t][r * 2], total[t][r * 2 + 1]));
    });
  });
}

using PairKernel = void (*)(Blocks, const PairScales*, int first, const Activations8&, int64_t row, float*);
template <int DIGITS, bool MAGIC, bool MINIMUMS> PairKernel pair_kernel(Reach reach) {
  if constexpr (DIGITS == 1)
    if (reach == Reach::blocks) return add_pairs<1, Reach::blocks, MAGIC, MINIMUMS>;
  return reach == Reach::half ? add_pairs<DIGITS, Reach::half, MAGIC, MINIMUMS> : add_pairs<DIGITS, Reach::block, MAGIC, MINIMUMS>;
}
template <bool MINIMUMS> PairKernel pair_kernel(const Weights& w, const Activations8& x) {
  const Reach reach = reach_of(w, x.span);
  if (x.digits == 2) return pair_kernel<2, false, MINIMUMS>(reach);
  return magic_sums(w, 1) ? pair_kernel<1, true, MINIMUMS>(reach) : pair_kernel<1, false, MINIMUMS>(reach);
}

// As multiply8, for x in pairs.
inline void multiply_pairs(const Weights& w, const Activations8& x, const float* bias, float* y, int64_t first, int64_t last) {
  const bool minimums = has_minimum(w.scales);
  const DecodePairs decode_slice = pair_decoder(w);
  const PairKernel add_slice = minimums ? pair_kernel<true>(w, x) : pair_kernel<false>(w, x);
  alignas(64) uint8_t bytes[SLICE * 8 * Whole::block_bytes];
  GroupScales once[SLICE * 16];
  PairScales twice[SLICE * 16];
  auto decode = [&](const TileShape& shape, Blocks& run) {
    read_scales<true>(w, shape, run.stream, run.count, once, -SUM_OFFSET, 1);
    const int64_t count = (run.count + run.span - 1) / run.span * shape.groups_in_span();
    for (int64_t i = 0; i < count; i++)
      for (int r = 0; r < TILE_ROWS; r += LANES) {
        store_each_twice(twice[i].scale + 2 * r, load_floats(once[i].scale + r)), store_each_twice(twice[i].offset + 2 * r, load_floats(once[i].offset + r));
        if (minimums) store_each_twice(twice[i].minimum + 2 * r, load_floats(once[i].minimum + r));
      }
    decode_slice(w, run, bytes);
    run.stream = bytes;
  };
  multiply_panels(w, x, bias, y, first, last, decode, [&](Blocks& run, int64_t row, float* sums) {
    for (int part = 0; part < X_ROWS; part += X_ROWS / x.digits)
      for (int rows = 0; rows < TILE_ROWS; rows += 2 * ROW_PAIRS) {
        Blocks now = run;  // the weights' next blocks are asked for in the first pass, those of x in the others
        now.stream += rows / 2 * VECTOR_BYTES;
        if (rows > 0) now.ahead = reinterpret_cast<const uint8_t*>(RowOfX(x, row + X_ROWS).codes(run.first, 0));
        else run.ahead += run.count * 128;
        add_slice(now, twice, rows, x, row + part, sums + part * TILE_ROWS + rows);
      }
  });
}

// ---- the machine ----------------------------------------------------------------------------------------------------

// As dot_rounds of level/machine.h: eight independent tiles of sums, four products each per round.
inline float matrix_rounds(int64_t rounds) {
  alignas(64) int8_t bytes[VECTOR_BYTES] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  Ints sum[8];
  unroll<8>([&](auto i) { sum[i] = splat_int(i); });
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : : "r"(bytes) : "memory");  // they might have changed: nothing may leave the loop
    const Bytes operand = operand_at(bytes);
    unroll<4>([&](auto) { unroll<8>([&](auto i) { sum[i] = matrix_dot(sum[i], operand, operand); }); });
  }
  Floats total = splat(0);
  unroll<8>([&](auto i) { total = add(total, to_floats(sum[i])); });
  return vgetq_lane_f32(total, 0);
}
constexpr double MATRIX_OPERATIONS = 32.0 * 2 * 32;  // in each round

}  // namespace BILLFISH_ISA
