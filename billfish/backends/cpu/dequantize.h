// Storage to numbers, bit for bit as billfish.format.Format.decode has it: float32 arithmetic, each operation rounded
// once, then one rounding to the type of the output.
//
// Plain loops over runs of fixed length: each ISA level compiles them with its own instructions.
#pragma once
#include <cstring>

#include "halves.h"
#include "problem.h"

namespace BILLFISH_ISA {

using billfish::CodePlane;
using billfish::Storage;

// Bytes to fields as billfish.formats.ggml.unfold: of each run of WIDTH bytes, all lowest fields first, then the next
// ones. They are OR-ed into `out` from bit `at` on.
template <int WIDTH, int BITS> inline void unfold(const uint8_t* p, int bytes, int at, uint8_t* out) {
  for (int run = 0; run < bytes; run += WIDTH, p += WIDTH)
    for (int shift = 0; shift < 8; shift += BITS, out += WIDTH)
      for (int i = 0; i < WIDTH; i++) out[i] |= uint8_t((p[i] >> shift & ((1 << BITS) - 1)) << at);
}

inline void read_plane(const CodePlane& plane, const uint8_t* block, int at, uint8_t* codes) {
  const uint8_t* p = block + plane.offset;
  switch (plane.width * 16 + plane.bits) {
    case 1 * 16 + 1: return unfold<1, 1>(p, plane.bytes, at, codes);
    case 1 * 16 + 4: return unfold<1, 4>(p, plane.bytes, at, codes);
    case 1 * 16 + 8: return unfold<1, 8>(p, plane.bytes, at, codes);
    case 8 * 16 + 4: return unfold<8, 4>(p, plane.bytes, at, codes);
    case 16 * 16 + 4: return unfold<16, 4>(p, plane.bytes, at, codes);
    case 32 * 16 + 1: return unfold<32, 1>(p, plane.bytes, at, codes);
    case 32 * 16 + 2: return unfold<32, 2>(p, plane.bytes, at, codes);
    case 32 * 16 + 4: return unfold<32, 4>(p, plane.bytes, at, codes);
    case 64 * 16 + 4: return unfold<64, 4>(p, plane.bytes, at, codes);
  }
}

// The codes of one block, a byte each.
inline void read_codes(const Storage& s, int64_t row, int64_t block, uint8_t* codes) {
  const uint8_t* at = s.bytes + row * s.row_bytes + block * s.block_bytes;
  std::memset(codes, 0, size_t(s.block));
  int bit = 0;
  for (int i = 0; i < s.planes; i++) read_plane(s.plane[i], at, bit, codes), bit += s.plane[i].bits;
}

// Codes to values of the element.
inline void element_values(const Storage& s, const uint8_t* codes, int count, float* out) {
  switch (s.element) {
    case Storage::integer:
      for (int i = 0; i < count; i++) out[i] = float(int(codes[i]) - s.bias);
      return;
    case Storage::signed_byte:
      for (int i = 0; i < count; i++) out[i] = float(int8_t(codes[i]));
      return;
    case Storage::e2m1:
      // The bit trick in float32: s ee m at the top of the word reads 2^126 too small. The product is exact and keeps
      // the sign of zero.
      for (int i = 0; i < count; i++)
        out[i] = bits_to_float(uint32_t(codes[i] & 8) << 28 | uint32_t(codes[i] & 7) << 22) * 0x1p126f;
      return;
    case Storage::table_of_16:
      for (int i = 0; i < count; i++) out[i] = s.table[codes[i] & 15];
      return;
  }
}

inline float read_half(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return half_to_float_fast(bits);
}

// Values of one group, in place: (value - zero) * scale + minimum.
inline void scale_group(float* values, int count, const float* zero, float scale, const float* minimum) {
  if (zero)
    for (int i = 0; i < count; i++) values[i] -= *zero;
  for (int i = 0; i < count; i++) values[i] *= scale;
  if (minimum)
    for (int i = 0; i < count; i++) values[i] += *minimum;
}

// Rounds `count` values to the output type.
inline void store_values(const float* values, int64_t count, int type, void* out, int64_t at) {
  switch (type) {
    case 0: std::memcpy(static_cast<float*>(out) + at, values, size_t(count) * 4); return;
    case 1: {
      uint16_t* halves = static_cast<uint16_t*>(out) + at;
      for (int64_t i = 0; i < count; i++) halves[i] = float_to_half_fast(values[i]);
      return;
    }
    case 2: {
      uint16_t* bfloats = static_cast<uint16_t*>(out) + at;
      for (int64_t i = 0; i < count; i++) bfloats[i] = float_to_bfloat(values[i]);
      return;
    }
  }
}

// Rows [first, last) of storage whose rows are runs of blocks.
inline void dequantize_rows(const Storage& s, void* out, int type, int64_t first, int64_t last) {
  const int64_t groups = s.k / s.group;
  for (int64_t row = first; row < last; row++) {
    const uint8_t* block = s.bytes + row * s.row_bytes;
    for (int64_t at = 0; at < s.k; at += s.block, block += s.block_bytes) {
      alignas(64) uint8_t codes[256];
      alignas(64) float values[256];
      read_codes(s, row, at / s.block, codes);
      element_values(s, codes, s.block, values);
      for (int i = 0; i < s.block; i += s.group) {
        const int64_t g = row * groups + (at + i) / s.group;
        float scale, minimum = 0;
        if (s.scale) scale = s.scale[g];
        else scale = read_half(block + s.scale_offset);
        const bool has_minimum = s.minimum || s.minimum_offset >= 0;
        if (s.minimum) minimum = s.minimum[g];
        else if (s.minimum_offset >= 0) minimum = read_half(block + s.minimum_offset);
        scale_group(values + i, s.group, nullptr, scale, has_minimum ? &minimum : nullptr);
      }
      store_values(values, s.block, type, out, row * s.k + at);
    }
  }
}

// Columns [first, last) of words [K / per, N], four bits or eight each, to rows of the output. A strip of columns is
// turned at a time, so that both sides are read and written in runs.
inline void dequantize_words(const Storage& s, void* out, int type, int64_t first, int64_t last) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(s.bytes);
  constexpr int64_t STRIP = 16, RUN = 64;
  const int bits = s.plane[0].bits, per = 32 / bits;
  const int64_t groups = (s.k + s.group - 1) / s.group;
  for (int64_t n = first; n < last; n += STRIP) {
    const int64_t columns = last - n < STRIP ? last - n : STRIP;
    for (int64_t k = 0; k < s.k; k += RUN) {
      const int64_t run = s.k - k < RUN ? s.k - k : RUN;
      alignas(64) uint8_t codes[STRIP][RUN];
      for (int64_t r = 0; r < run / per; r++)
        for (int64_t c = 0; c < columns; c++) {
          const uint32_t word = words[(k / per + r) * s.n + n + c];
          for (int j = 0; j < per; j++) codes[c][r * per + j] = uint8_t(word >> (bits * j) & ((1u << bits) - 1));
        }
      for (int64_t c = 0; c < columns; c++) {
        alignas(64) float values[RUN];
        element_values(s, codes[c], int(run), values);
        for (int64_t i = 0; i < run;) {
          const int64_t g = (k + i) / s.group, end = (g + 1) * s.group - k < run ? (g + 1) * s.group - k : run;
          const int64_t index = (n + c) * groups + g;
          scale_group(values + i, int(end - i), s.zero ? s.zero + index : nullptr, s.scale[index], nullptr);
          i = end;
        }
        store_values(values, run, type, out, (n + c) * s.k + k);
      }
    }
  }
}

}  // namespace BILLFISH_ISA
