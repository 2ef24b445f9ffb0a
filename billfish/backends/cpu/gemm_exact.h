// y = x W^T with x as it is: weights are decoded to float32.
//
// Few rows: in registers, every byte of the stream read once.
// Many rows: a dense product. Some chunks of a tile become float32 values, which stay in the first-level cache while all
// rows of x pass over them. x comes transposed, so that one load brings one k of several rows.
#pragma once
#include "gemm8.h"

namespace BILLFISH_ISA {

using billfish::ActivationsExact;

// ---- few rows --------------------------------------------------------------------------------------------------------

// Adds `blocks` blocks of row vectors FIRST .. FIRST + COUNT - 1 of a tile, times T rows of x, to sums [T][TILE_ROWS].
template <class Decoder, int T, int HALVES, int FIRST, int COUNT>
__attribute__((flatten, noinline)) void add_blocks_exact(const Weights& w, const uint8_t* codes, const GroupScales& s, int blocks, const ActivationsExact& x,
                                                      int64_t row, int64_t first_block, int64_t all_blocks, float* sums) {
  const bool minimum = has_minimum(w.scales);
  const int shift = scale_shift(w.group);
  const Floats offset = byte_offset(Decoder::code_bias(w.bias));
  Floats total[T][COUNT];
  unroll<T>([&](auto t) INLINED { unroll<COUNT>([&](auto r) INLINED { total[t][r] = load_floats(sums + t * TILE_ROWS + (FIRST + r) * LANES); }); });
  for (int b = 0; b < blocks; b++, codes += Decoder::block_bytes) {
    const int64_t at = first_block + b;
    const int first_group = (b >> shift) * HALVES * TILE_ROWS;
    unroll<HALVES>([&](auto half) INLINED {
      Floats sum[T][COUNT];
      unroll<T>([&](auto t) INLINED { unroll<COUNT>([&](auto r) INLINED { sum[t][r] = splat(0); }); });
      constexpr int quads = 8 / HALVES;
      unroll<quads>([&](auto q) INLINED {
        constexpr int quad = decltype(half)::value * quads + decltype(q)::value;
        FloatActivations piece[T];
        unroll<T>([&](auto t) INLINED { piece[t] = load_x(x.x + ((row + t) * all_blocks + at) * 32 + quad * 4); });
        unroll<COUNT>([&](auto r) INLINED {
          const Bytes v = Decoder::template code<quad * ROW_VECTORS + FIRST + decltype(r)::value>(codes, w.table);
          unroll<4>([&](auto k) INLINED {
            const Floats value = byte_to_floats<decltype(k)::value>(v, offset);
            unroll<T>([&](auto t) INLINED { sum[t][r] = multiply_add_x<decltype(k)::value>(sum[t][r], value, piece[t]); });
          });
        });
      });
      unroll<T>([&](auto t) INLINED {
        const float* x_sum = x.sums + ((row + t) * all_blocks + at) * 2;
        unroll<COUNT>([&](auto r) INLINED {
          const int i = first_group + half * TILE_ROWS + (FIRST + r) * LANES;
          total[t][r] = multiply_add(total[t][r], sum[t][r], load_floats(s.scale + i));
          if (minimum) {
            const float x_total = HALVES == 2 ? x_sum[half] : x_sum[0] + x_sum[1];
            total[t][r] = multiply_add(total[t][r], load_floats(s.minimum + i), splat(x_total));
          }
        });
      });
    });
  }
  unroll<T>([&](auto t) INLINED { unroll<COUNT>([&](auto r) INLINED { store_floats(sums + t * TILE_ROWS + (FIRST + r) * LANES, total[t][r]); }); });
}

// Whether x is wanted transposed, for the dense product. It is the way of many rows, and of the rarer formats.
inline bool wants_transposed(const Weights& w, int64_t m) {
  if (m >= MANY_ROWS) return true;
  return w.codes == Codes::table ? false : w.group == 16 || (w.codes != Codes::u4 && w.codes != Codes::s8);
}

template <class Decoder>
void multiply_few_exact(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  const TileShape shape(w, TILE_ROWS);
  alignas(64) float sums[MANY_ROWS * TILE_ROWS];
  ChunkScales scales;
  for (int64_t tile = first; tile < last; tile++) {
    const uint8_t* p = w.stream + tile * shape.tile_bytes;
    std::fill(sums, sums + x.m * TILE_ROWS, 0.0f);
    for (int64_t chunk = 0; chunk < shape.chunks; chunk++, p += shape.full_chunk_bytes) {
      const int blocks = shape.blocks_in(chunk);
      const uint8_t* codes = read_scales(w, p, shape.groups_in(blocks), scales);
      auto add_rows = [&](auto halves) {
        constexpr int H = decltype(halves)::value;
        int64_t row = 0;
        for (; row + X_ROWS <= x.m; row += X_ROWS)
          unroll<ROW_VECTORS / 2>([&](auto pair) {
            add_blocks_exact<Decoder, X_ROWS, H, decltype(pair)::value * 2, 2>(w, codes, scales, blocks, x, row, chunk * 8, shape.blocks, sums + row * TILE_ROWS);
          });
        for (; row < x.m; row++)
          add_blocks_exact<Decoder, 1, H, 0, ROW_VECTORS>(w, codes, scales, blocks, x, row, chunk * 8, shape.blocks, sums + row * TILE_ROWS);
      };
      if constexpr (std::is_same_v<Decoder, Looked>) {
        if (w.group == 16) {
          add_rows(std::integral_constant<int, 2>{});
          continue;
        }
      }
      add_rows(std::integral_constant<int, 1>{});
    }
    write_tile(sums, w.factor, bias, w.n, tile, 0, x.m, y);
  }
}

// ---- many rows -------------------------------------------------------------------------------------------------------

inline void start_rows(const float* bias, int64_t rows, int64_t columns, float* y, int64_t stride) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) y[r * stride + c] = bias ? bias[c] : 0.0f;
}

