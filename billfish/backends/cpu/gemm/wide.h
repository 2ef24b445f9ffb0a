// Wide blocks of x, of which four digits do not hold every value (activations/quantize.h): what stays float32 is multiplied here.
#pragma once
#include <cstring>

#include "gemm/tiles.h"

namespace BILLFISH_ISA {

// The codes of a block, a byte each: what is done with them then is compiled once for all decoders.
template <class Decoder> __attribute__((flatten, noinline)) void decode_block(const Weights& w, const uint8_t* codes, uint8_t* out) {
  const Table table(w);
  unroll<VECTORS>([&](auto v) INLINED { store_bytes(out + v * VECTOR_BYTES, Decoder::template code<decltype(v)::value>(codes, table.values)); });
}

using DecodeBlock = void (*)(const Weights&, const uint8_t*, uint8_t*);
struct BlockDecoder {
  DecodeBlock decode;
  int code_bias;
  size_t block_bytes;
};
inline BlockDecoder block_decoder(const Weights& w) {
  BlockDecoder found{};
  with_decoder(w.codes, [&](auto decoder) { found = {decode_block<decltype(decoder)>, decltype(decoder)::code_bias(w.bias), size_t(decltype(decoder)::block_bytes)}; });
  return found;
}

// sums [TILE_ROWS] += x [32] times a block of a tile, in float32. Most x of most wide blocks are 0, and four of them are left out together.
// A block is added up by itself, so that its terms are rounded as parts of its own sum and not of all K.
inline void add_wide_block(const Weights& w, const BlockDecoder& decoder, const TileShape& shape, int64_t tile, int64_t block, const float* x, float* sums) {
  const Blocks run = blocks_in_stream(w, shape, tile, block / 8, block % 8 + 1);  // the last of these
  GroupScales scales[16];
  read_scales<false>(w, shape, run.stream, run.count, scales, 0, w.factor);
  const int64_t before = run.count - 1, span = before / run.span;
  alignas(64) uint8_t codes[VECTORS * VECTOR_BYTES];
  decoder.decode(w, run.stream + run.chunk_header + size_t(span + 1) * run.span_header + size_t(before) * decoder.block_bytes, codes);
  const Floats offset = byte_offset(decoder.code_bias);
  const bool minimum = has_minimum(w.scales);
  for (int r = 0; r < ROW_VECTORS; r++) {
    Floats total = splat(0);
    for (int quad = 0; quad < 8; quad++) {
      const float* four = x + quad * 4;
      if (four[0] == 0 && four[1] == 0 && four[2] == 0 && four[3] == 0) continue;
      const GroupScales& group = scales[span * shape.groups_in_span() + (w.group == 16 ? quad / 4 : 0)];
      const Bytes bytes = load_bytes(codes + (quad * ROW_VECTORS + r) * VECTOR_BYTES);
      const Floats scale = load_floats(group.scale + r * LANES);
      unroll<4>([&](auto k) INLINED {
        Floats value = multiply(byte_to_floats<decltype(k)::value>(bytes, offset), scale);
        if (minimum) value = add(value, load_floats(group.minimum + r * LANES));
        total = multiply_add(total, value, splat(four[k]));
      });
    }
    store_floats(sums + r * LANES, add(load_floats(sums + r * LANES), total));
  }
}

// Adds the products of a tile with what is not in digits to y [m, n], which has all others.
inline void add_wide_blocks(const Weights& w, const TileShape& shape, const Activations8& x, int64_t tile, float* y) {
  const int count = int(std::min<int64_t>(TILE_ROWS, w.n - tile * TILE_ROWS));
  const BlockDecoder decoder = block_decoder(w);
  for (int64_t row = 0; row < x.m; row++) {
    const uint8_t *first = x.wide + row * x.blocks, *end = first + x.blocks;
    const auto next = [&](const uint8_t* from) { return static_cast<const uint8_t*>(std::memchr(from, 1, size_t(end - from))); };
    const uint8_t* at = next(first);
    if (!at) continue;
    alignas(64) float sums[TILE_ROWS] = {};
    for (; at; at = next(at + 1)) add_wide_block(w, decoder, shape, tile, at - first, x.rest + (row * x.blocks + (at - first)) * 32, sums);
    for (int i = 0; i < count; i++) y[row * w.n + tile * TILE_ROWS + i] += sums[i];
  }
}

}  // namespace BILLFISH_ISA
