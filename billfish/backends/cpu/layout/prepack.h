// Codes and scales to the stream that kernels read, done once for each weight.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "layout/problem.h"

namespace billfish {

// One item of `size` bytes for each row and each group (or chunk), `count` of them in a row.
struct Field {
  const uint8_t* data;
  int64_t row_stride, item_stride, count;
  int size;
  int64_t first_row = 0;  // which row data begins with
};

// Packs the codes of one block of 32, of rows of a chunk, as gemm/decode.h has them. Four codes of a row are one word, so that a shift moves
// all of them.
struct BlockPacker {
  const uint8_t* codes;  // [rows][CHUNK], from this block on
  int row_vectors, lanes;  // powers of two, of which the first one is needed as a shift: divisions would take most of the time
  int row_shift = __builtin_ctz(unsigned(row_vectors));

  uint32_t word(int vector, int lane) const {
    uint32_t four;
    std::memcpy(&four, codes + ((vector & (row_vectors - 1)) * lanes + lane) * CHUNK + (vector >> row_shift) * 4, 4);
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
  template <int WIDTH, int FIRST = 0, int STEP = 1> uint8_t* put_fields(int from, uint32_t flip, uint8_t* out) const {
    return put(8 / WIDTH * STEP, 1, out, [&](int v, int, int lane) {
      uint32_t stacked = flip;
      for (int i = 0; i < 8 / WIDTH; i++) stacked ^= (word(v + FIRST + i * STEP, lane) >> from & 0x01010101u * ((1u << WIDTH) - 1)) << (WIDTH * i);
      return stacked;
    });
  }
  void put_fives(uint8_t* out) const {
    out = put(2, 1, out, [&](int v, int, int lane) { return word(v, lane) | (word(v + 1, lane) & 0x07070707u) << 5; });
    put_fields<2, 1, 2>(3, 0, out);
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
      case Codes::u2: put_fields<2>(0, 0, out); break;
      case Codes::u3: put_sixes<2>(out); break;
      case Codes::u4: put_fields<4>(0, 0x10101010u * high_flip, out); break;  // every other vector's codes
      case Codes::table: case Codes::small_table: case Codes::floats: put_fields<4>(0, 0, out); break;
      case Codes::u5: put_fives(out); break;
      case Codes::u6: put_sixes<1>(out); break;
      case Codes::s8: case Codes::e4m3: put_fields<8>(0, 0, out); break;
      case Codes::f32: case Codes::f16: case Codes::bf16: break;  // no codes: see pack_plain_tile
    }
  }
};

// `count` codes from k = first on of a row of words, as billfish/core/formats/word_packing.py has them: [K * bits / 32, N].
inline void read_words(const Storage& s, int64_t row, int64_t first, int64_t count, uint8_t* out) {
  const int bits = s.code_field[0].bits, per_word = 32 / bits;
  for (int64_t i = 0; i < count; i += per_word) {
    uint32_t word;
    std::memcpy(&word, s.bytes + ((first + i) / per_word * s.n + row) * 4, 4);
    if (bits == 8) {
      std::memcpy(out + i, &word, 4);
      continue;
    }
    uint64_t eight = word;  // halves apart, then bytes, then nibbles
    eight = (eight | eight << 16) & 0x0000ffff0000ffffu;
    eight = (eight | eight << 8) & 0x00ff00ff00ff00ffu;
    eight = (eight | eight << 4) & 0x0f0f0f0f0f0f0f0fu;
    std::memcpy(out + i, &eight, 8);
  }
}

// Of weights that are packed from storage: writes the codes of a chunk of a row as kernels have them, `padding` where the row has ended.
struct CodeReader {
  const Level& level;
  const Storage& storage;
  bool words;  // else blocks
  Codes kind;
  uint8_t padding;

  CodeReader(const Level& level, const Storage& storage, bool words, const Weights& w)
      : level(level), storage(storage), words(words), kind(w.codes), padding(counts(kind) ? uint8_t(w.bias) : 0) {}

  // Whether a code is its value and the bias.
  static bool counts(Codes kind) { return kind != Codes::s8 && kind != Codes::table && kind != Codes::small_table; }

  void operator()(int64_t row, int64_t chunk, uint8_t* to) const {
    const Storage& s = storage;
    const int64_t start = chunk * CHUNK, count = std::min<int64_t>(CHUNK, s.k - start);
    if (words) read_words(s, row, start, count, to);
    else {
      const int64_t blocks = count / s.block, whole = blocks * s.block;
      level.read_codes(s, row, start / s.block, blocks, to);
      if (whole < count) read_rest(row, start + whole, count - whole, to + whole);
    }
    if (kind == Codes::s8 && s.flip == 0)  // bytes that are not signed
      for (int64_t i = 0; i < count; i++) to[i] ^= 0x80;
    std::fill(to + count, to + CHUNK, padding);
  }

