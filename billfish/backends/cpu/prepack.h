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

// Packs the codes of one block, [rows][32], as decode.h has them. Four codes of a row are one word, so that a shift moves all of them.
struct BlockPacker {
  const uint8_t* codes;
  int row_vectors, lanes;

  uint32_t word(int vector, int lane) const {
    uint32_t four;
    std::memcpy(&four, codes + (vector % row_vectors * lanes + lane) * BLOCK + vector / row_vectors * 4, 4);
    return four;
  }
  // `bytes` of them for every `step` vectors and each lane: f(number of the first vector, which byte, lane).
  template <class F> uint8_t* put(int step, int bytes, uint8_t* out, F f) const {
    for (int v = 0; v < 8 * row_vectors; v += step)
      for (int i = 0; i < bytes; i++)
        for (int lane = 0; lane < lanes; lane++, out += 4) {
          const uint32_t four = f(v, i, lane);
          std::memcpy(out, &four, 4);
        }
    return out;
  }
  // Bits [from, from + WIDTH) of every STEPth code, FIRST of all, 8 / WIDTH in a byte; `flip` inverts bits of the result.
  template <int WIDTH, int FIRST = 0, int STEP = 1> uint8_t* put_plane(int from, uint32_t flip, uint8_t* out) const {
    return put(8 / WIDTH * STEP, 1, out, [&](int v, int, int lane) {
      uint32_t stacked = flip;
      for (int i = 0; i < 8 / WIDTH; i++) stacked ^= (word(v + FIRST + i * STEP, lane) >> from & 0x01010101u * ((1u << WIDTH) - 1)) << (WIDTH * i);
      return stacked;
    });
  }
  void put_fives(uint8_t* out) const {
    out = put(2, 1, out, [&](int v, int, int lane) { return word(v, lane) | (word(v + 1, lane) & 0x07070707u) << 5; });
    put_plane<2, 1, 2>(3, 0, out);
  }
  // Six bits, of one code or (PAIR = 2) of two codes of three bits.
  template <int PAIR> void put_sixes(uint8_t* out) const {
    auto six = [&](int v, int lane) { return PAIR == 1 ? word(v, lane) : word(2 * v, lane) | word(2 * v + 1, lane) << 3; };
    put(4 * PAIR, 3, out, [&](int v, int i, int lane) {
      return six(v / PAIR + i, lane) | (six(v / PAIR + 3, lane) >> (4 - 2 * i) & 0x03030303u) << 6;
    });
  }
  void pack(Codes kind, uint32_t high_flip, uint8_t* out) const {
    switch (kind) {
      case Codes::u2: put_plane<2>(0, 0, out); break;
      case Codes::u3: put_sixes<2>(out); break;
      case Codes::u4: put_plane<4>(0, 0x10101010u * high_flip, out); break;  // every other vector's codes
      case Codes::table: put_plane<4>(0, 0, out); break;
      case Codes::u5: put_fives(out); break;
      case Codes::u6: put_sixes<1>(out); break;
      case Codes::s8: put_plane<8>(0, 0, out); break;
    }
  }
};

// read_codes(row, block, out) writes the 32 codes of one block of a row, `padding` where the row has ended.
template <class ReadCodes>
void pack_tile(const Weights& w, const Level& level, ReadCodes read_codes, uint8_t padding, const std::vector<Field>& chunk_fields,
               const std::vector<Field>& group_fields, int64_t tile, uint8_t* out) {
  const TileShape shape(w, level.tile_rows);
  const int rows = level.tile_rows, lanes = level.row_lanes;
  const uint8_t bias = w.codes == Codes::s8 ? uint8_t(level.signed_bias) : 0;
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
      BlockPacker{codes.data(), rows / lanes, lanes}.pack(w.codes, uint32_t(level.high_flip), out);
    }
  }
}

}  // namespace billfish
