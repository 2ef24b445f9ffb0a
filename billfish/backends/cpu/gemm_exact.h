// y = x W^T with x as it is, in float32.
//
// In registers: codes become floats as they are read, as they are, unsigned; what they have more than the weights' values is
// taken off the sum of each block. Every byte of the stream is read once for one row of x, or for four.
// Through a buffer: a chunk of a tile becomes float32 values, which stay in the first-level cache while many rows of x pass over
// them.
#pragma once
#include "gemm8.h"

namespace BILLFISH_ISA {

using billfish::ActivationsExact;
using billfish::BLOCK;

// ---- few rows, in registers ------------------------------------------------------------------------------------------

// Adds blocks [begin, end) of a chunk, of row vectors FIRST .. FIRST + COUNT - 1 of a tile, times T rows of x from `row` on, to
// sums [T][TILE_ROWS]. HALVES: 2 where a group of weights is half a block. BLOCKS: how many blocks go side by side, since one
// row of x has too few sums to hide how long an addition takes. A sum is the same whatever goes on beside it.
template <class Decoder, int T, int HALVES, int FIRST, int COUNT, int BLOCKS>
__attribute__((flatten, noinline)) void add_blocks_exact(const Weights& w, const CodeTable& table, const uint8_t* codes, const GroupScales& s, int begin, int end,
                                                         const ActivationsExact& x, int64_t row, int64_t chunk, float* sums) {
  constexpr int quads = 8 / HALVES;
  const bool minimum = has_minimum(w.scales);
  const int shift = scale_shift(w.group);
  const Floats minus_bias = splat(-float(table.bias));
  codes += begin * Decoder::block_bytes;
  for (int b = begin; b < end; b += BLOCKS, codes += BLOCKS * Decoder::block_bytes) {
    asm volatile("" ::: "memory");  // else gcc keeps sums from one block to the next, in memory of its own
    unroll<(BLOCKS * Decoder::block_bytes * COUNT / ROW_VECTORS + 63) / 64>(
        [&](auto line) INLINED { __builtin_prefetch(codes + PREFETCH + FIRST * Decoder::block_bytes / ROW_VECTORS + line * 64); });
    const int64_t at = row / T * x.blocks + chunk * 8 + b;
    const float* x_values = x.x + at * BLOCK * T;
    const float* x_sums = x.sums + at * 3 * T;
    unroll<HALVES>([&](auto half) INLINED {
      Floats sum[BLOCKS][T][COUNT];
      unroll<quads>([&](auto q) INLINED {
        constexpr int quad = decltype(half)::value * quads + decltype(q)::value;
        unroll<BLOCKS>([&](auto block) INLINED {
          Bytes v[COUNT];
          unroll<COUNT>([&](auto r) INLINED {
            v[r] = Decoder::template code<quad * ROW_VECTORS + FIRST + decltype(r)::value>(codes + block * Decoder::block_bytes, table.codes);
          });
          unroll<4>([&](auto k) INLINED {
            constexpr bool starts = quad % quads == 0 && decltype(k)::value == 0;
            // With one row of x, a vector of it has four k; with several, four rows at one k.
            const FloatActivations piece = load_x(x_values + (block * BLOCK + quad * 4 + (T == 1 ? 0 : decltype(k)::value)) * T);
            unroll<COUNT>([&](auto r) INLINED {
              const Floats value = byte_as_floats<decltype(k)::value>(v[r]);
              unroll<T>([&](auto t) INLINED {
                constexpr int lane = T == 1 ? decltype(k)::value : decltype(t)::value;
                Floats& one = sum[block][t][r];
                if constexpr (starts) one = multiply_x<lane>(value, piece);
                else one = multiply_add_x<lane>(one, value, piece);
              });
            });
          });
        });
      });
      unroll<BLOCKS>([&](auto block) INLINED {
        const int64_t from = (((b + block) >> shift) * HALVES + half) * TILE_ROWS + FIRST * LANES;
        const FloatActivations x_sum = load_x(x_sums + (block * 3 + (HALVES == 2 ? decltype(half)::value : 2)) * T);
        unroll<COUNT>([&](auto r) INLINED {
          const Floats scale = load_floats(s.scale + from + r * LANES);
          unroll<T>([&](auto t) INLINED {
            float* to = sums + t * TILE_ROWS + (FIRST + r) * LANES;
            Floats total = load_floats(to);
            if (minimum) total = multiply_add_x<decltype(t)::value>(total, load_floats(s.minimum + from + r * LANES), x_sum);
            const Floats value = multiply_add(multiply_x<decltype(t)::value>(minus_bias, x_sum), sum[block][t][r], splat(SUM_FACTOR));
            store_floats(to, multiply_add(total, value, scale));
          });
        });
      });
    });
  }
}

// Sums of products with unsigned codes can be larger than those with values, by as much as their bias; over many blocks that
// is less than what a sum of thousands loses anyway, but a short one would show it.
constexpr int64_t LEAST_K_IN_REGISTERS = 256;

using ExactKernel = void (*)(const Weights&, const ActivationsExact&, const float* bias, float* y, int64_t first, int64_t last);
inline ExactKernel kernel_in_registers(const Weights& w);

// Whether x is wanted as it is, for the buffer.
inline bool wants_plain(const Weights& w, int64_t m) { return w.k < LEAST_K_IN_REGISTERS || m >= MANY_ROWS || !kernel_in_registers(w); }

template <class Decoder, int HALVES>
void multiply_in_registers(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  const TileShape shape(w, TILE_ROWS);
  const CodeTable table = code_table(w);
  ChunkScales scales;
  alignas(64) float sums[MANY_ROWS * TILE_ROWS];
  for (int64_t tile = first; tile < last; tile++) {
    std::fill(sums, sums + x.groups() * x.lanes * TILE_ROWS, 0.0f);
    for (int64_t chunk = 0; chunk < shape.chunks; chunk++) {
      const int blocks = shape.blocks_in(chunk), even = blocks & ~1;
      const uint8_t* codes = read_scales<false>(w, w.stream + tile * shape.tile_bytes + chunk * shape.full_chunk_bytes, shape.groups_in(blocks), scales);
      for (int64_t row = 0; row < x.m; row += x.lanes) {
        float* to = sums + row * TILE_ROWS;
        if (x.lanes == X_ROWS) {
          unroll<ROW_VECTORS / 2>([&](auto pair) {
            add_blocks_exact<Decoder, X_ROWS, HALVES, decltype(pair)::value * 2, 2, 1>(w, table, codes, scales, 0, blocks, x, row, chunk, to);
          });
        } else {
          add_blocks_exact<Decoder, 1, HALVES, 0, ROW_VECTORS, 2>(w, table, codes, scales, 0, even, x, row, chunk, to);
          if (even < blocks) add_blocks_exact<Decoder, 1, HALVES, 0, ROW_VECTORS, 1>(w, table, codes, scales, even, blocks, x, row, chunk, to);
        }
      }
    }
    write_tile(sums, w.factor, x.power, bias, w.n, tile, 0, x.m, y);
  }
}

// For the combinations that formats have, without the rarest: each is four more functions to compile. Or null.
inline ExactKernel kernel_in_registers(const Weights& w) {
  const bool halves = w.group == 16;
  if constexpr (IN_REGISTERS) switch (w.codes) {
    case Codes::u4: return halves ? nullptr : multiply_in_registers<Nibbles, 1>;
    case Codes::u5: return halves ? nullptr : multiply_in_registers<Packed<4, 1>, 1>;
    case Codes::u6: return halves ? multiply_in_registers<Packed<4, 2>, 2> : nullptr;
    case Codes::s8: return halves ? nullptr : multiply_in_registers<Whole, 1>;
    case Codes::table: return halves ? multiply_in_registers<Looked, 2> : multiply_in_registers<Looked, 1>;
    default: break;
  }
  return nullptr;
}

// ---- many rows, from the buffer --------------------------------------------------------------------------------------

// The values of one block, [32][TILE_ROWS].
template <class Decoder>
__attribute__((flatten, noinline)) void decode_values(const Weights& w, const CodeTable& table, const uint8_t* codes, const GroupScales& s, float* out) {
  const bool minimum = has_minimum(w.scales);
  const Floats offset = byte_offset(table.bias);
  unroll<VECTORS>([&](auto v) INLINED {
    constexpr int quad = decltype(v)::value / ROW_VECTORS, r = decltype(v)::value % ROW_VECTORS;
    const Bytes bytes = Decoder::template code<decltype(v)::value>(codes, table.codes);
    const int at = (w.group == 16 ? quad / 4 * TILE_ROWS : 0) + r * LANES;
    const Floats scale = load_floats(s.scale + at);
    unroll<4>([&](auto k) INLINED {
      Floats value = multiply(byte_to_floats<decltype(k)::value>(bytes, offset), scale);
      if (minimum) value = add(value, load_floats(s.minimum + at));
      store_floats(out + (quad * 4 + k) * TILE_ROWS + r * LANES, value);
    });
  });
}

// sums [X_ROWS][TILE_ROWS] += x W^T over `count` k, for row vectors from FIRST on: values [count][TILE_ROWS], x [count][X_ROWS].
template <int FIRST> __attribute__((flatten, noinline)) void add_values(const float* values, const float* x, int64_t count, float* sums) {
  Floats total[X_ROWS][SUM_VECTORS];
  unroll<X_ROWS>([&](auto t) { unroll<SUM_VECTORS>([&](auto r) { total[t][r] = load_floats(sums + t * TILE_ROWS + (FIRST + r) * LANES); }); });
  for (int64_t k = 0; k < count; k++, values += TILE_ROWS, x += X_ROWS) {
    const FloatActivations piece = load_x(x);
    unroll<SUM_VECTORS>([&](auto r) {
      const Floats value = load_floats(values + (FIRST + r) * LANES);
      unroll<X_ROWS>([&](auto t) { total[t][r] = multiply_add_x<decltype(t)::value>(total[t][r], value, piece); });
    });
  }
  unroll<X_ROWS>([&](auto t) { unroll<SUM_VECTORS>([&](auto r) { store_floats(sums + t * TILE_ROWS + (FIRST + r) * LANES, total[t][r]); }); });
}

template <class Decoder>
void multiply_buffered(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  // Rows of x, of which a chunk stays in the second-level cache while all tiles pass over it.
  const int64_t padded = x.groups() * X_ROWS, panel = std::min<int64_t>(128, padded);
  const int shift = scale_shift(w.group), groups = w.group == 16 ? 2 : 1;
  const TileShape shape(w, TILE_ROWS);
  const CodeTable table = code_table(w);
  alignas(64) float values[billfish::CHUNK * TILE_ROWS];
  ChunkScales scales;
  std::vector<float> sums(size_t((last - first) * panel * TILE_ROWS));
  for (int64_t first_row = 0; first_row < padded; first_row += panel) {
    const int64_t last_row = std::min(padded, first_row + panel);
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t chunk = 0; chunk < shape.chunks; chunk++)
      for (int64_t tile = first; tile < last; tile++) {
        const int blocks = shape.blocks_in(chunk);
        const uint8_t* codes = read_scales<false>(w, w.stream + tile * shape.tile_bytes + chunk * shape.full_chunk_bytes, shape.groups_in(blocks), scales, w.factor);
        for (int b = 0; b < blocks; b++)
          decode_values<Decoder>(w, table, codes + b * Decoder::block_bytes, GroupScales(scales).from((b >> shift) * groups), values + b * BLOCK * TILE_ROWS);
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
  if (x.power) return kernel_in_registers(w)(w, x, bias, y, first, last);
  with_decoder(w.codes, [&](auto decoder) { multiply_buffered<decltype(decoder)>(w, x, bias, y, first, last); });
}

}  // namespace BILLFISH_ISA
