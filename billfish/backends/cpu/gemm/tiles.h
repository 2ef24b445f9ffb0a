// Tiles of W in the stream, slice by slice, and rows of x in panels: what products in integers have in common.
#pragma once
#include <algorithm>

#include "gemm/scales.h"
#include "simd/room.h"

namespace BILLFISH_ISA {

using billfish::Activations8;
using billfish::Codes;
using billfish::MANY_ROWS;
using billfish::RowOfX;
using billfish::TileShape;

constexpr int X_ROWS = 4;  // rows of x that a kernel takes at a time, unless it takes one, or MANY_TOGETHER of many

// What one integer sum goes over: half a block for groups of 16, a block, or the blocks of x that share a scale, `span` of them.
enum class Reach { half, block, blocks };
inline Reach reach_of(const Weights& w, int span) { return span > 1 ? Reach::blocks : w.group == 16 ? Reach::half : Reach::block; }

// Consecutive blocks of a tile, from the beginning of a chunk on. Before each span and each chunk lie so many bytes that are no
// codes: scales, or nothing in a buffer. `ahead` is what will be needed next.
struct Blocks {
  const uint8_t* stream;
  int64_t first, count;
  int span;
  size_t span_header, chunk_header;
  const uint8_t* ahead = nullptr;
};

// Whether sums start at SUM_START. Float32 scales may be anything, infinite too; the offset of scale_sum, which is for one digit, is
// exact and finite for all others. Sums of two digits together are too large.
inline bool magic_sums(const Weights& w, int digits) { return digits == 2 || (digits == 1 && w.scales != Scales::f32 && w.scales != Scales::f32_minimum); }

// power: what rows of x were divided by, or null. The factor comes first: it is below 1 where sums are larger than y.
inline void write_tile(const float* sums, float factor, const float* power, const float* bias, int64_t n, int64_t tile, int64_t first_row, int64_t last_row, float* y) {
  const int64_t column = tile * TILE_ROWS;
  const int count = int(std::min<int64_t>(TILE_ROWS, n - column));
  for (int64_t row = first_row; row < last_row; row++, sums += TILE_ROWS) {
    const float times = power ? power[row] : 1.0f;
    float* out = y + row * n + column;
    if (count == TILE_ROWS)  // nearly always, so in vectors
      for (int i = 0; i < TILE_ROWS; i += LANES)
        store_floats(out + i, add(multiply(multiply(load_floats(sums + i), splat(factor)), splat(times)), bias ? load_floats(bias + column + i) : splat(0)));
    else
      for (int i = 0; i < count; i++) out[i] = sums[i] * factor * times + (bias ? bias[column + i] : 0.0f);
  }
}

// Chunks that are handled together: what they become when decoded takes 16 KiB, a quarter of a first-level cache.
constexpr int SLICE = std::max(1, 16384 / (8 * Whole::block_bytes));

// Runs of chunks, `slice` at a time, and up to `more` in the last one: f(number of the first chunk, blocks in all).
template <class F> void each_slice(const TileShape& shape, int64_t slice, F&& f, int64_t more = 0) {
  for (int64_t chunk = 0, count; chunk < shape.chunks; chunk += count) {
    count = shape.chunks - chunk <= slice + more ? shape.chunks - chunk : slice;
    f(chunk, std::min(count * 8, shape.blocks - chunk * 8));
  }
}

inline Blocks blocks_in_stream(const Weights& w, const TileShape& shape, int64_t tile, int64_t chunk, int64_t blocks) {
  const uint8_t* at = w.stream + tile * shape.tile_bytes + chunk * shape.full_chunk_bytes;
  return {at, chunk * 8, blocks, shape.span, shape.span_header, shape.chunk_header};
}

// Many rows of x, in panels of up to `panel_bytes` of codes. For every slice of a tile, decode(shape, run) may put its blocks into a buffer and run to it;
// then add(run, first_row, last_row, sums) adds them times these rows of x to sums [rows][TILE_ROWS]. There is room for whole bundles.
// more: see each_slice.
template <class Decode, class Add>
void multiply_slices(const Weights& w, const Activations8& x, const float* bias, float* y, int64_t first, int64_t last, Decode decode, Add add, int64_t panel_bytes, int64_t more = 0) {
  // At least 32 rows share the decoding of a slice, which is then 1/8 of it for every four. The float32 sums of 256 rows take 16 KiB for a tile
  // of 16, as much of the first-level cache as a decoded slice.
  const int64_t together = std::max<int64_t>(MANY_TOGETHER, x.lanes), most = std::clamp<int64_t>(panel_bytes / std::max<int64_t>(w.k * x.digits, 1) / together * together, 32, 256);
  const int64_t panel = std::min(most, (x.m + together - 1) / together * together);
  const TileShape shape(w, TILE_ROWS);
  Room room;
  float* sums = room.take(panel * TILE_ROWS);
  for (int64_t first_row = 0; first_row < x.m; first_row += panel) {
    const int64_t last_row = std::min(x.m, first_row + panel);
    for (int64_t tile = first; tile < last; tile++) {
      std::fill_n(sums, panel * TILE_ROWS, 0.0f);
      each_slice(shape, SLICE, [&](int64_t chunk, int64_t blocks) {
        Blocks run = blocks_in_stream(w, shape, tile, chunk, blocks);
        decode(shape, run);
        run.ahead = blocks_in_stream(w, shape, tile, chunk + SLICE, 0).stream;
        add(run, first_row, last_row, sums);
      }, more);
      write_tile(sums, w.factor, x.power, bias, w.n, tile, first_row, last_row, y);
    }
  }
}

// The same with add(run, row, sums) for the rows of x [row, row + x.lanes).
template <class Decode, class Add>
void multiply_panels(const Weights& w, const Activations8& x, const float* bias, float* y, int64_t first, int64_t last, Decode decode, Add add) {
  // Panels stay in the second-level cache while all tiles pass over them: 512 KiB of codes are half of the 1 MiB of a Neoverse-N1.
  const auto add_rows = [&](Blocks& run, int64_t first_row, int64_t last_row, float* sums) {
    for (int64_t row = first_row; row < last_row; row += x.lanes) add(run, row, sums + (row - first_row) * TILE_ROWS);
  };
  multiply_slices(w, x, bias, y, first, last, decode, add_rows, 1 << 19);
}

}  // namespace BILLFISH_ISA