  // Rows of nibbles or bytes may end with less than a block, and behind the last of them nothing may be read.
  void read_rest(int64_t row, int64_t first, int64_t count, uint8_t* to) const {
    uint8_t bytes[BLOCK] = {}, codes[BLOCK];
    Storage alone = storage;
    alone.bytes = bytes;
    std::copy_n(storage.bytes + row * storage.row_bytes + first / storage.block * storage.block_bytes, count * storage.code_field[0].bits / 8, bytes);
    level.read_codes(alone, 0, 0, 1, codes);
    std::copy_n(codes, count, to);
  }
};

inline void pack_tile(const Weights& w, const CodeReader& read_codes, const std::vector<Field>& chunk_fields, const std::vector<Field>& group_fields, int64_t tile, uint8_t* out) {
  const Level& level = read_codes.level;
  const TileShape shape(w, level.tile_rows);
  const int rows = level.tile_rows, lanes = level.row_lanes;
  const uint8_t bias = w.codes == Codes::s8 ? uint8_t(level.signed_bias) : 0;
  std::vector<uint8_t> codes(size_t(rows) * CHUNK, uint8_t(read_codes.padding + bias));
  std::memset(out, 0, shape.tile_bytes);
  const int64_t first_row = tile * rows, count = std::min<int64_t>(rows, w.n - first_row);
  auto put_field = [&](const Field& field, int64_t index) {
    const uint8_t* from = field.data + (first_row - field.first_row) * field.row_stride + std::min(index, field.count - 1) * field.item_stride;
    // A memcpy of one byte or two is an instruction, and of any size a call.
    const auto put = [&](auto size) {
      for (int64_t r = 0; r < count; r++) std::memcpy(out + r * size, from + r * field.row_stride, size);
    };
    if (field.size == 1) put(std::integral_constant<size_t, 1>{});
    else if (field.size == 2) put(std::integral_constant<size_t, 2>{});
    else put(size_t(field.size));
    out += rows * field.size;
  };
  for (int64_t chunk = 0; chunk < shape.chunks; chunk++) {
    for (int64_t r = 0; r < count; r++) {
      uint8_t* row = codes.data() + r * CHUNK;
      read_codes(first_row + r, chunk, row);
      for (int i = 0; bias != 0 && i < CHUNK; i++) row[i] = uint8_t(row[i] + bias);
    }
    for (const Field& field : chunk_fields) put_field(field, chunk);
    for (int b = 0; b < shape.blocks_in(chunk); b++, out += shape.block_code_bytes) {
      if (b % shape.span == 0)
        for (int g = 0; g < shape.groups_in_span(); g++)
          for (const Field& field : group_fields) put_field(field, (chunk * 8 + b) * BLOCK / w.group + g);
      BlockPacker{codes.data() + b * BLOCK, rows / lanes, lanes}.pack(w.codes, uint32_t(level.high_flip), out);
    }
  }
}

// The same of unquantized weights [n, k], where Bits are those of a number: blocks [32 k][rows of the tile], zeros where W has ended.
template <class Bits> inline void pack_plain_tile(const Weights& w, const uint8_t* numbers, int rows, int64_t tile, uint8_t* out) {
  constexpr int64_t size = sizeof(Bits);
  const int64_t first = tile * rows, count = std::min<int64_t>(rows, w.n - first), block_bytes = BLOCK * rows * size;
  for (int64_t k = 0; k < w.k; k += BLOCK, out += block_bytes) {
    const int64_t end = std::min<int64_t>(BLOCK, w.k - k);
    if (count < rows || end < BLOCK) std::memset(out, 0, size_t(block_bytes));
    for (int64_t r = 0; r < count; r++)  // files may have numbers anywhere, so they are copied as bytes
      for (int64_t i = 0; i < end; i++) std::memcpy(out + (i * rows + r) * size, numbers + ((first + r) * w.k + k + i) * size, size_t(size));
  }
}

// Whether blocks are as long as a chunk, and have small integers for their groups below a float16 for all of them.
inline bool has_two_levels(const Storage& s) {
  return s.scales >= Storage::six_bit_pairs;
}

// These integers for rows [first, last), a byte each as kernels have them (see gemm/scales.h), with a field for each kind; `bytes` keeps them.
// Layouts as in billfish/core/formats/kquants.py.
inline std::vector<Field> small_integers(const Storage& s, int64_t first, int64_t last, std::vector<uint8_t>& bytes) {
  const int64_t chunks = s.k / s.block, groups = s.k / s.group, kinds = s.scales == Storage::six_bit_pairs ? 2 : 1;
  bytes.resize(size_t((last - first) * groups * kinds));
  uint8_t *scale = bytes.data(), *minimum = scale + (last - first) * groups;
  std::vector<Field> fields;
  for (int64_t i = 0; i < kinds; i++) fields.push_back({scale + i * (minimum - scale), groups, 1, groups, 1, first});
  for (int64_t row = first; row < last; row++)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      const uint8_t* from = s.bytes + row * s.row_bytes + chunk * s.block_bytes + s.sub_offset;
      if (s.scales == Storage::six_bit_pairs)
        for (int i = 0; i < 8; i++) {  // the first four whole, the others as nibbles with two bits left over from those
          *scale++ = i < 4 ? from[i] & 63 : uint8_t((from[i + 4] & 15) | from[i - 4] >> 6 << 4);
          *minimum++ = i < 4 ? from[i + 4] & 63 : uint8_t(from[i + 4] >> 4 | from[i] >> 6 << 4);
        }
      else if (s.scales == Storage::six_bits_apart)
        for (int i = 0; i < 8; i++) *scale++ = uint8_t((from[2 + i / 2] >> (i % 2 * 4) & 15) + (from[i / 4] >> (i % 4 * 2) & 3) * 16 - 32 + 128);
      else
        for (int i = 0; i < 16; i++) {
          const int low = from[i % 8] >> (i / 8 * 4) & 15, high = from[8 + i % 4] >> (i / 4 * 2) & 3;
          *scale++ = uint8_t(s.scales == Storage::nibble_pairs ? from[i] : s.scales == Storage::signed_bytes ? from[i] + 128 : low + 16 * high - 32 + 128);
        }
    }
  return fields;
}

}  // namespace billfish
