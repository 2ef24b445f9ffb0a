// y = x W^T on packed weights, in integers (q8, q16) and exactly, for any number of rows of x.
//
// Few rows: codes are decoded as they are read, every byte of the stream once.
// Many rows: a tile is decoded once into a buffer that stays in cache, then multiplied with all rows, four at a time.
// Both are the same kernel; the second one reads from the buffer as if it were packed in whole bytes.
#pragma once
#include <algorithm>
#include <vector>

#include "decode.h"
#include "scales.h"

namespace BILLFISH_ISA {

using billfish::Activations8;
using billfish::ActivationsExact;
using billfish::Codes;
using billfish::TileShape;

using billfish::MANY_ROWS;

// Rows of x that a kernel takes at a time: as many as leave registers for their sums.
constexpr int MOST_ROWS = ROW_VECTORS == 4 ? 2 : 4;

// The widths that people use most are decoded between load and product; the others, chunk by chunk, into a small buffer.
// Each width in registers is a dozen more kernels to compile.
template <class Decoder> constexpr bool decoded_in_registers =
    std::is_same_v<Decoder, Packed<4>> || std::is_same_v<Decoder, Looked> || std::is_same_v<Decoder, Whole>;

// Blocks to groups: 0 where each block has its own, 2 where four share one.
inline int scale_shift(int group) { return group <= 32 ? 0 : group == 64 ? 1 : group == 128 ? 2 : 3; }

constexpr int PREFETCH = 2048;  // bytes ahead

// ---- integers -------------------------------------------------------------------------------------------------------

// Adds `blocks` blocks of one tile, multiplied with T rows of x from `row` on, to sums [T][TILE_ROWS].
// GROUPS: how many groups of weights share a block of 32 (2 where a group is 16). BIASED: whether codes need `bias` off.
template <class Decoder, int T, int PLANES, int GROUPS, bool BIASED>
__attribute__((flatten)) inline void add_blocks8(const uint8_t* codes, const uint8_t* table, const float* scale,
                                                 const float* minimum, int scale_shift, int blocks, int32_t bias,
                                                 const Activations8& x, int64_t row, int64_t first_block, float* sums) {
  // One row of x alone has few sums to work on at a time, each waiting for its last product: give it twice as many.
  constexpr int CHAINS = T * PLANES == 1 ? 2 : 1;
  Floats total[T][ROW_VECTORS];
  unroll<T>([&](auto t) { unroll<ROW_VECTORS>([&](auto r) { total[t][r] = load_floats(sums + t * TILE_ROWS + r * LANES); }); });
  const int64_t at = x.block_of(row, first_block), lane = row % 4;
  const int8_t* x_codes = x.codes + at * PLANES * 4 * 32 + lane * 32;
  const float* x_scale = x.scale + at * 4 + lane;
  const int32_t* x_sums = x.sums + at * 8 + lane;
  const float* x_totals = x.totals + at * 8 + lane;
  for (int b = 0; b < blocks; b++) {
    if constexpr (T * PLANES <= 2)  // the stream is the traffic: ask for it before the hardware does
      unroll<(Decoder::block_bytes + 63) / 64>([&](auto line) { __builtin_prefetch(codes + PREFETCH + line * 64); });
    const int64_t group_at = int64_t(b >> scale_shift) * GROUPS * TILE_ROWS;
    unroll<GROUPS>([&](auto g) {
      Ints sum[T][PLANES][ROW_VECTORS][CHAINS];
      unroll<T>([&](auto t) {
        const int32_t start = BIASED ? -bias * (GROUPS == 2 ? x_sums[4 * g + t] : x_sums[t] + x_sums[4 + t]) : 0;
        unroll<ROW_VECTORS>([&](auto r) {
          unroll<PLANES>([&](auto p) {
            unroll<CHAINS>([&](auto c) { sum[t][p][r][c] = splat_int(BIASED && p + 1 == PLANES && c == 0 ? start : 0); });
          });
        });
      });
      constexpr int halves = 2 / GROUPS;  // 16-byte pieces of x in this group
      unroll<halves>([&](auto h) {
        Activations piece[T][PLANES];
        unroll<T>([&](auto t) {
          unroll<PLANES>([&](auto p) { piece[t][p] = load_activations(x_codes + (p * 4 + t) * 32 + (g * halves + h) * 16); });
        });
        unroll<4>([&](auto quad) {
          unroll<ROW_VECTORS>([&](auto r) {
            constexpr int v = ((decltype(g)::value * halves + decltype(h)::value) * 4 + decltype(quad)::value) * ROW_VECTORS + decltype(r)::value;
            Bytes w = Decoder::template vector<v>(codes, table);
            unroll<T>([&](auto t) {
              unroll<PLANES>([&](auto p) {
                Ints& s = sum[t][p][r][quad % CHAINS];
                s = dot<decltype(quad)::value, Decoder::is_signed>(s, w, piece[t][p]);
              });
            });
          });
        });
      });
      const FloatActivations scales = load_x(x_scale), totals = load_x(x_totals + (GROUPS == 2 ? 4 * g : 0)), more = load_x(x_totals + 4);
      unroll<ROW_VECTORS>([&](auto r) {
        const Floats group_scale = load_floats(scale + group_at + g * TILE_ROWS + r * LANES);
        unroll<T>([&](auto t) {
          Ints whole = sum[t][PLANES - 1][r][0];
          if constexpr (CHAINS == 2) whole = add(whole, sum[t][PLANES - 1][r][1]);
          if constexpr (PLANES == 2) whole = add(whole, shift_left<8>(sum[t][0][r][0]));
          total[t][r] = multiply_add(total[t][r], to_floats(whole), multiply_x<decltype(t)::value>(group_scale, scales));
        });
        if (minimum) {
          const Floats group_minimum = load_floats(minimum + group_at + g * TILE_ROWS + r * LANES);
          unroll<T>([&](auto t) {
            total[t][r] = multiply_add_x<decltype(t)::value>(total[t][r], group_minimum, totals);
            if constexpr (GROUPS == 1) total[t][r] = multiply_add_x<decltype(t)::value>(total[t][r], group_minimum, more);
          });
        }
      });
    });
    codes += Decoder::block_bytes, x_codes += PLANES * 4 * 32, x_scale += 4, x_sums += 8, x_totals += 8;
  }
  unroll<T>([&](auto t) { unroll<ROW_VECTORS>([&](auto r) { store_floats(sums + t * TILE_ROWS + r * LANES, total[t][r]); }); });
}

// The kernel for T rows of x in one plane, or half as many in two.
template <class Decoder, int T> struct Kernel8 {
  static constexpr int most_rows(const Activations8& x) { return x.planes == 2 ? MOST_ROWS / 2 : MOST_ROWS; }
  static void run(const Weights& w, const uint8_t* codes, GroupScales s, int blocks, const Activations8& x,
                  int64_t row, int64_t first_block, int64_t, float* sums) {
    const float* minimum = has_minimum(w.scales) ? s.minimum : nullptr;
    const int32_t bias = w.bias + (Decoder::is_signed ? SIGNED_BIAS : 0);
    const int shift = scale_shift(w.group);
    constexpr bool biased = !Decoder::is_signed || SIGNED_BIAS != 0;
    auto call = [&](auto rows, auto planes, auto groups) {
      add_blocks8<Decoder, decltype(rows)::value, decltype(planes)::value, decltype(groups)::value, biased>(
          codes, w.table, s.scale, minimum, shift, blocks, bias, x, row, first_block, sums);
    };
    constexpr std::integral_constant<int, 1> one;
    constexpr std::integral_constant<int, 2> two;
    constexpr std::integral_constant<int, T> rows;
    constexpr std::integral_constant<int, (T + 1) / 2> half_rows;
    if (x.planes == 1) w.group == 16 ? call(rows, one, two) : call(rows, one, one);
    else w.group == 16 ? call(half_rows, two, two) : call(half_rows, two, one);
  }
};

// ---- exactly --------------------------------------------------------------------------------------------------------

template <class Decoder, int T> struct KernelExact {
  static constexpr int most_rows(const ActivationsExact&) { return MOST_ROWS; }
  static void run(const Weights& w, const uint8_t* codes, GroupScales s, int blocks, const ActivationsExact& x,
                  int64_t row, int64_t first_block, int64_t all_blocks, float* sums) {
    if (w.group == 16) add_blocks<2>(w, codes, s, blocks, x, row, first_block, all_blocks, sums);
    else add_blocks<1>(w, codes, s, blocks, x, row, first_block, all_blocks, sums);
  }

  template <int GROUPS>
  __attribute__((flatten)) static void add_blocks(const Weights& w, const uint8_t* codes, GroupScales s, int blocks, const ActivationsExact& x,
                         int64_t row, int64_t first_block, int64_t all_blocks, float* sums) {
    const bool minimum = has_minimum(w.scales);
    const int shift = scale_shift(w.group);
    const Bytes bias = splat_byte(uint8_t(w.bias));
    Floats total[T][ROW_VECTORS];
    unroll<T>([&](auto t) { unroll<ROW_VECTORS>([&](auto r) { total[t][r] = load_floats(sums + t * TILE_ROWS + r * LANES); }); });
    for (int b = 0; b < blocks; b++, codes += Decoder::block_bytes) {
      const int64_t at = first_block + b;
      const int scale_at = (b >> shift) * GROUPS * TILE_ROWS;
      unroll<GROUPS>([&](auto g) {
        Floats sum[T][ROW_VECTORS];
        unroll<T>([&](auto t) { unroll<ROW_VECTORS>([&](auto r) { sum[t][r] = splat(0); }); });
        constexpr int quads = 8 / GROUPS;
        unroll<quads>([&](auto q) {
          constexpr int quad = decltype(g)::value * quads + decltype(q)::value;
          FloatActivations piece[T];
          unroll<T>([&](auto t) { piece[t] = load_x(x.x + ((row + t) * all_blocks + at) * 32 + quad * 4); });
          unroll<ROW_VECTORS>([&](auto r) {
            Bytes v = Decoder::template vector<quad * ROW_VECTORS + decltype(r)::value>(codes, w.table);
            if constexpr (!Decoder::is_signed) v = subtract(v, bias);
            unroll<4>([&](auto k) {
              Floats value = signed_byte<decltype(k)::value>(v);
              unroll<T>([&](auto t) { sum[t][r] = multiply_add_x<decltype(k)::value>(sum[t][r], value, piece[t]); });
            });
          });
        });
        unroll<T>([&](auto t) {
          const float* x_sum = x.sums + ((row + t) * all_blocks + at) * 2;
          unroll<ROW_VECTORS>([&](auto r) {
            const int i = scale_at + g * TILE_ROWS + r * LANES;
            total[t][r] = multiply_add(total[t][r], sum[t][r], load_floats(s.scale + i));
            if (minimum) {
              const float x_total = GROUPS == 2 ? x_sum[g] : x_sum[0] + x_sum[1];
              total[t][r] = multiply_add(total[t][r], load_floats(s.minimum + i), splat(x_total));
            }
          });
        });
      });
    }
    unroll<T>([&](auto t) { unroll<ROW_VECTORS>([&](auto r) { store_floats(sums + t * TILE_ROWS + r * LANES, total[t][r]); }); });
  }
};

// ---- tiles ----------------------------------------------------------------------------------------------------------

template <template <class, int> class Kernel, class Decoder, class X>
inline void add_chunk(const Weights& w, const uint8_t* codes, GroupScales s, int blocks, const X& x, int64_t first_row,
                      int64_t last_row, int64_t first_block, int64_t all_blocks, float* sums) {
  const int most = Kernel<Decoder, MOST_ROWS>::most_rows(x);
  int64_t row = first_row;
  for (; row + most <= last_row; row += most, sums += most * TILE_ROWS)
    Kernel<Decoder, MOST_ROWS>::run(w, codes, s, blocks, x, row, first_block, all_blocks, sums);
  for (; row < last_row; row++, sums += TILE_ROWS)
    Kernel<Decoder, 1>::run(w, codes, s, blocks, x, row, first_block, all_blocks, sums);
}

template <class Decoder> __attribute__((flatten)) inline void decode_blocks(const uint8_t* codes, const uint8_t* table, int blocks, int32_t bias, uint8_t* out) {
  const Bytes shift = splat_byte(uint8_t(bias));
  for (int b = 0; b < blocks; b++, codes += Decoder::block_bytes, out += Whole::block_bytes)
    unroll<VECTORS>([&](auto v) {
      Bytes w = Decoder::template vector<decltype(v)::value>(codes, table);
      if constexpr (!Decoder::is_signed) w = subtract(w, shift);
      store_bytes(out + v * VECTOR_BYTES, w);
    });
}

inline void write_tile(const float* sums, const float* bias, int64_t n, int64_t tile, int64_t first_row, int64_t last_row, float* y) {
  const int64_t column = tile * TILE_ROWS;
  const int count = int(std::min<int64_t>(TILE_ROWS, n - column));
  for (int64_t row = first_row; row < last_row; row++, sums += TILE_ROWS)
    for (int i = 0; i < count; i++) y[row * n + column + i] = sums[i] + (bias ? bias[column + i] : 0.0f);
}

inline void start_rows(const float* bias, int64_t rows, int64_t columns, float* y, int64_t stride) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) y[r * stride + c] = bias ? bias[c] : 0.0f;
}

