// Scales as files hold them, to float32.
#pragma once
#include <algorithm>
#include <cstring>

#include "sixteen.h"

namespace BILLFISH_ISA {

using billfish::GroupField;
using billfish::Storage;

// Codes that are decoded at a time: many, because between two runs the stream of stores to memory stops.
constexpr int64_t RUN = 16384;

// What the groups of a run do to their codes. An offset, if any, is a zero point or a minimum, and stands there four times
// where vectors have four lanes.
struct GroupNumbers {
  alignas(64) float scale[RUN / 16];
  alignas(64) float offset[RUN / 16][4];
};

template <class T> inline T read(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}
inline float read_half(const uint8_t* p) { return half_to_float_fast(read<uint16_t>(p)); }

inline void put(float* four, float x) {
  if constexpr (LANES == 4) store_floats(four, Floats{x, x, x, x});  // in one piece, as it will be loaded
  else *four = x;
}

// Sixteen small integers of a two-level scale, less a bias.
struct Integers {
  alignas(64) float x[16];
  Integers(Sixteen bytes, int bias) {
    const Values values = Counted(bias)(bytes);
    unroll<16 / LANES>([&](auto i) INLINED { store_floats(x + LANES * i, values.part[i]); });
  }
};

// Of `count` blocks. Layouts as in billfish/formats/kquants.py.
inline void read_blocks(const Storage& s, const uint8_t* block, int64_t count, GroupNumbers& out) {
  // f(small integers of the block, the numbers above them, its first group)
  auto each = [&](auto f) {
    const int64_t stride = s.block_bytes, groups = s.block / s.group;
    const int64_t sub = s.sub_offset, at = s.scale_offset, minimum_at = s.minimum_offset;
    for (int64_t i = 0; i < count; i++, block += stride)
      f(block + sub, at < 0 ? 0 : read_half(block + at), minimum_at < 0 ? 0 : -read_half(block + minimum_at), i * groups);
  };
  switch (s.scales) {
    case Storage::halves:
      return each([&](const uint8_t*, float d, float m, int64_t i) { out.scale[i] = d, put(out.offset[i], -m); });
    case Storage::looked_up:
      return each([&, per_block = s.block / s.group](const uint8_t* sub, float, float, int64_t first) {
        for (int i = 0; i < per_block; i++) out.scale[first + i] = s.byte_values[sub[i]];
      });
    case Storage::six_bit_pairs:
      // Four bytes at a time: the low six bits of bytes 0..7; and the halves of bytes 8..11 below the bits left over from those.
      return each([&](const uint8_t* sub, float d, float m, int64_t first) {
        uint64_t a = read<uint32_t>(sub), b = read<uint32_t>(sub + 4), c = read<uint32_t>(sub + 8);
        asm("" : "+r"(a), "+r"(b), "+r"(c));  // or gcc moves them to vectors, which takes longer than it saves
        const Integers both(two_eights((a & 0x3f3f3f3f) | ((c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)) << 32,
                                       (b & 0x3f3f3f3f) | ((c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)) << 32), 0);
        for (int i = 0; i < 8; i++) out.scale[first + i] = d * both.x[i];
        float minimums[8];
        for (int i = 0; i < 8; i++) minimums[i] = m * both.x[8 + i];
        for (int i = 0; i < 8; i++) put(out.offset[first + i], minimums[i]);
      });
    case Storage::nibble_pairs:
      return each([&](const uint8_t* sub, float d, float m, int64_t first) {
        const Sixteen both = load_sixteen(sub);
        const Integers scales(both & uint8_t(15), 0), minimums(both >> uint8_t(4), 0);
        for (int i = 0; i < 16; i++) out.scale[first + i] = d * scales.x[i];
        for (int i = 0; i < 16; i++) put(out.offset[first + i], m * minimums.x[i]);
      });
    case Storage::six_bits:
      return each([&](const uint8_t* sub, float d, float, int64_t first) {
        // Eight bytes of low nibbles, and of the last four the lowest two bits for scales 0..3, the next for 4..7, and so on.
        const uint64_t low = load_eight(sub), top = read<uint32_t>(sub + 8), nibbles = 0x0f0f0f0f0f0f0f0f;
        const Integers scales(two_eights((low & nibbles) | (top & 0x03030303) << 4 | (top & 0x0c0c0c0c) << 34,
                                         (low >> 4 & nibbles) | (top & 0x30303030) | (top & 0xc0c0c0c0) << 30), 32);
        for (int i = 0; i < 16; i++) out.scale[first + i] = d * scales.x[i];
      });
    case Storage::signed_bytes:
      return each([&](const uint8_t* sub, float d, float, int64_t first) {
        const Integers scales(load_sixteen(sub) ^ uint8_t(128), 128);
        for (int i = 0; i < 16; i++) out.scale[first + i] = d * scales.x[i];
      });
    case Storage::apart: return;
  }
}

// Calls f(i, number) for `count` groups of a row from group `first` on.
template <class F> inline void read_field(const Storage& s, const GroupField& field, int64_t row, int64_t first, int64_t count, F f) {
  const uint8_t* p = field.data + row * field.row_stride + first * field.stride;
  auto each = [&](auto number) {
    for (int64_t i = 0; i < count; i++) f(i, number(p + i * field.stride));
  };
  switch (field.kind) {
    case GroupField::none: return;
    case GroupField::f16: return each(read_half);
    case GroupField::bf16: return each([](const uint8_t* at) { return bits_to_float(uint32_t(read<uint16_t>(at)) << 16); });
    case GroupField::f32: return each(read<float>);
    case GroupField::byte: return each([](const uint8_t* at) { return float(*at); });
    case GroupField::looked_up: return each([&](const uint8_t* at) { return s.byte_values[*at]; });
  }
}

// Those of `count` codes of a row from k on; returns how many groups these are.
inline int64_t read_groups(const Storage& s, int64_t row, int64_t k, int64_t count, GroupNumbers& out) {
  if (s.scales != Storage::apart) {
    read_blocks(s, s.bytes + row * s.row_bytes + k / s.block * s.block_bytes, count / s.block, out);
    return count / s.group;
  }
  const int64_t first = k / s.group, groups = (k + count - 1) / s.group - first + 1;
  read_field(s, s.scale, row, first, groups, [&](int64_t i, float x) { out.scale[i] = x; });
  read_field(s, s.zero, row, first, groups, [&](int64_t i, float x) { put(out.offset[i], x); });
  read_field(s, s.minimum, row, first, groups, [&](int64_t i, float x) { put(out.offset[i], x); });
  return groups;
}

}  // namespace BILLFISH_ISA
