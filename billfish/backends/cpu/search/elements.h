// The nearest value and the nearest code of each element, bit for bit as billfish/core/elements.py has them.
#pragma once
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "search/search_problem.h"
#include "simd/halves.h"
#include "simd/unroll.h"

namespace BILLFISH_ISA {
namespace {

// Sixteen lanes whatever the machine has, as sums go by lanes: PARTS vectors of its own width.
#if defined(__AVX512F__)
constexpr int WIDTH = 64;
#elif defined(__AVX2__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif
constexpr int SUM_LANES = 16, PER_PART = WIDTH / 4, PARTS = SUM_LANES / PER_PART;
typedef float Reals __attribute__((vector_size(WIDTH)));
typedef int32_t Integers __attribute__((vector_size(WIDTH)));

// f(0) ... f(PARTS - 1). Where no machine is meant, in a loop: a quarter to compile.
template <class F> INLINED inline void each_part(F&& f) {
#if defined(BILLFISH_simd_portable)
  for (int part = 0; part < PARTS; part++) f(part);
#else
  repeat<PARTS>(f);
#endif
}

INLINED inline Reals reals(float x) { return x - Reals{}; }
INLINED inline Integers integers(int32_t x) { return x - Integers{}; }
INLINED inline Reals load_reals(const float* p) {
  Reals v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
INLINED inline Integers bits_of(Reals v) {
  Integers b;
  std::memcpy(&b, &v, sizeof b);
  return b;
}
INLINED inline Reals of_bits(Integers b) {
  Reals v;
  std::memcpy(&v, &b, sizeof v);
  return v;
}
INLINED inline Reals magnitude_of(Reals x) { return of_bits(bits_of(x) & 0x7fffffff); }
INLINED inline Reals with_sign(Reals magnitude, Reals x) { return of_bits(bits_of(magnitude) | (bits_of(x) & int32_t(0x80000000))); }
// NaN stays NaN, and of zeros that are equal x stays: x86 returns the second operand for both.
INLINED inline Reals clipped(Reals x, float low, float high) {
  const Reals l = reals(low), h = reals(high);
#if defined(__AVX512F__)
  return _mm512_min_ps(h, _mm512_max_ps(l, x));
#elif defined(__AVX2__)
  return _mm256_min_ps(h, _mm256_max_ps(l, x));
#else
  x = x < l ? l : x;
  return x > h ? h : x;
#endif
}
// To the nearest integer, ties to even, with the sign of x.
INLINED inline Reals rounded(Reals x) {
#if defined(__AVX512F__)
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  return vrndnq_f32(x);
#else
  const Reals anchor = reals(0x1p23f);  // only magnitudes below it have a fraction
  const Reals magnitude = magnitude_of(x), nearest = (magnitude + anchor) - anchor;
  return with_sign(magnitude < anchor ? nearest : magnitude, x);
#endif
}

inline float reciprocal(float x) {
  const float inverse = 1.0f / x;
  return (float_to_bits(inverse) & 0x7fffffff) == 0x7f800000 ? 0.0f : inverse;
}

// E4M3 of a float, ties to even; 448 at most, else NaN.
inline float nearest_e4m3(float x) {
  const uint32_t sign = float_to_bits(x) & 0x80000000;
  const float magnitude = bits_to_float(float_to_bits(x) & 0x7fffffff);
  if (magnitude != magnitude) return x;
  const float anchor = bits_to_float(float_to_bits(magnitude < 0x1p-6f ? 0x1p-6f : magnitude) & 0x7f800000) * 0x1p20f;
  const float nearest = (magnitude + anchor) - anchor;
  return nearest <= 448 ? bits_to_float(float_to_bits(nearest) | sign) : bits_to_float(0x7fc00000);
}

// ---- elements -------------------------------------------------------------------------------------------------------
// round(x) is the nearest value, code(x) its code in 32 bits.

struct Even {
  float low, high, bias;
  explicit Even(const billfish::SearchElement& e) : low(e.low), high(e.high), bias(e.bias) {}
  INLINED Reals round(Reals x) const { return clipped(rounded(x), low, high); }
  INLINED Integers code(Reals x) const { return __builtin_convertvector(round(x) + bias, Integers) & 255; }
};

struct E2m1 {
  explicit E2m1(const billfish::SearchElement&) {}
  INLINED Reals magnitude(Reals x) const {
    Reals m = magnitude_of(x);
    m = m > 6.0f ? reals(6) : m;
    const Reals anchor = of_bits(bits_of(m < 1.0f ? reals(1) : m) & 0x7f800000) * 0x1p22f;
    return (m + anchor) - anchor;
  }
  INLINED Reals round(Reals x) const { return with_sign(magnitude(x), x); }
  INLINED Integers code(Reals x) const {
    const Reals m = magnitude(x);  // 0 0.5 1 1.5 are codes 0 to 3, 2 3 are 4 and 5, 4 6 are 6 and 7
    const Integers twice = __builtin_convertvector(m * 2.0f, Integers);
    const Integers code = twice < 4 ? twice : twice < 8 ? (twice >> 1) + 2 : (twice >> 2) + 4;
    return code | (bits_of(x) >> 28 & 8);
  }
};

struct E4m3 {
  explicit E4m3(const billfish::SearchElement&) {}
  INLINED Reals round(Reals x) const {
    const Reals m = magnitude_of(clipped(x, -448, 448));
    const Reals anchor = of_bits(bits_of(m < 0x1p-6f ? reals(0x1p-6f) : m) & 0x7f800000) * 0x1p20f;
    return with_sign((m + anchor) - anchor, x);
  }
  INLINED Integers code(Reals x) const {
    const Reals m = magnitude_of(round(x));
    const Integers normal = (bits_of(m) >> 20) - (120 << 3), subnormal = __builtin_convertvector(m * 512.0f, Integers);
    return (m < 0x1p-6f ? subnormal : normal) | (bits_of(x) >> 24 & 0x80);
  }
};

// The cell of each x, within the table whatever x is.
struct CellOf {
  float first, last, per_unit;
  int32_t start, count;
  explicit CellOf(const billfish::SearchElement& e)
      : first(e.first_cell), last(e.first_cell + float(e.cell_count - 1)), per_unit(e.per_unit), start(int32_t(e.first_cell)), count(e.cell_count) {}
  INLINED Integers operator()(Reals x) const {
    const Reals y = clipped(x * per_unit, first, last);
    Integers cell = __builtin_convertvector(y, Integers);
    cell += __builtin_convertvector(cell, Reals) > y;  // a comparison is -1 where it holds
    cell -= start;
    return cell < 0 ? integers(0) : cell >= count ? integers(0) : cell;
  }
};

template <class T> INLINED inline Reals looked_up(const T* table, Integers at) {
  alignas(WIDTH) int32_t index[PER_PART];
  alignas(WIDTH) float found[PER_PART];
  std::memcpy(index, &at, sizeof at);
  for (int i = 0; i < PER_PART; i++) found[i] = float(table[index[i]]);
  return load_reals(found);
}

INLINED inline Reals looked_up(const float* table, Integers at) {
#if defined(__AVX512F__)
  __m512i index;
  std::memcpy(&index, &at, sizeof index);
  return _mm512_i32gather_ps(index, table, 4);
#elif defined(__AVX2__)
  __m256i index;
  std::memcpy(&index, &at, sizeof index);
  return _mm256_i32gather_ps(table, index, 4);
#else
  return looked_up<float>(table, at);
#endif
}

struct Cells {
  CellOf cell;
  const uint8_t* codes;
  const float* values;
  explicit Cells(const billfish::SearchElement& e) : cell(e), codes(e.code_of_cell), values(e.of_cell) {}
  INLINED Reals round(Reals x) const { return looked_up(values, cell(x)); }
  INLINED Integers code(Reals x) const { return __builtin_convertvector(looked_up(codes, cell(x)), Integers); }
};

struct Sorted {
  CellOf cell;
  const uint8_t* codes;
  const float *middles, *values;
  explicit Sorted(const billfish::SearchElement& e) : cell(e), codes(e.code_of_cell), middles(e.of_cell), values(e.values) {}
  INLINED Integers code(Reals x) const {
    const Integers at = cell(x);
    return __builtin_convertvector(looked_up(codes, at), Integers) - (x > looked_up(middles, at));
  }
  INLINED Reals round(Reals x) const { return looked_up(values, code(x)); }
};

// work(element) with the class of its kind.
template <class Work> inline void with_element(const billfish::SearchElement& e, Work work) {
  switch (e.kind) {
    case billfish::SearchElement::even: return work(Even(e));
    case billfish::SearchElement::e2m1: return work(E2m1(e));
    case billfish::SearchElement::e4m3: return work(E4m3(e));
    case billfish::SearchElement::cells: return work(Cells(e));
    case billfish::SearchElement::sorted: return work(Sorted(e));
  }
}

}  // namespace
}  // namespace BILLFISH_ISA