inline void copy_tile(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r++) std::copy(from + r * from_stride, from + r * from_stride + columns, to + r * to_stride);
}

template <template <class, int> class Kernel, class Decoder, class X>
void multiply_tiles(const Weights& w, const X& x, const float* bias, float* y, int64_t first, int64_t last) {
  const TileShape shape(w, TILE_ROWS);
  const int64_t all_blocks = shape.blocks;
  if (x.m < MANY_ROWS) {
    alignas(64) float sums[MANY_ROWS * TILE_ROWS];
    alignas(64) uint8_t chunk_bytes[8 * Whole::block_bytes];
    ChunkScales scales;
    Weights decoded = w;
    decoded.bias = 0;
    for (int64_t tile = first; tile < last; tile++) {
      const uint8_t* p = w.stream + tile * shape.tile_bytes;
      std::fill(sums, sums + x.m * TILE_ROWS, 0.0f);
      for (int64_t chunk = 0; chunk < shape.chunks; chunk++) {
        const int blocks = shape.blocks_in(chunk);
        const uint8_t* codes = read_scales(w, p, shape.groups_in(blocks), scales);
        if constexpr (decoded_in_registers<Decoder>) {
          add_chunk<Kernel, Decoder>(w, codes, scales, blocks, x, 0, x.m, chunk * 8, all_blocks, sums);
        } else {
          decode_blocks<Decoder>(codes, w.table, blocks, w.bias, chunk_bytes);
          add_chunk<Kernel, Whole>(decoded, chunk_bytes, scales, blocks, x, 0, x.m, chunk * 8, all_blocks, sums);
        }
        p = codes + size_t(blocks) * Decoder::block_bytes;
      }
      write_tile(sums, bias, w.n, tile, 0, x.m, y);
    }
    return;
  }
  // Rows of x in panels that stay in the second-level cache while all tiles pass over them.
  constexpr int64_t panel = 128;
  Weights decoded = w;
  decoded.bias = 0;
  std::vector<uint8_t> buffer(size_t(all_blocks) * Whole::block_bytes + 64);
  const int64_t full = shape.groups_in(8) * TILE_ROWS;  // scales of a whole chunk
  std::vector<float> scales(size_t(shape.chunks * full)), minimums(has_minimum(w.scales) ? scales.size() : 0);
  uint8_t* bytes = buffer.data() + (-reinterpret_cast<uintptr_t>(buffer.data()) & 63);
  alignas(64) float sums[4 * TILE_ROWS];
  for (int64_t first_row = 0; first_row < x.m; first_row += panel) {
    const int64_t last_row = std::min(x.m, first_row + panel);
    for (int64_t tile = first; tile < last; tile++) {
      const uint8_t* p = w.stream + tile * shape.tile_bytes;
      for (int64_t chunk = 0; chunk < shape.chunks; chunk++) {
        const int blocks = shape.blocks_in(chunk);
        const GroupScales out{scales.data() + chunk * full, minimums.data() + (minimums.empty() ? 0 : chunk * full)};
        const uint8_t* codes = read_scales(w, p, shape.groups_in(blocks), out);
        decode_blocks<Decoder>(codes, w.table, blocks, w.bias, bytes + chunk * 8 * Whole::block_bytes);
        p = codes + size_t(blocks) * Decoder::block_bytes;
      }
      for (int64_t row = first_row; row < last_row; row += 4) {
        const int64_t end = std::min(row + 4, last_row);
        std::fill(sums, sums + 4 * TILE_ROWS, 0.0f);
        add_chunk<Kernel, Whole>(decoded, bytes, {scales.data(), minimums.data()}, int(all_blocks), x, row, end, 0, all_blocks, sums);
        write_tile(sums, bias, w.n, tile, row, end, y);
      }
    }
  }
}

