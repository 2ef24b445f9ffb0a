// Stored scales to float32: the only place that knows how a group's scale and minimum are kept.
#pragma once
#include "decode.h"

namespace BILLFISH_ISA {

using billfish::Scales;
using billfish::Weights;

constexpr bool has_minimum(Scales s) {
  return s == Scales::f16_minimum || s == Scales::f16_zero8 || s == Scales::f16_zero16 || s == Scales::sub_minimum ||
         s == Scales::sub_nibbles || s == Scales::f32_minimum;
}

inline Floats floats_at(const uint8_t* p) { return load_floats(reinterpret_cast<const float*>(p)); }

// The scales of one chunk as they lie in the stream. value = code * scale + minimum, and all scales times Weights::factor.
// `row` is the first of LANES rows of the tile.
template <Scales S> struct Reader {
  static constexpr int R = TILE_ROWS;
  static constexpr bool minimums = has_minimum(S);
  const uint8_t* p;

  Floats scale(int64_t group, int row) const {
    if constexpr (S == Scales::f16) return halves_to_floats(p + 2 * (group * R + row));
    if constexpr (S == Scales::f16_minimum || S == Scales::f16_zero16) return halves_to_floats(p + 4 * group * R + 2 * row);
    if constexpr (S == Scales::f16_zero8) return halves_to_floats(p + 3 * group * R + 2 * row);
    if constexpr (S == Scales::e8m0) return exponents_to_floats(p + group * R + row);
    if constexpr (S == Scales::e4m3) return e4m3_to_floats(p + group * R + row);
    if constexpr (S == Scales::f32) return floats_at(p + 4 * (group * R + row));
    if constexpr (S == Scales::f32_minimum) return floats_at(p + 8 * group * R + 4 * row);
    // Two levels: one half for the chunk, times a small integer for the group.
    const Floats d = S == Scales::sub || S == Scales::sub_minimum || S == Scales::sub_nibbles ? halves_to_floats(p + 2 * row) : splat(0);
    if constexpr (S == Scales::sub) return multiply(d, signed_to_floats(p + (2 + group) * R + row));
    if constexpr (S == Scales::sub_minimum) return multiply(d, unsigned_to_floats(p + (4 + 2 * group) * R + row));
    if constexpr (S == Scales::sub_nibbles) return multiply(d, low_nibbles_to_floats(p + (4 + group) * R + row));
  }
  Floats minimum(int64_t group, int row) const {
    const Floats minus = splat(-1);
    if constexpr (S == Scales::f16_minimum) return halves_to_floats(p + (4 * group + 2) * R + 2 * row);
    if constexpr (S == Scales::f16_zero8) return multiply(multiply(scale(group, row), unsigned_to_floats(p + (3 * group + 2) * R + row)), minus);
    if constexpr (S == Scales::f16_zero16)
      return multiply(multiply(scale(group, row), halves_to_floats(p + (4 * group + 2) * R + 2 * row)), minus);
    if constexpr (S == Scales::f32_minimum) return floats_at(p + (8 * group + 4) * R + 4 * row);
    const Floats m = S == Scales::sub_minimum || S == Scales::sub_nibbles ? multiply(halves_to_floats(p + 2 * R + 2 * row), minus) : splat(0);
    if constexpr (S == Scales::sub_minimum) return multiply(m, unsigned_to_floats(p + (5 + 2 * group) * R + row));
    if constexpr (S == Scales::sub_nibbles) return multiply(m, high_nibbles_to_floats(p + (4 + group) * R + row));
    return splat(0);
  }
};

// Calls f with the reader for these scales.
template <class F> inline void with_reader(Scales scales, const uint8_t* p, F&& f) {
  switch (scales) {
    case Scales::f16: return f(Reader<Scales::f16>{p});
    case Scales::f16_minimum: return f(Reader<Scales::f16_minimum>{p});
    case Scales::f16_zero8: return f(Reader<Scales::f16_zero8>{p});
    case Scales::f16_zero16: return f(Reader<Scales::f16_zero16>{p});
    case Scales::e8m0: return f(Reader<Scales::e8m0>{p});
    case Scales::e4m3: return f(Reader<Scales::e4m3>{p});
    case Scales::sub: return f(Reader<Scales::sub>{p});
    case Scales::sub_minimum: return f(Reader<Scales::sub_minimum>{p});
    case Scales::sub_nibbles: return f(Reader<Scales::sub_nibbles>{p});
    case Scales::f32: return f(Reader<Scales::f32>{p});
    case Scales::f32_minimum: return f(Reader<Scales::f32_minimum>{p});
  }
}

// Scales as numbers, [groups][TILE_ROWS]. `offset` is what scale_sum adds: -SUM_OFFSET * scale, where a level has one.
struct GroupScales {
  float *scale, *offset, *minimum;
  GroupScales from(int64_t group) const {
    return {scale + group * TILE_ROWS, offset + group * TILE_ROWS, minimum + group * TILE_ROWS};
  }
};

// Room for those of one chunk.
struct ChunkScales {
  alignas(64) float scale[16 * TILE_ROWS];
  alignas(64) float offset[16 * TILE_ROWS];
  alignas(64) float minimum[16 * TILE_ROWS];
  operator GroupScales() { return {scale, offset, minimum}; }
};

// Decodes the scales of `groups` groups at p, times `factor`; returns where the codes begin. OFFSETS: whether scale_sum is used.
template <bool OFFSETS> const uint8_t* read_scales(const Weights& w, const uint8_t* p, int groups, GroupScales out, float factor = 1) {
  const Floats times = splat(factor), offset = splat(-SUM_OFFSET);
  with_reader(w.scales, p, [&](auto reader) {
    for (int g = 0; g < groups; g++)
      unroll<ROW_VECTORS>([&](auto r) {
        const int i = g * TILE_ROWS + r * LANES;
        const Floats scale = multiply(reader.scale(g, r * LANES), times);
        store_floats(out.scale + i, scale);
        if (OFFSETS && SUM_OFFSET != 0) store_floats(out.offset + i, multiply(scale, offset));
        if (has_minimum(w.scales)) store_floats(out.minimum + i, reader.minimum(g, r * LANES));
      });
  });
  return p + billfish::scale_bytes(w.scales, TILE_ROWS, groups);
}

}  // namespace BILLFISH_ISA
