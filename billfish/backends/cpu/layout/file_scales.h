// Scales as files hold them, to float32.
#pragma once
#include <algorithm>
#include <cstring>

#include "layout/problem.h"
#include "simd/sixteen.h"

namespace BILLFISH_ISA {

using billfish::GroupField;
using billfish::Storage;

// How many groups are read before their codes are decoded: many, because between two runs the stream of stores to memory stops,
// but no more than stay in the first-level cache.
constexpr int64_t RUN_GROUPS = 2048;

// What the groups of a run do to their codes. An offset, if any, is a zero point or a minimum, and stands there four times
// where vectors have four lanes.
struct GroupNumbers {
  alignas(64) float scale[RUN_GROUPS];
  alignas(64) float offset[RUN_GROUPS][4];
  bool raised;  // scales have been multiplied for codes of FileCodes::get_large as subnormals
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

// COUNT of sixteen numbers, from number FROM on, to so many groups.
template <int COUNT, int FROM = 0> inline void put_scales(float* scale, const Values& v) {
  if constexpr (FROM == 0 && COUNT % LANES == 0) {
    unroll<COUNT / LANES>([&](auto i) INLINED { store_floats(scale + LANES * i, v.part[i]); });
  } else {
    alignas(64) float x[16];
    store(x, v);
    std::memcpy(scale, x + FROM, COUNT * sizeof(float));
  }
}
template <int COUNT, int FROM = 0> inline void put_offsets(float (*offset)[4], const Values& v) {
  alignas(64) float x[16];
  store(x, v);
  for (int i = 0; i < COUNT; i++) put(offset[i], x[FROM + i]);
}

inline Values times(Values v, float by) {
  unroll<16 / LANES>([&](auto i) INLINED { v.part[i] = v.part[i] * by; });
  return v;
}

// Of `count` blocks. Layouts as in billfish/core/formats/kquants.py.
inline void read_blocks(const Storage& s, const uint8_t* block, int64_t count, GroupNumbers& out) {
  const int64_t stride = s.block_bytes, groups = s.block / s.group;
  const int64_t sub = s.sub_offset, at = s.scale_offset, minimum_at = s.minimum_offset;
  // A half of 2^e or more, times an integer of so many bits, and times 2^up, might not be finite; its exponent is stored as e + 15.
  const int up = 133 - room(s.code_field[0].bits, s.code_field[1].bits), bits = s.scales == Storage::nibble_pairs ? 4 : 6;
  const int least = (15 + 128 - up - bits) << 10;
  out.raised = SUBNORMALS_PAY && (s.scales == Storage::nibble_pairs || s.scales == Storage::six_bit_pairs);
  for (int64_t i = 0; i < count && out.raised; i++) out.raised = (read<uint16_t>(block + i * stride + at) & 0x7fff) < least;
  const float by[2] = {out.raised ? 0x1p100f : 1, out.raised ? float(int64_t(1) << (up - 100)) : 1};
  // f(small integers of the block, the numbers above them, its first group)
  auto each = [&](auto f) {
    for (int64_t i = 0; i < count; i++, block += stride) {
      const float minimum = minimum_at < 0 ? 0 : -read_half(block + minimum_at);
      f(block + sub, read_half(block + at) * by[0] * by[1], minimum, i * groups);
    }
  };
  switch (s.scales) {
    case Storage::looked_up:
      for (int64_t i = 0; i < count * groups; i++) out.scale[i] = s.byte_values[block[i / groups * stride + sub + i % groups]];
      return;
    case Storage::six_bit_pairs:
      // Four bytes at a time: the low six bits of bytes 0..7; and the halves of bytes 8..11 below the bits left over from those.
      return each([&](const uint8_t* sub, float d, float m, int64_t first) {
        uint64_t a = read<uint32_t>(sub), b = read<uint32_t>(sub + 4), c = read<uint32_t>(sub + 8);
        asm("" : "+r"(a), "+r"(b), "+r"(c));  // or gcc moves them to vectors, which takes longer than it saves
        const Values both = Counted(0)(two_eights((a & 0x3f3f3f3f) | ((c & 0x0f0f0f0f) | (a >> 2 & 0x30303030)) << 32,
                                                  (b & 0x3f3f3f3f) | ((c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)) << 32));
        put_scales<8>(out.scale + first, times(both, d)), put_offsets<8, 8>(out.offset + first, times(both, m));
      });
    case Storage::nibble_pairs:
      return each([&](const uint8_t* sub, float d, float m, int64_t first) {
        const Sixteen both = load_sixteen(sub);
        put_scales<16>(out.scale + first, times(Counted(0)(both & uint8_t(15)), d));
        put_offsets<16>(out.offset + first, times(Counted(0)(both >> uint8_t(4)), m));
      });
    case Storage::six_bits:
      return each([&](const uint8_t* sub, float d, float, int64_t first) {
        // Eight bytes of low nibbles, and of the last four the lowest two bits for scales 0..3, the next for 4..7, and so on.
        const uint64_t low = load_eight(sub), top = read<uint32_t>(sub + 8), nibbles = 0x0f0f0f0f0f0f0f0f;
        const Sixteen sixteen = two_eights((low & nibbles) | (top & 0x03030303) << 4 | (top & 0x0c0c0c0c) << 34,
                                           (low >> 4 & nibbles) | (top & 0x30303030) | (top & 0xc0c0c0c0) << 30);
        put_scales<16>(out.scale + first, times(Counted(32)(sixteen), d));
      });
    case Storage::signed_bytes:
      return each([&](const uint8_t* sub, float d, float, int64_t first) {
        put_scales<16>(out.scale + first, times(Counted(128)(load_sixteen(sub) ^ uint8_t(128)), d));
      });
    case Storage::six_bits_apart:
      return each([&](const uint8_t* sub, float d, float, int64_t first) {
        for (int i = 0; i < 8; i++) out.scale[first + i] = d * float((sub[2 + i / 2] >> (i % 2 * 4) & 15) + (sub[i / 4] >> (i % 4 * 2) & 3) * 16 - 32);
      });
    case Storage::apart: case Storage::halves: return;
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
