// y = x W^T with x as it is, in float32. Up to seven rows are exact in gemm8.h, where a level has that.
//
// As many rows as registers have sums for are multiplied with each value as it is made. For more, a chunk of a tile becomes
// float32 values, which stay in the first-level cache while all rows of x pass over them.
#pragma once
#include "gemm/values.h"

namespace BILLFISH_ISA {

// ---- few rows -------------------------------------------------------------------------------------------------------

// sums [BUNDLES * X_ROWS][TILE_ROWS] += x W^T for one row vector and a chunk, whose codes are a byte each. x [chunk][X_ROWS] is that of the
// first tile of rows, others are x_stride behind. Each chunk is added up on its own first, which loses less than one long sum.
template <int BUNDLES, bool MINIMUMS>
__attribute__((flatten, noinline)) void add_codes(const uint8_t* codes, const GroupScales* scales, const Blocks& run, bool halves, int row_vector, const float* x, int64_t x_stride, float* sums) {
  const int64_t quads = run.count * 8;
  const int quads_to_groups = halves ? 2 : 3 + __builtin_ctz(unsigned(run.span));  // shifts
  Floats total[BUNDLES * X_ROWS], now[2], next[2];
  repeat<BUNDLES * X_ROWS>([&](int t) INLINED { total[t] = splat(0); });
  const GroupScales* group;
  Bytes bytes;
  Floats scale;
  auto begin = [&](int64_t quad) INLINED {
    group = scales + (quad >> quads_to_groups);
    bytes = load_bytes(codes + (quad * ROW_VECTORS + row_vector) * VECTOR_BYTES);
    scale = load_floats(group->scale + row_vector * LANES);
  };
  auto make_next = [&](auto pair) INLINED {
    unroll<2>([&](auto i) INLINED {
      next[i] = times_byte<decltype(pair)::value * 2 + decltype(i)::value>(scale, group->offset + row_vector * LANES, bytes);
      if constexpr (MINIMUMS) next[i] = add(next[i], load_floats(group->minimum + row_vector * LANES));
    });
  };
  begin(0);
  make_next(std::integral_constant<int, 0>{});
  for (int64_t quad = 0; quad < quads; quad++)
    unroll<2>([&](auto pair) INLINED {  // values are two ahead, so that no product waits, and in twos, so that each sum stays in its pipe
      repeat<2>([&](int i) INLINED { now[i] = next[i]; });
      if constexpr (decltype(pair)::value == 1) begin(std::min(quad + 1, quads - 1));
      make_next(std::integral_constant<int, 1 - decltype(pair)::value>{});
      repeat<2>([&](int i) INLINED {
        repeat<BUNDLES>([&](int b) INLINED {
          const FloatActivations x_now = load_x(x + b * x_stride);
          unroll<X_ROWS>([&](auto t) INLINED { total[b * X_ROWS + t] = multiply_add_x<decltype(t)::value>(total[b * X_ROWS + t], now[i], x_now); });
        });
        x += X_ROWS;
      });
    });
  repeat<BUNDLES * X_ROWS>([&](int t) INLINED {
    float* to = sums + t * TILE_ROWS + row_vector * LANES;
    store_floats(to, add(load_floats(to), total[t]));
  });
}

using CodesKernel = void (*)(const uint8_t*, const GroupScales*, const Blocks&, bool, int, const float*, int64_t, float*);

// The kernel for these weights and so many tiles of X_ROWS rows, or null: where registers do not hold their sums, or a scale times
// what times_byte adds is not exact, as for float32 and for the 19 bits of a two-level scale without minimum.
inline CodesKernel codes_kernel(const Weights& w, int64_t bundles) {
  CodesKernel found = nullptr;
  if (w.scales == Scales::f32 || w.scales == Scales::f32_minimum || w.scales == Scales::sub) return found;
  unroll<REGISTER_ROWS / X_ROWS>([&](auto less) {
    constexpr int count = decltype(less)::value + 1;
    if (bundles == count) found = has_minimum(w.scales) ? add_codes<count, true> : add_codes<count, false>;
  });
  return found;
}

inline void multiply_codes(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last, CodesKernel kernel) {
  const TileShape shape(w, TILE_ROWS);
  const BlockDecoder decoder = block_decoder(w);
  const int64_t x_stride = x.blocks * BLOCK * X_ROWS;
  alignas(64) uint8_t codes[8 * VECTORS * VECTOR_BYTES];
  GroupScales scales[16];
  // Of the factor, scales get the power of two, which leaves them exact, and sums the rest, 1 to 2: so these are of the size of y.
  int exponent;
  const float rest = 2 * __builtin_frexpf(w.factor, &exponent), power = __builtin_ldexpf(1, exponent - 1);
  for (int64_t tile = first; tile < last; tile++) {
    alignas(64) float sums[REGISTER_ROWS * TILE_ROWS] = {};
    for (int64_t chunk = 0; chunk < shape.chunks; chunk++) {
      const Blocks run = blocks_in_stream(w, shape, tile, chunk, shape.blocks_in(chunk));
      const uint8_t* from = run.stream + run.chunk_header;
      for (int64_t b = 0; b < run.count; b++, from += decoder.block_bytes) {
        if (b % run.span == 0) from += run.span_header;
        decoder.decode(w, from, codes + b * VECTORS * VECTOR_BYTES);
      }
      read_scales<true>(w, shape, run.stream, run.count, scales, -BYTE_START - float(decoder.code_bias), power);
      const uint8_t* ahead = run.stream + shape.full_chunk_bytes;  // what is multiplied next is asked for meanwhile
      for (int r = 0; r < ROW_VECTORS; r++) {
        for (const uint8_t* end = ahead + shape.full_chunk_bytes / ROW_VECTORS; ahead < end; ahead += 64) __builtin_prefetch(ahead);
        kernel(codes, scales, run, w.group == 16, r, x.x + chunk * CHUNK * X_ROWS, x_stride, sums);
      }
    }
    write_tile(sums, rest, nullptr, bias, w.n, tile, 0, x.m, y);
  }
}

// ---- many rows ------------------------------------------------------------------------------------------------------

// The values of one block, [32][TILE_ROWS], whose codes are a byte each.
__attribute__((flatten)) inline void decode_values(const Weights& w, int code_bias, const uint8_t* codes, const GroupScales* groups, float* out) {
  const bool minimum = has_minimum(w.scales);
  const int halves = w.group == 16 ? 2 : 1;
  const Floats offset = byte_offset(code_bias);
  for (int half = 0; half < halves; half++)
    for (int r = 0; r < ROW_VECTORS; r++) {
      const Floats scale = load_floats(groups[half].scale + r * LANES), least = minimum ? load_floats(groups[half].minimum + r * LANES) : splat(0);
      for (int quad = half * 8 / halves; quad < (half + 1) * 8 / halves; quad++) {
        const Bytes bytes = load_bytes(codes + (quad * ROW_VECTORS + r) * VECTOR_BYTES);
        unroll<4>([&](auto k) INLINED {
          Floats value = multiply(byte_to_floats<decltype(k)::value>(bytes, offset), scale);
          if (minimum) value = add(value, least);
          store_floats(out + (quad * 4 + k) * TILE_ROWS + r * LANES, value);
        });
      }
    }
}

inline void multiply_decoded(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  alignas(64) float values[CHUNK * TILE_ROWS];
  alignas(64) uint8_t bytes[VECTORS * VECTOR_BYTES];
  GroupScales scales[16];
  const BlockDecoder decoder = block_decoder(w);
  multiply_values(w, x, bias, y, first, last, [&](const TileShape& shape, const Blocks& run) {
    read_scales<false>(w, shape, run.stream, run.count, scales, 0, w.factor);
    const uint8_t* codes = run.stream + run.chunk_header;
    for (int64_t b = 0; b < run.count; b++, codes += decoder.block_bytes) {
      if (b % run.span == 0) codes += run.span_header;
      decoder.decode(w, codes, bytes);
      decode_values(w, decoder.code_bias, bytes, scales + b / run.span * shape.groups_in_span(), values + b * BLOCK * TILE_ROWS);
    }
    return values;
  });
}

}  // namespace BILLFISH_ISA
