// y = x W^T with x as it is, in float32. Up to seven rows are exact in gemm8.h, where a level has that.
//
// As many rows as registers have sums for are multiplied with each value as it is made. For more, a chunk of a tile becomes
// float32 values, which stay in the first-level cache while all rows of x pass over them.
#pragma once
#include "gemm/gemm8.h"

namespace BILLFISH_ISA {

using billfish::ActivationsExact;
using billfish::BLOCK;
using billfish::CHUNK;

// ---- few rows -------------------------------------------------------------------------------------------------------

// sums [BUNDLES * X_ROWS][TILE_ROWS] += x W^T for one row vector and a chunk, whose codes are a byte each. x [chunk][X_ROWS] is that of the
// first bundle, others are x_stride behind. Each chunk is added up on its own first, which loses less than one long sum.
template <int BUNDLES, bool MINIMUMS>
__attribute__((flatten, noinline)) void add_codes(const uint8_t* codes, const GroupScales* scales, const Blocks& run, bool halves, int row_vector, const float* x, int64_t x_stride, float* sums) {
  const int64_t quads = run.count * 8;
  const int quads_to_groups = halves ? 2 : 3 + __builtin_ctz(unsigned(run.span));  // shifts
  Floats total[BUNDLES * X_ROWS], now[2], next[2];
  unroll<BUNDLES * X_ROWS>([&](auto t) INLINED { total[t] = splat(0); });
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
      unroll<2>([&](auto i) INLINED { now[i] = next[i]; });
      if constexpr (decltype(pair)::value == 1) begin(std::min(quad + 1, quads - 1));
      make_next(std::integral_constant<int, 1 - decltype(pair)::value>{});
      unroll<2>([&](auto i) INLINED {
        unroll<BUNDLES>([&](auto b) INLINED {
          const FloatActivations x_now = load_x(x + b * x_stride);
          unroll<X_ROWS>([&](auto t) INLINED { total[b * X_ROWS + t] = multiply_add_x<decltype(t)::value>(total[b * X_ROWS + t], now[i], x_now); });
        });
        x += X_ROWS;
      });
    });
  unroll<BUNDLES * X_ROWS>([&](auto t) INLINED {
    float* to = sums + t * TILE_ROWS + row_vector * LANES;
    store_floats(to, add(load_floats(to), total[t]));
  });
}

using CodesKernel = void (*)(const uint8_t*, const GroupScales*, const Blocks&, bool, int, const float*, int64_t, float*);

// The kernel for these weights and so many bundles of rows, or null: where registers do not hold their sums, or a scale times
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

// The codes of a run of blocks, a byte each.
template <class Decoder> __attribute__((flatten)) inline void decode_codes(const Weights& w, const Blocks& run, uint8_t* out) {
  const Table table(w);
  const uint8_t* p = run.stream + run.chunk_header;
  for (int64_t b = 0; b < run.count; b++, p += Decoder::block_bytes, out += VECTORS * VECTOR_BYTES) {
    if (b % run.span == 0) p += run.span_header;
    unroll<VECTORS>([&](auto v) { store_bytes(out + v * VECTOR_BYTES, Decoder::template code<decltype(v)::value>(p, table.values)); });
  }
}

template <class Decoder>
void multiply_codes(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last, CodesKernel kernel) {
  const TileShape shape(w, TILE_ROWS);
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
      decode_codes<Decoder>(w, run, codes);
      read_scales<true>(w, shape, run.stream, run.count, scales, -BYTE_START - float(Decoder::code_bias(w.bias)), power);
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

// The values of one block, [32][TILE_ROWS].
template <class Decoder>
__attribute__((flatten, noinline)) void decode_values(const Weights& w, const uint8_t* codes, const GroupScales* groups, float* out) {
  const Table table(w);
  const bool minimum = has_minimum(w.scales);
  const Floats offset = byte_offset(Decoder::code_bias(w.bias));
  unroll<VECTORS>([&](auto v) INLINED {
    constexpr int quad = decltype(v)::value / ROW_VECTORS, r = decltype(v)::value % ROW_VECTORS;
    const Bytes bytes = Decoder::template code<decltype(v)::value>(codes, table.values);
    const GroupScales& group = groups[w.group == 16 ? quad / 4 : 0];
    const Floats scale = load_floats(group.scale + r * LANES);
    unroll<4>([&](auto k) INLINED {
      Floats value = multiply(byte_to_floats<decltype(k)::value>(bytes, offset), scale);
      if (minimum) value = add(value, load_floats(group.minimum + r * LANES));
      store_floats(out + (quad * 4 + k) * TILE_ROWS + r * LANES, value);
    });
  });
}

// sums [BUNDLES * X_ROWS][TILE_ROWS] += x W^T over `count` k, for row vectors from FIRST on: values [count][TILE_ROWS]. x [count][X_ROWS] is
// that of the first bundle, others are x_stride behind.
template <int FIRST, int BUNDLES> __attribute__((flatten, noinline)) void add_values(const float* values, const float* x, int64_t x_stride, int64_t count, float* sums) {
  Floats total[BUNDLES * X_ROWS][SUM_VECTORS];
  unroll<BUNDLES * X_ROWS>([&](auto t) { unroll<SUM_VECTORS>([&](auto r) { total[t][r] = splat(0); }); });
  for (int64_t k = 0; k < count; k++, values += TILE_ROWS, x += X_ROWS)
    unroll<SUM_VECTORS>([&](auto r) {
      const Floats value = load_floats(values + (FIRST + r) * LANES);
      unroll<BUNDLES>([&](auto b) {
        const FloatActivations x_now = load_x(x + b * x_stride);
        unroll<X_ROWS>([&](auto t) { total[b * X_ROWS + t][r] = multiply_add_x<decltype(t)::value>(total[b * X_ROWS + t][r], value, x_now); });
      });
    });
  unroll<BUNDLES * X_ROWS>([&](auto t) {
    unroll<SUM_VECTORS>([&](auto r) {
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

template <class Decoder>
void multiply_decoded(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  alignas(64) float values[CHUNK * TILE_ROWS];
  GroupScales scales[16];
  multiply_values(w, x, bias, y, first, last, [&](const TileShape& shape, const Blocks& run) {
    read_scales<false>(w, shape, run.stream, run.count, scales, 0, w.factor);
    const uint8_t* codes = run.stream + run.chunk_header;
    for (int64_t b = 0; b < run.count; b++, codes += Decoder::block_bytes) {
      if (b % run.span == 0) codes += run.span_header;
      decode_values<Decoder>(w, codes, scales + b / run.span * shape.groups_in_span(), values + b * BLOCK * TILE_ROWS);
    }
    return values;
  });
}

inline void multiply_exact(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  const CodesKernel few = codes_kernel(w, x.bundles());
  with_decoder(w.codes, [&](auto decoder) {
    if (few) multiply_codes<decltype(decoder)>(w, x, bias, y, first, last, few);
    else multiply_decoded<decltype(decoder)>(w, x, bias, y, first, last);
  });
}

}  // namespace BILLFISH_ISA
