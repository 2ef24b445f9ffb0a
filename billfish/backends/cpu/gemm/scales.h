// Stored scales to float32: the only place that knows how a group's scale and minimum are kept.
#pragma once
#include "gemm/decode.h"

namespace BILLFISH_ISA {

using billfish::Scales;
using billfish::Weights;

constexpr bool has_minimum(Scales s) {
  return s == Scales::f16_minimum || s == Scales::f16_zero8 || s == Scales::f16_zero16 || s == Scales::sub_minimum ||
         s == Scales::sub_nibbles || s == Scales::f32_minimum;
}

inline Floats floats_at(const uint8_t* p) { return load_floats(reinterpret_cast<const float*>(p)); }

// Scales as they lie in the stream. value = code * scale + minimum, and all scales times Weights::factor.
// ROW is the first of LANES rows of the tile.
template <Scales S> struct Reader {
  static constexpr int R = TILE_ROWS;
  static constexpr bool direct = true, minimums = has_minimum(S), two_levels = S == Scales::sub || S == Scales::sub_minimum || S == Scales::sub_nibbles;
  static constexpr int bias = S == Scales::sub ? 128 : 0;  // of a group's small integer: one byte, signed for `sub` alone
  const uint8_t* group = nullptr;  // where the scales of this span are

  // Two levels: a float16 for each chunk, times the small integer of a group. They are multiplied here, with what is the same for the
  // whole chunk worked out once; in exact products of few rows, each level is applied to sums (stream8.h).
  struct Chunk {
    Floats d[ROW_VECTORS] = {}, m[ROW_VECTORS] = {};
    alignas(64) float d_offset[TILE_ROWS] = {}, m_offset[TILE_ROWS] = {};
  };
  struct Nothing {};
  std::conditional_t<two_levels, Chunk, Nothing> chunk;
  template <int ROW> static Floats upper_scale(const uint8_t* p) { return halves_to_floats(p + 2 * ROW); }
  template <int ROW> static Floats upper_minimum(const uint8_t* p) { return multiply(halves_to_floats(p + 2 * (R + ROW)), splat(-1)); }
  template <int FIRST, int COUNT> void begin_chunk(const uint8_t* p) {
    unroll<COUNT>([&](auto i) INLINED {
      constexpr int r = FIRST + decltype(i)::value;
      chunk.d[r] = upper_scale<r * LANES>(p);
      store_floats(chunk.d_offset + r * LANES, times_bytes_offset(chunk.d[r], bias));
      if constexpr (minimums) {
        chunk.m[r] = upper_minimum<r * LANES>(p);
        store_floats(chunk.m_offset + r * LANES, times_bytes_offset(chunk.m[r], 0));
      }
    });
  }
  template <int ROW> Floats lower_scale(int half) const { return byte_fields<ROW, 0, S == Scales::sub_nibbles ? 15 : 255>(of(half), bias); }
  template <int ROW> Floats lower_minimum(int half) const {
    if constexpr (S == Scales::sub_nibbles) return byte_fields<ROW, 4, 15>(of(half), 0);
    else return byte_fields<ROW, 0, 255>(of(half) + R, 0);
  }
  const uint8_t* of(int half) const { return group + half * int(billfish::group_scale_bytes(S)) * R; }

  template <int ROW> Floats scale(int half) const {
    const uint8_t* p = of(half);
    constexpr int r = ROW / LANES;
    if constexpr (S == Scales::f16 || S == Scales::f16_minimum || S == Scales::f16_zero8 || S == Scales::f16_zero16) return halves_to_floats(p + 2 * ROW);
    if constexpr (S == Scales::f32 || S == Scales::f32_minimum) return floats_at(p + 4 * ROW);
    if constexpr (S == Scales::e8m0) return exponents_to_floats<ROW>(p);
    if constexpr (S == Scales::e4m3) return e4m3_to_floats<ROW>(p);
    if constexpr (S == Scales::sub || S == Scales::sub_minimum) return times_bytes<ROW, 0, 255>(chunk.d[r], chunk.d_offset + ROW, p);
    if constexpr (S == Scales::sub_nibbles) return times_bytes<ROW, 0, 15>(chunk.d[r], chunk.d_offset + ROW, p);
  }
  template <int ROW> Floats minimum(int half) const {
    const uint8_t* p = of(half);
    constexpr int r = ROW / LANES;
    if constexpr (S == Scales::f16_minimum) return halves_to_floats(p + 2 * (R + ROW));
    if constexpr (S == Scales::f32_minimum) return floats_at(p + 4 * (R + ROW));
    if constexpr (S == Scales::sub_minimum) return times_bytes<ROW, 0, 255>(chunk.m[r], chunk.m_offset + ROW, p + R);
    if constexpr (S == Scales::sub_nibbles) return times_bytes<ROW, 4, 15>(chunk.m[r], chunk.m_offset + ROW, p);
    if constexpr (S == Scales::f16_zero8 || S == Scales::f16_zero16) {
      const Floats minus = multiply(scale<ROW>(half), splat(-1));
      alignas(64) float offset[LANES];
      if constexpr (S == Scales::f16_zero8) return store_floats(offset, times_bytes_offset(minus, 0)), times_bytes<ROW, 0, 255>(minus, offset, p + 2 * R);
      else return multiply(minus, halves_to_floats(p + 2 * (R + ROW)));
    }
    return splat(0);
  }
};

// Calls f with the reader for these scales.
template <class F> inline void with_reader(Scales scales, F&& f) {
  switch (scales) {
    case Scales::f16: return f(Reader<Scales::f16>{});
    case Scales::f16_minimum: return f(Reader<Scales::f16_minimum>{});
    case Scales::f16_zero8: return f(Reader<Scales::f16_zero8>{});
    case Scales::f16_zero16: return f(Reader<Scales::f16_zero16>{});
    case Scales::e8m0: return f(Reader<Scales::e8m0>{});
    case Scales::e4m3: return f(Reader<Scales::e4m3>{});
    case Scales::sub: return f(Reader<Scales::sub>{});
    case Scales::sub_minimum: return f(Reader<Scales::sub_minimum>{});
    case Scales::sub_nibbles: return f(Reader<Scales::sub_nibbles>{});
    case Scales::f32: return f(Reader<Scales::f32>{});
    case Scales::f32_minimum: return f(Reader<Scales::f32_minimum>{});
    case Scales::none: return;
  }
}

// The scales of a group as numbers. `offset` is what scale_sum or times_byte adds, a multiple of the scale.
struct alignas(64) GroupScales {
  float scale[TILE_ROWS], offset[TILE_ROWS], minimum[TILE_ROWS];
};

// Decodes the scales of `blocks` blocks from the beginning of a chunk on, times `factor`. OFFSETS: whether there are any, each
// `offset` times the scale.
template <bool OFFSETS, class Source>
__attribute__((flatten)) void read_scales_of(Source reader, const billfish::TileShape& shape, const uint8_t* p, int64_t blocks, GroupScales* out, float offset, float factor) {
  const Floats times = splat(factor), offset_times = splat(offset * factor);
  const size_t chunk_header = shape.chunk_header, span_header = shape.span_header, codes = shape.block_code_bytes * size_t(shape.span);
  const int halves = shape.groups_in_span(), span = shape.span;
  for (int64_t b = 0; b < blocks; b += span, p += codes) {
    if constexpr (Source::two_levels)
      if (b % 8 == 0) reader.template begin_chunk<0, ROW_VECTORS>(p), p += chunk_header;
    reader.group = p, p += span_header;
    for (int half = 0; half < halves; half++, out++)
      unroll<ROW_VECTORS>([&](auto r) INLINED {
        constexpr int row = decltype(r)::value * LANES;
        const Floats scale = reader.template scale<row>(half);
        store_floats(out->scale + row, multiply(scale, times));
        if constexpr (OFFSETS) store_floats(out->offset + row, multiply(scale, offset_times));
        if (reader.minimums) store_floats(out->minimum + row, reader.template minimum<row>(half));
      });
  }
}
template <bool OFFSETS>
void read_scales(const Weights& w, const billfish::TileShape& shape, const uint8_t* p, int64_t blocks, GroupScales* out, float offset, float factor) {
  with_reader(w.scales, [&](auto reader) { read_scales_of<OFFSETS>(reader, shape, p, blocks, out, offset, factor); });
}

}  // namespace BILLFISH_ISA
