// float32 GEMM with weights that are decoded to float32: what gemm_exact.h, gemm_float_codes.h and gemm_plain.h do for many rows.
#pragma once
#include "gemm/wide.h"

namespace BILLFISH_ISA {

using billfish::ActivationsExact;
using billfish::BLOCK;
using billfish::CHUNK;

// sums [BUNDLES * X_ROWS][TILE_ROWS] += x W^T over `count` k, for row vectors from FIRST on: values [count][TILE_ROWS]. x [count][X_ROWS] is
// that of the first tile of rows, others are x_stride behind.
template <int FIRST, int BUNDLES> __attribute__((flatten, noinline)) void add_values(const float* values, const float* x, int64_t x_stride, int64_t count, float* sums) {
  Floats total[BUNDLES * X_ROWS][SUM_VECTORS];
  repeat<BUNDLES * X_ROWS>([&](int t) INLINED { repeat<SUM_VECTORS>([&](int r) INLINED { total[t][r] = splat(0); }); });
  for (int64_t k = 0; k < count; k++, values += TILE_ROWS, x += X_ROWS)
    repeat<SUM_VECTORS>([&](int r) INLINED {
      const Floats value = load_floats(values + (FIRST + r) * LANES);
      repeat<BUNDLES>([&](int b) INLINED {
        const FloatActivations x_now = load_x(x + b * x_stride);
        unroll<X_ROWS>([&](auto t) INLINED { total[b * X_ROWS + t][r] = multiply_add_x<decltype(t)::value>(total[b * X_ROWS + t][r], value, x_now); });
      });
    });
  repeat<BUNDLES * X_ROWS>([&](int t) INLINED {
    repeat<SUM_VECTORS>([&](int r) INLINED {
      float* to = sums + t * TILE_ROWS + (FIRST + r) * LANES;
      store_floats(to, add(load_floats(to), total[t][r]));
    });
  });
}

// All rows pass over the values of so many k before the next ones, and add them up on their own: 16 KiB, which stay in a first-level cache of 32 KiB
// beside x and sums.
constexpr int64_t VALUES_AT_ONCE = std::min<int64_t>(CHUNK, 16384 / (TILE_ROWS * sizeof(float)));

// values_of(shape, run) are the values of a run of blocks, [k][TILE_ROWS], where a cache has them. Sums are multiplied by `factor`.
template <class ValuesOf>
void multiply_values(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last, ValuesOf values_of, float factor = 1) {
  // Rows of x go in panels of 128. A chunk of a panel, 128 KiB, stays in the second-level cache while all tiles pass over it.
  const int64_t padded = x.bundles() * X_ROWS, panel = std::min<int64_t>(128, padded), x_stride = x.blocks * BLOCK * X_ROWS;
  const TileShape shape(w, TILE_ROWS);
  Room room;
  float* sums = room.take((last - first) * panel * TILE_ROWS);
  for (int64_t first_row = 0; first_row < padded; first_row += panel) {
    const int64_t last_row = std::min(padded, first_row + panel);
    std::fill_n(sums, (last - first) * panel * TILE_ROWS, 0.0f);
    for (int64_t chunk = 0; chunk < shape.chunks; chunk++)
      for (int64_t tile = first; tile < last; tile++) {
        const Blocks run = blocks_in_stream(w, shape, tile, chunk, shape.blocks_in(chunk));
        const float* values = values_of(shape, run);
        float* to = sums + (tile - first) * panel * TILE_ROWS;
        const float* from = x.x + first_row / X_ROWS * x_stride + chunk * CHUNK * X_ROWS;
        const auto add_rows = [&](auto bundles, int64_t row, int64_t k, int64_t count) {
          unroll<ROW_VECTORS / SUM_VECTORS>([&](auto part) {
            add_values<decltype(part)::value * SUM_VECTORS, decltype(bundles)::value>(
                values + k * TILE_ROWS, from + row / X_ROWS * x_stride + k * X_ROWS, x_stride, count, to + row * TILE_ROWS);
          });
        };
        for (int64_t k = 0, end = run.count * BLOCK; k < end; k += VALUES_AT_ONCE) {
          const int64_t count = std::min(VALUES_AT_ONCE, end - k), rows = last_row - first_row;
          int64_t row = 0;
          for (; row + SUM_BUNDLES * X_ROWS <= rows; row += SUM_BUNDLES * X_ROWS) add_rows(std::integral_constant<int, SUM_BUNDLES>{}, row, k, count);
          for (; row < rows; row += X_ROWS) add_rows(std::integral_constant<int, 1>{}, row, k, count);
        }
      }
    for (int64_t tile = first; tile < last; tile++)
      write_tile(sums + (tile - first) * panel * TILE_ROWS, factor, nullptr, bias, w.n, tile, first_row, std::min(last_row, x.m), y);
  }
}

}  // namespace BILLFISH_ISA
