// y = x W^T with many rows of x as it is, in float32. Few rows are exact in gemm8.h.
//
// A chunk of a tile becomes float32 values, which stay in the first-level cache while all rows of x pass over them.
#pragma once
#include "gemm8.h"

namespace BILLFISH_ISA {

using billfish::ActivationsExact;
using billfish::BLOCK;

// The values of one block, [32][TILE_ROWS].
template <class Decoder>
__attribute__((flatten, noinline)) void decode_values(const Weights& w, const uint8_t* codes, const GroupScales* groups, float* out) {
  const bool minimum = has_minimum(w.scales);
  const Floats offset = byte_offset(Decoder::code_bias(w.bias));
  unroll<VECTORS>([&](auto v) INLINED {
    constexpr int quad = decltype(v)::value / ROW_VECTORS, r = decltype(v)::value % ROW_VECTORS;
    const Bytes bytes = Decoder::template code<decltype(v)::value>(codes, w.table);
    const GroupScales& group = groups[w.group == 16 ? quad / 4 : 0];
    const Floats scale = load_floats(group.scale + r * LANES);
    unroll<4>([&](auto k) INLINED {
      Floats value = multiply(byte_to_floats<decltype(k)::value>(bytes, offset), scale);
      if (minimum) value = add(value, load_floats(group.minimum + r * LANES));
      store_floats(out + (quad * 4 + k) * TILE_ROWS + r * LANES, value);
    });
  });
}

// sums [X_ROWS][TILE_ROWS] += x W^T over `count` k, for row vectors from FIRST on: values [count][TILE_ROWS], x [count][X_ROWS].
// Each chunk is added up on its own first, which loses less than one long sum.
template <int FIRST> __attribute__((flatten, noinline)) void add_values(const float* values, const float* x, int64_t count, float* sums) {
  Floats total[X_ROWS][SUM_VECTORS];
  unroll<X_ROWS>([&](auto t) { unroll<SUM_VECTORS>([&](auto r) { total[t][r] = splat(0); }); });
  for (int64_t k = 0; k < count; k++, values += TILE_ROWS, x += X_ROWS) {
    const FloatActivations piece = load_x(x);
    unroll<SUM_VECTORS>([&](auto r) {
      const Floats value = load_floats(values + (FIRST + r) * LANES);
      unroll<X_ROWS>([&](auto t) { total[t][r] = multiply_add_x<decltype(t)::value>(total[t][r], value, piece); });
    });
  }
  unroll<X_ROWS>([&](auto t) {
    unroll<SUM_VECTORS>([&](auto r) {
      float* to = sums + t * TILE_ROWS + (FIRST + r) * LANES;
      store_floats(to, add(load_floats(to), total[t][r]));
    });
  });
}

template <class Decoder>
void multiply_values(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  // Rows of x, of which a chunk stays in the second-level cache while all tiles pass over it.
  const int64_t padded = x.groups() * X_ROWS, panel = std::min<int64_t>(128, padded);
  const TileShape shape(w, TILE_ROWS);
  alignas(64) float values[billfish::CHUNK * TILE_ROWS];
  GroupScales scales[16];
  std::vector<float> sums(size_t((last - first) * panel * TILE_ROWS));
  for (int64_t first_row = 0; first_row < padded; first_row += panel) {
    const int64_t last_row = std::min(padded, first_row + panel);
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t chunk = 0; chunk < shape.chunks; chunk++)
      for (int64_t tile = first; tile < last; tile++) {
        const int blocks = shape.blocks_in(chunk);
        const Blocks run = blocks_in_stream(w, shape, tile, chunk, blocks);
        read_scales<false>(w, shape, run.stream, blocks, scales, w.factor);
        const uint8_t* codes = run.stream + run.chunk_header;
        for (int b = 0; b < blocks; b++, codes += Decoder::block_bytes) {
          if (b % run.span == 0) codes += run.span_header;
          decode_values<Decoder>(w, codes, scales + b / run.span * shape.groups_in_span(), values + b * BLOCK * TILE_ROWS);
        }
        float* to = sums.data() + (tile - first) * panel * TILE_ROWS;
        for (int64_t row = first_row; row < last_row; row += X_ROWS, to += X_ROWS * TILE_ROWS)
          unroll<ROW_VECTORS / SUM_VECTORS>([&](auto part) {
            add_values<decltype(part)::value * SUM_VECTORS>(values, x.x + (row / X_ROWS * x.blocks + chunk * 8) * BLOCK * X_ROWS, blocks * BLOCK, to);
          });
      }
    for (int64_t tile = first; tile < last; tile++)
      write_tile(sums.data() + (tile - first) * panel * TILE_ROWS, 1, nullptr, bias, w.n, tile, first_row, std::min(last_row, x.m), y);
  }
}

inline void multiply_exact(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  with_decoder(w.codes, [&](auto decoder) { multiply_values<decltype(decoder)>(w, x, bias, y, first, last); });
}

}  // namespace BILLFISH_ISA
