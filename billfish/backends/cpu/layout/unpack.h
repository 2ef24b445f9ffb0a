// The stream that kernels read, back to codes and scales: the inverse of prepack.h, for whoever holds nothing but the stream.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "layout/problem.h"

namespace billfish {

// Where items of `size` bytes go, one for each row and each group (or chunk), `count` of them in a row.
struct OutField {
  uint8_t* data;
  int64_t count;
  int size;
};

// The codes of one block of 32, as BlockPacker::pack of prepack.h wrote them.
struct BlockUnpacker {
  uint8_t* codes;  // [rows][CHUNK], from this block on; zeros
  int row_vectors, lanes;
  int row_shift = __builtin_ctz(unsigned(row_vectors));

  void add(int vector, int lane, uint32_t bits) const {
    uint8_t* at = codes + ((vector & (row_vectors - 1)) * lanes + lane) * CHUNK + (vector >> row_shift) * 4;
    uint32_t four;
    std::memcpy(&four, at, 4);
    four |= bits;
    std::memcpy(at, &four, 4);
  }
  // As BlockPacker::put: f(number of the first vector, which byte, lane, four bytes of the stream).
  template <class F> const uint8_t* each(int step, int bytes, const uint8_t* from, F f) const {
    for (int v = 0; v < 8 * row_vectors; v += step)
      for (int i = 0; i < bytes; i++)
        for (int lane = 0; lane < lanes; lane++, from += 4) {
          uint32_t four;
          std::memcpy(&four, from, 4);
          f(v, i, lane, four);
        }
    return from;
  }
  template <int WIDTH, int FIRST = 0, int STEP = 1> const uint8_t* fields(int to, uint32_t flip, const uint8_t* from) const {
    return each(8 / WIDTH * STEP, 1, from, [&](int v, int, int lane, uint32_t four) {
      for (int i = 0; i < 8 / WIDTH; i++) add(v + FIRST + i * STEP, lane, ((four ^ flip) >> (WIDTH * i) & 0x01010101u * ((1u << WIDTH) - 1)) << to);
    });
  }
  void fives(const uint8_t* from) const {
    from = each(2, 1, from, [&](int v, int, int lane, uint32_t four) { add(v, lane, four & 0x1f1f1f1fu), add(v + 1, lane, four >> 5 & 0x07070707u); });
    fields<2, 1, 2>(3, 0, from);
  }
  template <int PAIR> void sixes(const uint8_t* from) const {
    auto six = [&](int v, int lane, uint32_t bits) {
      if (PAIR == 1) add(v, lane, bits);
      else add(2 * v, lane, bits & 0x07070707u), add(2 * v + 1, lane, bits >> 3 & 0x07070707u);
    };
    each(4 * PAIR, 3, from, [&](int v, int i, int lane, uint32_t four) {
      six(v / PAIR + i, lane, four & 0x3f3f3f3fu);
      six(v / PAIR + 3, lane, (four >> 6 & 0x03030303u) << (4 - 2 * i));
    });
  }
  void unpack(Codes kind, uint32_t high_flip, const uint8_t* from) const {
    switch (kind) {
      case Codes::u2: fields<2>(0, 0, from); break;
      case Codes::u3: sixes<2>(from); break;
      case Codes::u4: fields<4>(0, 0x10101010u * high_flip, from); break;
      case Codes::table: case Codes::small_table: case Codes::floats: fields<4>(0, 0, from); break;
      case Codes::u5: fives(from); break;
      case Codes::u6: sixes<1>(from); break;
      case Codes::s8: case Codes::e4m3: fields<8>(0, 0, from); break;
      case Codes::f32: case Codes::f16: case Codes::bf16: break;
    }
  }
};

// Codes [n, k] with `flip` inverted bits, and fields [n, count, size], of the rows of one tile.
inline void unpack_tile(const Weights& w, const Level& level, const uint8_t* in, uint8_t flip, const std::vector<OutField>& chunk_fields,
                        const std::vector<OutField>& group_fields, int64_t tile, uint8_t* codes_out) {
  const TileShape shape(w, level.tile_rows);
  const int rows = level.tile_rows, lanes = level.row_lanes;
  const uint8_t bias = w.codes == Codes::s8 ? uint8_t(level.signed_bias) : 0;
  const int64_t first_row = tile * rows, count = std::min<int64_t>(rows, w.n - first_row);
  std::vector<uint8_t> codes(size_t(rows) * CHUNK);
  auto take_field = [&](const OutField& field, int64_t index) {
    if (index < field.count)  // those behind the last repeat it
      for (int64_t r = 0; r < count; r++)
        std::memcpy(field.data + ((first_row + r) * field.count + index) * field.size, in + r * field.size, size_t(field.size));
    in += rows * field.size;
  };
  for (int64_t chunk = 0; chunk < shape.chunks; chunk++) {
    std::fill(codes.begin(), codes.end(), uint8_t(0));
    for (const OutField& field : chunk_fields) take_field(field, chunk);
    for (int b = 0; b < shape.blocks_in(chunk); b++, in += shape.block_code_bytes) {
      if (b % shape.span == 0)
        for (int g = 0; g < shape.groups_in_span(); g++)
          for (const OutField& field : group_fields) take_field(field, (chunk * 8 + b) * BLOCK / w.group + g);
      BlockUnpacker{codes.data() + b * BLOCK, rows / lanes, lanes}.unpack(w.codes, uint32_t(level.high_flip), in);
    }
    const int64_t start = chunk * CHUNK, width = std::min<int64_t>(CHUNK, w.k - start);
    for (int64_t r = 0; r < count; r++)
      for (int64_t i = 0; i < width; i++) codes_out[(first_row + r) * w.k + start + i] = uint8_t(codes[size_t(r * CHUNK + i)] - bias) ^ flip;
  }
}

}  // namespace billfish
