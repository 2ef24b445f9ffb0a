// y = x W^T in float32 with codes that stand for numbers which int8 does not hold: E4M3, and indices into 16 float32.
//
// A code becomes a number, and times its scale the very float32 that dequantize gives. With few rows of x this happens just before it is
// multiplied, with more once for all rows, in a buffer as in values.h.
#pragma once
#include "gemm/values.h"

namespace BILLFISH_ISA {

using billfish::FEW_FLOAT_ROWS;

// Codes to numbers: `load` are the codes of row vector R of a quad, a byte each, and `numbers` what they stand for, divided by `reduced`.
// Scales make up for that, if they can: `Whole` is the element for those that would be too large.
struct WholeE4M3 {
  static constexpr int bits = 8;
  static constexpr float reduced = 1;
  using Whole = WholeE4M3;
  explicit WholeE4M3(const Weights&) {}
  template <int R> static Bytes load(const uint8_t* quad) { return load_bytes(quad + R * VECTOR_BYTES); }
  FourFloats numbers(Bytes codes) const {
    FourFloats four = e4m3_to_floats(codes);
    repeat<4>([&](int k) INLINED { four.k[k] = multiply(four.k[k], splat(0x1p120f)); });
    return four;
  }
};
struct E4M3 : WholeE4M3 {
  static constexpr float reduced = 0x1p120f;
  using WholeE4M3::WholeE4M3;
  FourFloats numbers(Bytes codes) const { return e4m3_to_floats(codes); }
};
struct TableOfFloats {
  static constexpr int bits = 4;
  static constexpr float reduced = 1;
  using Whole = TableOfFloats;
  explicit TableOfFloats(const Weights& w) : table(load_table(w.table)) {}
  template <int R> static Bytes load(const uint8_t* quad) { return field<4, R>(quad); }
  FourFloats numbers(Bytes codes) const { return look_up(table, codes); }
  FloatTable table;
};

// The scales of a run of blocks, for which there is room for 16 groups. Returns whether they make up for numbers that are reduced.
template <class Element> bool read_scales_for(const Weights& w, const TileShape& shape, const Blocks& run, GroupScales* scales) {
  read_scales<false>(w, shape, run.stream, run.count, scales, 0, 1);
  if constexpr (Element::reduced == 1) return false;
  const int groups = shape.groups_in(int(run.count));
  bool large = false;
  for (int g = 0; g < groups; g++)
    for (int i = 0; i < TILE_ROWS; i++) large |= __builtin_fabsf(scales[g].scale[i]) > 0x1p7f;
  if (large) return false;
  for (int g = 0; g < groups; g++)
    for (int i = 0; i < TILE_ROWS; i++) scales[g].scale[i] *= Element::reduced;
  return true;
}

template <class Element> constexpr int QUAD_BYTES = ROW_VECTORS * VECTOR_BYTES * Element::bits / 8;

// Calls f(quad, codes, scale [ROW_VECTORS]) for the quads of a run of blocks, which have `halves` groups in a block, or one for a span.
template <class Element, class F> inline void each_quad(const Blocks& run, int halves, const GroupScales* group, F&& f) {
  const uint8_t* p = run.stream + run.chunk_header;
  const int quads = 8 / halves;
  Floats scale[ROW_VECTORS] = {};
  for (int64_t b = 0; b < run.count; b++) {
    const bool begins = b % run.span == 0;
    if (begins) p += run.span_header;
    for (int half = 0; half < halves; half++) {
      if (begins) {
        repeat<ROW_VECTORS>([&](int r) INLINED { scale[r] = load_floats(group->scale + r * LANES); });
        group++;
      }
      for (int quad = 0; quad < quads; quad++, p += QUAD_BYTES<Element>) f(b * 8 + half * quads + quad, p, scale);
    }
  }
}

// sums [ROWS][TILE_ROWS] += x W^T for a run of blocks. x [ROWS][k], one row x_stride behind the other. So many k are added up on their own as
// in multiply_values, so that a row of x gets the same bits alone and beside many others.
template <class Element, int ROWS>
__attribute__((flatten, noinline)) void add_float_codes(const Element& of, const Blocks& run, int halves, const GroupScales* groups, const float* x, int64_t x_stride, float* sums) {
  const Element element = of;  // in registers, where stores cannot change it
  Floats total[ROWS][ROW_VECTORS];
  repeat<ROWS>([&](int t) INLINED { repeat<ROW_VECTORS>([&](int r) INLINED { total[t][r] = splat(0); }); });
  const auto add_totals = [&]() INLINED {
    repeat<ROWS>([&](int t) INLINED {
      repeat<ROW_VECTORS>([&](int r) INLINED {
        float* to = sums + t * TILE_ROWS + r * LANES;
        store_floats(to, add(load_floats(to), total[t][r]));
        total[t][r] = splat(0);
      });
    });
  };
  each_quad<Element>(run, halves, groups, [&](int64_t quad, const uint8_t* p, const Floats* scale) INLINED {
    if constexpr (ONE_ROW_AHEAD > 0) repeat<(QUAD_BYTES<Element> + 63) / 64>([&](int line) INLINED { __builtin_prefetch(p + ONE_ROW_AHEAD + line * 64); });
    FloatActivations x_now[ROWS];
    repeat<ROWS>([&](int t) INLINED { x_now[t] = load_x(x + t * x_stride + quad * 4); });
    const auto add_vector = [&](const FourFloats& numbers, int r) INLINED {
      unroll<4>([&](auto k) INLINED {
        const Floats value = multiply(numbers.k[k], scale[r]);
        repeat<ROWS>([&](int t) INLINED { total[t][r] = multiply_add_x<decltype(k)::value>(total[t][r], value, x_now[t]); });
      });
    };
    unroll<ROW_VECTORS>([&](auto r) INLINED { add_vector(element.numbers(Element::template load<decltype(r)::value>(p)), r); });
    if (VALUES_AT_ONCE < CHUNK && (quad + 1) % (VALUES_AT_ONCE / 4) == 0) add_totals();
  });
  add_totals();
}

// The kernel for so many rows, or for X_ROWS if there are more.
template <class Element> auto float_codes_kernel(int64_t rows) {
  switch (rows) {
    case 1: return add_float_codes<Element, 1>;
    case 2: return add_float_codes<Element, 2>;
    case 3: return add_float_codes<Element, 3>;
    default: return add_float_codes<Element, X_ROWS>;
  }
}

template <class Element>
void multiply_few_float_codes(const Element& element, const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  const TileShape shape(w, TILE_ROWS);
  const typename Element::Whole whole(w);
  const int64_t x_stride = x.blocks * BLOCK;
  GroupScales scales[16];
  for (int64_t tile = first; tile < last; tile++) {
    alignas(64) float sums[FEW_FLOAT_ROWS * TILE_ROWS] = {};
    for (int64_t chunk = 0; chunk < shape.chunks; chunk++) {
      const Blocks run = blocks_in_stream(w, shape, tile, chunk, shape.blocks_in(chunk));
      const bool reduced = read_scales_for<Element>(w, shape, run, scales);
      auto add = [&](auto kernel, const auto& of, int64_t row) {
        kernel(of, run, shape.groups_in_span(), scales, x.x + row * x_stride + chunk * CHUNK, x_stride, sums + row * TILE_ROWS);
      };
      for (int64_t row = 0; row < x.m; row += X_ROWS)
        if (reduced) add(float_codes_kernel<Element>(x.m - row), element, row);
        else add(float_codes_kernel<typename Element::Whole>(x.m - row), whole, row);
    }
    write_tile(sums, w.factor, nullptr, bias, w.n, tile, 0, x.m, y);
  }
}

// The values of a run of blocks, [k][TILE_ROWS].
template <class Element> __attribute__((flatten, noinline)) void decode_float_codes(const Element& of, const Blocks& run, int halves, const GroupScales* groups, float* values) {
  const Element element = of;
  each_quad<Element>(run, halves, groups, [&](int64_t quad, const uint8_t* p, const Floats* scale) INLINED {
    unroll<ROW_VECTORS>([&](auto r) INLINED {
      const FourFloats numbers = element.numbers(Element::template load<decltype(r)::value>(p));
      repeat<4>([&](int k) INLINED { store_floats(values + (quad * 4 + k) * TILE_ROWS + r * LANES, multiply(numbers.k[k], scale[r])); });
    });
  });
}

template <class Element> void multiply_element(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  const Element element(w);
  const typename Element::Whole whole(w);
  if (x.m <= FEW_FLOAT_ROWS) return multiply_few_float_codes(element, w, x, bias, y, first, last);
  alignas(64) float values[CHUNK * TILE_ROWS];
  GroupScales scales[16];
  multiply_values(w, x, bias, y, first, last, [&](const TileShape& shape, const Blocks& run) {
    if (read_scales_for<Element>(w, shape, run, scales)) decode_float_codes(element, run, shape.groups_in_span(), scales, values);
    else decode_float_codes(whole, run, shape.groups_in_span(), scales, values);
    return values;
  }, w.factor);
}

inline void multiply_float_codes(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  (w.codes == Codes::e4m3 ? multiply_element<E4M3> : multiply_element<TableOfFloats>)(w, x, bias, y, first, last);
}

}  // namespace BILLFISH_ISA
