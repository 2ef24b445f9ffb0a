// Integer GEMV and skinny GEMM straight from the stream, by the kernels of stream8.h; and up to how many rows of x they run.
#pragma once
#include "gemm/held8.h"
#include "gemm/wide.h"

namespace BILLFISH_ISA {

using billfish::EXACT_DIGITS;

using FewKernel = void (*)(const Weights&, Blocks, const Activations8&, int64_t, float*);

// For nibbles, and for all other codes: each of them about half of what is to compile, and so in a file of its own.
FewKernel few_kernel_of_nibbles(Scales scales, Reach reach);
FewKernel few_kernel_of_others(Codes codes, Scales scales, Reach reach);

inline FewKernel few_kernel(const Weights& w, int32_t span) {
  if constexpr (FEW_FROM_STREAM) return w.codes == Codes::u4 ? few_kernel_of_nibbles(w.scales, reach_of(w, span)) : few_kernel_of_others(w.codes, w.scales, reach_of(w, span));
  else return nullptr;
}

// Up to so many rows, one at a time is quicker than several. With two digits there is as much to multiply as to decode, and nibbles
// and bytes, which hardly need decoding, may be decoded again for every row.
inline int64_t one_by_one(const Weights& w, int32_t digits) {
  return digits == 1 ? TAILS && w.codes == Codes::u4 ? 1 : 2 : w.codes == Codes::u4 || w.codes == Codes::s8 ? ONE_BY_ONE_16 : std::min(ONE_BY_ONE_16, 3);
}

// Whether weights go through a buffer for this many rows. Sums over whole groups leave so little to do beside dot products that codes are
// decoded again for every four rows up to more of them.
inline bool buffered(const Weights& w, int64_t m, int32_t digits, int32_t span) {
  if (!few_kernel(w, span)) return true;
  if (is_held(w, m, digits, span)) return false;
  if (digits != 1) return m >= MANY_ROWS || (digits == 2 && m > one_by_one(w, digits));
  const bool packed = w.codes != Codes::s8 && w.codes != Codes::table && w.codes != Codes::small_table;
  return m >= (span > 1 ? GROUP_BUFFER_ROWS : packed ? PACKED_BUFFER_ROWS : BUFFER_ROWS);
}

// Whether exact products of few rows are made here, in four digits.
inline bool exact_in_digits(const Weights& w, int64_t m) { return EXACT_IN_DIGITS && !buffered(w, m, EXACT_DIGITS, 1); }

// How many rows of x go together, for this many of them.
inline int32_t lanes_of_x(const Weights& w, int64_t m, int32_t digits, int32_t span) {
  if (is_held(w, m, digits, span)) return held_lanes(m);
  if (buffered(w, m, digits, span)) return m <= BUFFERED_ONE_BY_ONE ? 1 : MANY_TOGETHER;
  return digits == EXACT_DIGITS || m <= one_by_one(w, digits) ? 1 : X_ROWS;
}

inline void multiply_few8(const Weights& w, const Activations8& x, const float* bias, float* y, int64_t first, int64_t last) {
  const TileShape shape(w, TILE_ROWS);
  const FewKernel kernel = few_kernel(w, x.span);
  auto add = [&](int64_t tile, int64_t chunk, int64_t blocks, float* sums) {
    Blocks run = blocks_in_stream(w, shape, tile, chunk, blocks);
    run.ahead = run.stream + shape.tile_bytes;
    for (int64_t row = 0; row < x.m; row += x.lanes) kernel(w, run, x, row, sums + row * TILE_ROWS);
  };
  if (x.lanes == 1) {
    for (int64_t tile = first; tile < last; tile++) {
      alignas(64) float sums[MANY_ROWS * TILE_ROWS];
      std::fill(sums, sums + x.m * TILE_ROWS, 0.0f);
      add(tile, 0, shape.blocks, sums);
      write_tile(sums, w.factor, x.power, bias, w.n, tile, 0, x.m, y);
      if (x.wide) add_wide_blocks(w, shape, x, tile, y);
    }
    return;
  }
  // Several rows of x, slice by slice: what a slice of x takes stays in the first-level cache while all tiles pass over it. Up to four rows
  // leave room for longer slices, which are read at a better rate.
  const int64_t slice = x.bundles() * x.lanes <= X_ROWS ? SLICE * SLICES_OF_FEW : SLICE;
  const int64_t each = x.bundles() * x.lanes * TILE_ROWS;
  Room room;
  float* sums = room.take((last - first) * each);
  std::fill_n(sums, (last - first) * each, 0.0f);
  each_slice(shape, slice, [&](int64_t chunk, int64_t blocks) {
    for (int64_t tile = first; tile < last; tile++) add(tile, chunk, blocks, sums + (tile - first) * each);
  });
  // Row by row, so that y is written line after line.
  for (int64_t row = 0; row < x.m; row++)
    for (int64_t tile = first; tile < last; tile++) write_tile(sums + (tile - first) * each + row * TILE_ROWS, w.factor, x.power, bias, w.n, tile, row, row + 1, y);
}

}  // namespace BILLFISH_ISA