inline void copy_tile(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r++) std::copy(from + r * from_stride, from + r * from_stride + columns, to + r * to_stride);
}

constexpr int PANEL_CHUNKS = 2;

constexpr int PRODUCT_ROWS = ROW_VECTORS == 4 ? 4 : 8;

// sums [PRODUCT_ROWS][TILE_ROWS] += W^T x over `count` k: values [count][TILE_ROWS], x [count][8].
__attribute__((flatten)) inline void add_products(const float* values, const float* x, int64_t count, float* sums, int64_t stride) {
  Floats total[PRODUCT_ROWS][ROW_VECTORS];
  unroll<PRODUCT_ROWS>([&](auto t) { unroll<ROW_VECTORS>([&](auto r) { total[t][r] = load_floats(sums + t * stride + r * LANES); }); });
  for (int64_t k = 0; k < count; k++, values += TILE_ROWS, x += 8) {
    Floats w[ROW_VECTORS];
    unroll<ROW_VECTORS>([&](auto r) { w[r] = load_floats(values + r * LANES); });
    unroll<PRODUCT_ROWS / 4>([&](auto half) {
      const FloatActivations piece = load_x(x + 4 * half);
      unroll<4>([&](auto t) {
        unroll<ROW_VECTORS>([&](auto r) {
          Floats& sum = total[decltype(half)::value * 4 + decltype(t)::value][r];
          sum = multiply_add_x<decltype(t)::value>(sum, w[r], piece);
        });
      });
    });
  }
  unroll<PRODUCT_ROWS>([&](auto t) { unroll<ROW_VECTORS>([&](auto r) { store_floats(sums + t * stride + r * LANES, total[t][r]); }); });
}

