// Codes and scales to the stream that kernels read, done once for each weight.
#pragma once
#include <cstring>
#include <vector>

#include "problem.h"

namespace billfish {

// One item of `size` bytes for each row and each group (or chunk), `count` of them in a row.
struct Field {
  const uint8_t* data;
  int64_t row_stride, item_stride, count;
  int size;
};

// Bits [from, from + WIDTH) of the codes of a block, [rows][32], as a plane that stacks 8 / WIDTH vectors in one byte vector;
// see decode.h. Four codes of a row are one word, so that a shift moves all of them; `flip`
// inverts bits of the result.
template <int WIDTH>
void put_plane(const uint8_t* codes, int from, int row_vectors, int lanes, uint32_t flip, uint8_t* plane) {
  constexpr int per_byte = 8 / WIDTH;
  constexpr uint32_t mask = 0x01010101u * ((1u << WIDTH) - 1);
  for (int v = 0; v < 8 * row_vectors; v += per_byte)
    for (int lane = 0; lane < lanes; lane++, plane += 4) {
      uint32_t stacked = flip;
      for (int i = 0; i < per_byte; i++) {
        uint32_t word;
        std::memcpy(&word, codes + ((v + i) % row_vectors * lanes + lane) * BLOCK + (v + i) / row_vectors * 4, 4);
        stacked ^= (word >> from & mask) << (WIDTH * i);
      }
      std::memcpy(plane, &stacked, 4);
    }
}

// read_codes(row, block, out) writes the 32 codes of one block of a row, `padding` where the row has ended.
template <class ReadCodes>
void pack_tile(const Weights& w, const Level& level, ReadCodes read_codes, uint8_t padding, const std::vector<Field>& chunk_fields,
               const std::vector<Field>& group_fields, int64_t tile, uint8_t* out) {
  const TileShape shape(w, level.tile_rows);
  const int rows = level.tile_rows, lanes = level.row_lanes;
  const int row_vectors = rows / lanes, bits = code_bits(w.codes);
  const int low = bits == 8 ? 8 : bits < 4 ? 2 : 4, high = bits - low;
  const uint8_t bias = w.codes == Codes::s8 ? uint8_t(level.signed_bias) : 0;
  const uint32_t flip = w.codes == Codes::u4 ? 0x10101010u * uint32_t(level.high_flip) : 0;  // every other vector's codes
  std::vector<uint8_t> codes(size_t(rows) * BLOCK, uint8_t(padding + bias));
  std::memset(out, 0, shape.tile_bytes);
  auto put_field = [&](const Field& field, int64_t index) {
    for (int r = 0; r < rows; r++, out += field.size) {
      const int64_t row = tile * rows + r, item = std::min(index, field.count - 1);
      if (row < w.n) std::memcpy(out, field.data + row * field.row_stride + item * field.item_stride, field.size);
    }
  };
  for (int64_t chunk = 0; chunk < shape.chunks; chunk++) {
    const int blocks = shape.blocks_in(chunk);
    for (const Field& field : chunk_fields) put_field(field, chunk);
    for (int b = 0; b < blocks; b++, out += shape.block_code_bytes) {
      if (b % shape.span == 0)
        for (int g = 0; g < shape.groups_in_span(); g++)
          for (const Field& field : group_fields) put_field(field, (chunk * 8 + b) * BLOCK / w.group + g);
      for (int r = 0; r < rows && tile * rows + r < w.n; r++) {
        uint8_t* row = codes.data() + r * BLOCK;
        read_codes(tile * rows + r, chunk * 8 + b, row);
        for (int i = 0; i < BLOCK; i++) row[i] = uint8_t(row[i] + bias);
      }
      uint8_t* more = out + rows * BLOCK * low / 8;
      if (low == 8) put_plane<8>(codes.data(), 0, row_vectors, lanes, flip, out);
      if (low == 4) put_plane<4>(codes.data(), 0, row_vectors, lanes, flip, out);
      if (low == 2) put_plane<2>(codes.data(), 0, row_vectors, lanes, flip, out);
      if (high == 2) put_plane<2>(codes.data(), low, row_vectors, lanes, 0, more);
      if (high == 1) put_plane<1>(codes.data(), low, row_vectors, lanes, 0, more);
    }
  }
}

}  // namespace billfish
