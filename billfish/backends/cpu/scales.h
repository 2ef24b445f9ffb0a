// Stored scales to float32: the only place that knows how a group's scale and minimum are kept.
#pragma once
#include "problem.h"

namespace BILLFISH_ISA {

using billfish::Scales;
using billfish::Weights;

// Decoded scales and minimums, [groups][TILE_ROWS]: value = code * scale + minimum.
struct GroupScales {
  float *scale, *minimum;
};

// Room for those of one chunk.
struct ChunkScales {
  alignas(64) float scale[16 * TILE_ROWS];
  alignas(64) float minimum[16 * TILE_ROWS];
  operator GroupScales() { return {scale, minimum}; }
};

inline bool has_minimum(Scales s) {
  return s == Scales::f16_minimum || s == Scales::f16_zero8 || s == Scales::f16_zero16 || s == Scales::sub_minimum ||
         s == Scales::sub_nibbles || s == Scales::f32_minimum;
}

// Decodes the scales of `groups` groups at p; returns where the codes begin.
inline const uint8_t* read_scales(const Weights& w, const uint8_t* p, int groups, GroupScales out) {
  const Floats factor = splat(w.factor), minus = splat(-1);
  constexpr int R = TILE_ROWS;
  const int n = groups * R;
  auto each_row = [&](auto&& body) {  // body(i, row within its group's run, group)
    for (int g = 0; g < groups; g++)
      for (int r = 0; r < R; r += LANES) body(g * R + r, r, g);
  };
  switch (w.scales) {
    case Scales::f16:
      if (w.factor == 1)
        for (int i = 0; i < n; i += LANES) store_floats(out.scale + i, halves_to_floats(p + 2 * i));
      else
        for (int i = 0; i < n; i += LANES) store_floats(out.scale + i, multiply(halves_to_floats(p + 2 * i), factor));
      return p + 2 * n;
    case Scales::f16_minimum:
      each_row([&](int i, int r, int g) {
        const uint8_t* at = p + 4 * R * g + 2 * r;
        store_floats(out.scale + i, halves_to_floats(at));
        store_floats(out.minimum + i, halves_to_floats(at + 2 * R));
      });
      return p + 4 * n;
    case Scales::f16_zero8:
    case Scales::f16_zero16: {
      const bool wide = w.scales == Scales::f16_zero16;
      const int run = (wide ? 4 : 3) * R;
      each_row([&](int i, int r, int g) {
        const uint8_t* zeros = p + run * g + 2 * R;
        Floats scale = halves_to_floats(p + run * g + 2 * r);
        Floats zero = wide ? halves_to_floats(zeros + 2 * r) : unsigned_to_floats(zeros + r);
        store_floats(out.scale + i, scale);
        store_floats(out.minimum + i, multiply(multiply(scale, zero), minus));
      });
      return p + run * groups;
    }
    case Scales::e8m0:
      for (int i = 0; i < n; i += LANES) store_floats(out.scale + i, multiply(exponents_to_floats(p + i), factor));
      return p + n;
    case Scales::e4m3:
      for (int i = 0; i < n; i += LANES) store_floats(out.scale + i, multiply(e4m3_to_floats(p + i), factor));
      return p + n;
    case Scales::sub:
      each_row([&](int i, int r, int g) {
        store_floats(out.scale + i, multiply(halves_to_floats(p + 2 * r), signed_to_floats(p + 2 * R + g * R + r)));
      });
      return p + 2 * R + n;
    case Scales::sub_minimum:
      each_row([&](int i, int r, int g) {
        const uint8_t* sub = p + 4 * R + 2 * g * R + r;
        store_floats(out.scale + i, multiply(halves_to_floats(p + 2 * r), unsigned_to_floats(sub)));
        store_floats(out.minimum + i, multiply(multiply(halves_to_floats(p + 2 * R + 2 * r), unsigned_to_floats(sub + R)), minus));
      });
      return p + 4 * R + 2 * n;
    case Scales::sub_nibbles:
      each_row([&](int i, int r, int g) {
        const uint8_t* sub = p + 4 * R + g * R + r;
        store_floats(out.scale + i, multiply(halves_to_floats(p + 2 * r), low_nibbles_to_floats(sub)));
        store_floats(out.minimum + i, multiply(multiply(halves_to_floats(p + 2 * R + 2 * r), high_nibbles_to_floats(sub)), minus));
      });
      return p + 4 * R + n;
    case Scales::f32:
      for (int i = 0; i < n; i += LANES) store_floats(out.scale + i, load_floats(reinterpret_cast<const float*>(p) + i));
      return p + 4 * n;
    case Scales::f32_minimum:
      each_row([&](int i, int r, int g) {
        const float* at = reinterpret_cast<const float*>(p) + 2 * R * g + r;
        store_floats(out.scale + i, load_floats(at));
        store_floats(out.minimum + i, load_floats(at + R));
      });
      return p + 8 * n;
  }
  return p;
}

}  // namespace BILLFISH_ISA
