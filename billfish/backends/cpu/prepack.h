// Planes to the stream that kernels read. Slow and plain: it is done once for each weight.
#pragma once
#include <cstring>
#include <vector>

#include "problem.h"

namespace billfish {

// One item for each row and each group (or chunk): [n, count] of `size` bytes.
struct Field {
  const uint8_t* data;
  int64_t count;
  int size;
};

// Bits [at, at + width) of the code, as a plane that stacks 8 / width vectors in one byte vector; see decode.h.
inline void put_plane(uint8_t* plane, int v, int byte, int vector_bytes, int width, uint8_t value) {
  const int per_byte = 8 / width;
  plane[v / per_byte * vector_bytes + byte] |= uint8_t(value << (width * (v % per_byte)));
}

inline void pack_tile(const Weights& w, const Level& level, const uint8_t* codes, const std::vector<Field>& chunk_fields,
                      const std::vector<Field>& group_fields, int64_t tile, uint8_t* out) {
  const TileShape shape(w, level.tile_rows);
  const int rows = level.tile_rows, lanes = level.row_lanes, vector_bytes = level.vector_bytes;
  const int row_vectors = rows / lanes, bits = code_bits(w.codes);
  const int low = bits == 8 ? 8 : bits < 4 ? 2 : 4, high = bits - low;
  const uint8_t padding = w.codes == Codes::s8 || w.codes == Codes::table ? 0 : uint8_t(w.bias);
  std::memset(out, 0, shape.tile_bytes);
  auto put_field = [&](const Field& field, int64_t index) {
    for (int r = 0; r < rows; r++, out += field.size) {
      const int64_t row = tile * rows + r;
      if (row < w.n) std::memcpy(out, field.data + (row * field.count + std::min(index, field.count - 1)) * field.size, field.size);
    }
  };
  for (int64_t chunk = 0; chunk < shape.chunks; chunk++) {
    const int blocks = shape.blocks_in(chunk);
    for (const Field& field : chunk_fields) put_field(field, chunk);
    for (int g = 0; g < shape.groups_in(blocks); g++)
      for (const Field& field : group_fields) put_field(field, chunk * (CHUNK / w.group) + g);
    for (int b = 0; b < blocks; b++, out += shape.block_code_bytes)
      for (int v = 0; v < 8 * row_vectors; v++)
        for (int byte = 0; byte < vector_bytes; byte++) {
          const int64_t row = tile * rows + v % row_vectors * lanes + byte / 4;
          const int64_t k = (chunk * 8 + b) * BLOCK + v / row_vectors * 4 + byte % 4;
          uint8_t code = row < w.n && k < w.k ? codes[row * w.k + k] : padding;
          if (w.codes == Codes::s8) code = uint8_t(code + level.signed_bias);
          if (w.codes == Codes::u4 && v % 2) code = uint8_t(code ^ level.high_flip);
          put_plane(out, v, byte, vector_bytes, low, uint8_t(code & ((1 << low) - 1)));
          if (high) put_plane(out + rows * BLOCK * low / 8, v, byte, vector_bytes, high, uint8_t(code >> low));
        }
  }
}

}  // namespace billfish
