// y = x W^T in float32 with unquantized weights: float32, float16 or bfloat16, as they lie in the stream.
//
// A block of a tile is [32 k][TILE_ROWS] numbers, without scales. With few rows of x they become float32 just before they are multiplied,
// with more once for all rows, in a buffer as in values.h. Every sum has the same order for any number of rows, so that a row of x
// gets the same bits alone and beside others.
#pragma once
#include "gemm/values.h"

namespace BILLFISH_ISA {

using billfish::FEW_FLOAT_ROWS;

// LANES numbers of the stream to float32, exactly.
struct Float32 {
  static constexpr int bytes = 4;
  static Floats read(const uint8_t* p) { return floats_at(p); }
};
struct Float16 {
  static constexpr int bytes = 2;
  static Floats read(const uint8_t* p) { return halves_to_floats(p); }
};
struct Bfloat16 {
  static constexpr int bytes = 2;
  static Floats read(const uint8_t* p) { return bfloats_to_floats(p); }
};

// ---- few rows -------------------------------------------------------------------------------------------------------

// sums [ROWS][TILE_ROWS] += x W^T for a run of blocks. x [ROWS][k], one row x_stride behind the other.
template <class Number, int ROWS> __attribute__((flatten, noinline)) void add_numbers(const Blocks& run, const float* x, int64_t x_stride, float* sums) {
  constexpr int vector_bytes = LANES * Number::bytes, quad_bytes = 4 * ROW_VECTORS * vector_bytes;
  Floats total[ROWS][ROW_VECTORS];
  repeat<ROWS>([&](int t) INLINED { repeat<ROW_VECTORS>([&](int r) INLINED { total[t][r] = splat(0); }); });
  const uint8_t* p = run.stream;
  for (int64_t quad = 0; quad < run.count * 8; quad++, p += quad_bytes, x += 4) {
    if constexpr (ONE_ROW_AHEAD > 0) repeat<quad_bytes / 64>([&](int line) INLINED { __builtin_prefetch(p + ONE_ROW_AHEAD + line * 64); });
    FloatActivations x_now[ROWS];
    repeat<ROWS>([&](int t) INLINED { x_now[t] = load_x(x + t * x_stride); });
    unroll<4>([&](auto k) INLINED {
      repeat<ROW_VECTORS>([&](int r) INLINED {
        const Floats value = Number::read(p + (k * ROW_VECTORS + r) * vector_bytes);
        repeat<ROWS>([&](int t) INLINED { total[t][r] = multiply_add_x<decltype(k)::value>(total[t][r], value, x_now[t]); });
      });
    });
  }
  repeat<ROWS>([&](int t) INLINED {
    repeat<ROW_VECTORS>([&](int r) INLINED {
      float* to = sums + t * TILE_ROWS + r * LANES;
      store_floats(to, add(load_floats(to), total[t][r]));
    });
  });
}

// The kernel for so many rows, or for X_ROWS if there are more.
template <class Number> auto numbers_kernel(int64_t rows) {
  switch (rows) {
    case 1: return add_numbers<Number, 1>;
    case 2: return add_numbers<Number, 2>;
    case 3: return add_numbers<Number, 3>;
    default: return add_numbers<Number, X_ROWS>;
  }
}

// Numbers are converted again for every four rows: the first of them bring these into the first-level cache.
template <class Number> void multiply_numbers(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  const TileShape shape(w, TILE_ROWS);
  const int64_t x_stride = x.blocks * BLOCK;
  for (int64_t tile = first; tile < last; tile++) {
    alignas(64) float sums[FEW_FLOAT_ROWS * TILE_ROWS] = {};
    for (int64_t chunk = 0; chunk < shape.chunks; chunk++) {
      const Blocks all = blocks_in_stream(w, shape, tile, chunk, shape.blocks_in(chunk));
      for (int64_t k = 0; k < all.count * BLOCK; k += VALUES_AT_ONCE) {
        Blocks run = all;
        run.stream += k * TILE_ROWS * Number::bytes, run.count = std::min(VALUES_AT_ONCE / BLOCK, all.count - k / BLOCK);
        for (int64_t row = 0; row < x.m; row += X_ROWS)
          numbers_kernel<Number>(x.m - row)(run, x.x + row * x_stride + chunk * CHUNK + k, x_stride, sums + row * TILE_ROWS);
      }
    }
    write_tile(sums, 1, nullptr, bias, w.n, tile, 0, x.m, y);
  }
}

// ---- many rows ------------------------------------------------------------------------------------------------------

// The numbers of a run of blocks as float32, [k][TILE_ROWS]. What is float32 already stays where it is.
template <class Number> const float* floats_of(const Blocks& run, float* buffer) {
  if constexpr (std::is_same_v<Number, Float32>) return reinterpret_cast<const float*>(run.stream);
  for (int64_t i = 0; i < run.count * BLOCK * TILE_ROWS; i += LANES) store_floats(buffer + i, Number::read(run.stream + i * Number::bytes));
  return buffer;
}

template <class Number> void multiply_type(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  if (x.m <= FEW_FLOAT_ROWS) return multiply_numbers<Number>(w, x, bias, y, first, last);
  alignas(64) float buffer[CHUNK * TILE_ROWS];
  multiply_values(w, x, bias, y, first, last, [&](const TileShape&, const Blocks& run) { return floats_of<Number>(run, buffer); });
}

inline void multiply_plain(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  switch (w.codes) {
    case Codes::f32: return multiply_type<Float32>(w, x, bias, y, first, last);
    case Codes::f16: return multiply_type<Float16>(w, x, bias, y, first, last);
    default: return multiply_type<Bfloat16>(w, x, bias, y, first, last);
  }
}

}  // namespace BILLFISH_ISA