// ---- exactly, for many rows -----------------------------------------------------------------------------------------
//
// A dense product: some chunks of a tile become float32 values, which stay in the first-level cache while all rows of x
// pass over them, eight at a time. x comes transposed, so that one load brings one k of several rows.

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
template <class Decoder> __attribute__((flatten)) inline void decode_values(const Weights& w, const uint8_t* codes, const float* scale, const float* minimum, float* out) {
  const Bytes bias = splat_byte(uint8_t(w.bias));
  unroll<VECTORS>([&](auto v) {
    constexpr int quad = decltype(v)::value / ROW_VECTORS, r = decltype(v)::value % ROW_VECTORS;
    Bytes bytes = Decoder::template vector<decltype(v)::value>(codes, w.table);
    if constexpr (!Decoder::is_signed) bytes = subtract(bytes, bias);
    const int group = w.group == 16 ? quad / 4 * TILE_ROWS : 0;
    const Floats s = load_floats(scale + group + r * LANES);
    unroll<4>([&](auto j) {
      Floats value = multiply(signed_byte<decltype(j)::value>(bytes), s);
      if (minimum) value = add(value, load_floats(minimum + group + r * LANES));
      store_floats(out + (quad * 4 + j) * TILE_ROWS + r * LANES, value);
    });
  });
}