// The values of one block, [32][TILE_ROWS].
template <class Decoder> __attribute__((flatten, noinline)) void decode_values(const Weights& w, const uint8_t* codes, const float* scale, const float* minimum, float* out) {
  const Floats offset = byte_offset(Decoder::code_bias(w.bias));
  unroll<VECTORS>([&](auto v) INLINED {
    constexpr int quad = decltype(v)::value / ROW_VECTORS, r = decltype(v)::value % ROW_VECTORS;
    const Bytes bytes = Decoder::template code<decltype(v)::value>(codes, w.table);
    const int group = w.group == 16 ? quad / 4 * TILE_ROWS : 0;
    const Floats s = load_floats(scale + group + r * LANES);
    unroll<4>([&](auto j) INLINED {
      Floats value = multiply(byte_to_floats<decltype(j)::value>(bytes, offset), s);
      if (minimum) value = add(value, load_floats(minimum + group + r * LANES));
      store_floats(out + (quad * 4 + j) * TILE_ROWS + r * LANES, value);
    });
  });
}

template <class Decoder>
void multiply_many_exact(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  const TileShape shape(w, TILE_ROWS);
  constexpr int64_t panel = 128, depth = PANEL_CHUNKS * billfish::CHUNK;
  const int shift = scale_shift(w.group), groups = w.group == 16 ? 2 : 1;
  std::vector<float> buffer(size_t(depth) * TILE_ROWS + 16), edge(8 * TILE_ROWS);
  float* values = buffer.data() + (-reinterpret_cast<uintptr_t>(buffer.data()) / 4 & 15);
  for (int64_t first_row = 0; first_row < x.m; first_row += panel) {
    const int64_t last_row = std::min(x.m, first_row + panel);
    for (int64_t chunk = 0; chunk < shape.chunks; chunk += PANEL_CHUNKS) {
      const int64_t end = std::min<int64_t>(shape.chunks, chunk + PANEL_CHUNKS);
      for (int64_t tile = first; tile < last; tile++) {
        int64_t count = 0;
        for (int64_t c = chunk; c < end; c++) {
          ChunkScales scales;
          const int blocks = shape.blocks_in(c);
          const uint8_t* codes = read_scales(w, w.stream + tile * shape.tile_bytes + c * shape.full_chunk_bytes, shape.groups_in(blocks), scales, w.factor);
          for (int b = 0; b < blocks; b++, count += 32) {
            const int at = (b >> shift) * groups * TILE_ROWS;
            decode_values<Decoder>(w, codes + size_t(b) * Decoder::block_bytes, scales.scale + at,
                                   has_minimum(w.scales) ? scales.minimum + at : nullptr, values + count * TILE_ROWS);
          }
        }
        const int64_t column = tile * TILE_ROWS, columns = std::min<int64_t>(TILE_ROWS, w.n - column);
        for (int64_t row = first_row; row < last_row; row += PRODUCT_ROWS) {
          const int64_t rows = std::min<int64_t>(PRODUCT_ROWS, last_row - row);
          const float* piece = x.transposed + (row / 8 * shape.blocks * 32 + chunk * billfish::CHUNK) * 8 + row % 8;
          float* out = y + row * w.n + column;
          if (rows == PRODUCT_ROWS && columns == TILE_ROWS) {
            if (chunk == 0) start_rows(bias ? bias + column : nullptr, rows, columns, out, w.n);
            add_products(values, piece, count, out, w.n);
          } else {  // at the edges of y, by way of a buffer
            if (chunk == 0) start_rows(bias ? bias + column : nullptr, rows, columns, out, w.n);
            std::fill(edge.begin(), edge.end(), 0.0f);
            copy_tile(out, w.n, edge.data(), TILE_ROWS, rows, columns);
            add_products(values, piece, count, edge.data(), TILE_ROWS);
            copy_tile(edge.data(), TILE_ROWS, out, w.n, rows, columns);
          }
        }
      }
    }
  }
}

inline void multiply_exact(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  with_decoder(w.codes, [&](auto decoder) {
    using Decoder = decltype(decoder);
    constexpr bool in_registers = std::is_same_v<Decoder, Nibbles> || std::is_same_v<Decoder, Looked> || std::is_same_v<Decoder, Whole>;
    if constexpr (in_registers)
      if (!x.transposed) return multiply_few_exact<Decoder>(w, x, bias, y, first, last);
    multiply_many_exact<Decoder>(w, x, bias, y, first, last);
  });
}

}  // namespace BILLFISH_ISA