template <class Decoder>
void multiply_many(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
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
          const uint8_t* codes = read_scales(w, w.stream + tile * shape.tile_bytes + c * shape.full_chunk_bytes, shape.groups_in(blocks), scales);
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

// ---- one width of codes for each problem ----------------------------------------------------------------------------

template <template <class, int> class Kernel, class Decoder, class X>
void multiply_decoded(const Weights& w, const X& x, const float* bias, float* y, int64_t first, int64_t last) {
  if constexpr (std::is_same_v<X, ActivationsExact>)
    if (x.transposed) return multiply_many<Decoder>(w, x, bias, y, first, last);
  multiply_tiles<Kernel, Decoder>(w, x, bias, y, first, last);
}

template <template <class, int> class Kernel, class X>
void multiply(const Weights& w, const X& x, const float* bias, float* y, int64_t first, int64_t last) {
  switch (w.codes) {
    case Codes::u2: return multiply_decoded<Kernel, Packed<2>>(w, x, bias, y, first, last);
    case Codes::u3: return multiply_decoded<Kernel, Packed<2, 1>>(w, x, bias, y, first, last);
    case Codes::u4: return multiply_decoded<Kernel, Packed<4>>(w, x, bias, y, first, last);
    case Codes::u5: return multiply_decoded<Kernel, Packed<4, 1>>(w, x, bias, y, first, last);
    case Codes::u6: return multiply_decoded<Kernel, Packed<4, 2>>(w, x, bias, y, first, last);
    case Codes::s8: return multiply_decoded<Kernel, Whole>(w, x, bias, y, first, last);
    case Codes::table: return multiply_decoded<Kernel, Looked>(w, x, bias, y, first, last);
  }
}

}  // namespace BILLFISH_ISA
