// Sixteen codes, a byte each, to sixteen floats: the part of dequantize that each ISA level does in its own way.
#pragma once
#include <cstdint>
#include <cstring>

#include "decode.h"
#include "halves.h"

namespace BILLFISH_ISA {

// The compiler's own vector: it has & | ^ << >> on every machine.
typedef uint8_t Sixteen __attribute__((vector_size(16)));

inline Sixteen load_sixteen(const uint8_t* p) {
  Sixteen v;
  std::memcpy(&v, p, 16);
  return v;
}

inline uint64_t load_eight(const uint8_t* p) {
  uint64_t eight;
  std::memcpy(&eight, p, 8);
  return eight;
}

inline Sixteen two_eights(uint64_t first, uint64_t second) {
  typedef uint64_t Two __attribute__((vector_size(16)));
  return reinterpret_cast<Sixteen>(Two{first, second});
}

// The first (or second) eight bytes of a and b, one of each in turn.
template <bool SECOND> Sixteen interleave(Sixteen a, Sixteen b) {
  constexpr uint8_t i = SECOND ? 8 : 0;
#if defined(__clang__)
  return __builtin_shufflevector(a, b, i, i + 16, i + 1, i + 17, i + 2, i + 18, i + 3, i + 19, i + 4, i + 20, i + 5, i + 21, i + 6,
                                 i + 22, i + 7, i + 23);
#else
  return __builtin_shuffle(a, b, Sixteen{i, i + 16, i + 1, i + 17, i + 2, i + 18, i + 3, i + 19, i + 4, i + 20, i + 5, i + 21, i + 6,
                                         i + 22, i + 7, i + 23});
#endif
}

// Sixteen floats in vectors of LANES.
struct Values {
  Floats part[16 / LANES];
};

inline INLINED void store(float* out, const Values& v) {
  unroll<16 / LANES>([&](auto i) INLINED { store_floats(out + LANES * i, v.part[i]); });
}

#if defined(BILLFISH_simd_neon)  // which header the level has, by CMake

// Sixteen floats, byte j of float i being byte from(i, j) of two vectors, 16 and up of the second, 255 for a zero. The
// instruction wants neighbouring registers; with its intrinsic, gcc 12 copies both for each of the four, or spills them.
template <class F> inline INLINED Values pick(uint8x16_t first, uint8x16_t second, F from) {
  Values v;
  uint8x16_t index[4];
  unroll<16>([&](auto i) INLINED { unroll<4>([&](auto j) INLINED { index[i / 4][i % 4 * 4 + j] = from(i, j); }); });
  register uint8x16_t a asm("v30") = first, b asm("v31") = second;
  asm("tbl %0.16b, {%4.16b, %5.16b}, %6.16b\n\ttbl %1.16b, {%4.16b, %5.16b}, %7.16b\n\t"
      "tbl %2.16b, {%4.16b, %5.16b}, %8.16b\n\ttbl %3.16b, {%4.16b, %5.16b}, %9.16b"
      : "=&w"(v.part[0]), "=&w"(v.part[1]), "=&w"(v.part[2]), "=&w"(v.part[3])
      : "w"(a), "w"(b), "w"(index[0]), "w"(index[1]), "w"(index[2]), "w"(index[3]));
  return v;
}

// Floats of their upper halves, given the low and the high byte of each.
inline INLINED Values pick_halves(uint8x16_t low, uint8x16_t high) {
  return pick(low, high, [](int i, int byte) { return uint8_t(byte < 2 ? 255 : i + 16 * (byte - 2)); });
}

// Whether it pays to have a table for each scale instead of a product for each value.
constexpr bool TABLES_PAY = true;

// Values of a table of 16, each of which fits a bfloat16, the upper half of a float: two lookups make sixteen of these halves.
class Lookup {
 public:
  explicit Lookup(const float* table) {
    for (int i = 0; i < 16; i++) {
      const uint32_t bits = float_to_bits(table[i]);
      low_[i] = uint8_t(bits >> 16), high_[i] = uint8_t(bits >> 24);
    }
  }
  explicit Lookup(const uint8_t* rows) : low_(vld1q_u8(rows)), high_(vld1q_u8(rows + 16)) {}
  INLINED Values operator()(Sixteen codes) const {
    return pick_halves(vqtbl1q_u8(low_, codes), vqtbl1q_u8(high_, codes));
  }

 private:
  uint8x16_t low_{}, high_{};
};

// Codes of 5 bits less a bias, by a table of 32.
class Counted5 {
 public:
  explicit Counted5(int bias) {
    for (int i = 0; i < 32; i++) {
      const uint32_t bits = float_to_bits(float(i - bias));
      low_[i / 16][i % 16] = uint8_t(bits >> 16), high_[i / 16][i % 16] = uint8_t(bits >> 24);
    }
  }
  INLINED Values operator()(Sixteen codes) const {
    register uint8x16_t a asm("v26") = low_[0], b asm("v27") = low_[1], c asm("v28") = high_[0], d asm("v29") = high_[1];
    uint8x16_t low, high;
    asm("tbl %0.16b, {%1.16b, %2.16b}, %3.16b" : "=w"(low) : "w"(a), "w"(b), "w"(codes));
    asm("tbl %0.16b, {%1.16b, %2.16b}, %3.16b" : "=w"(high) : "w"(c), "w"(d), "w"(codes));
    return pick_halves(low, high);
  }

 private:
  uint8x16_t low_[2] = {}, high_[2] = {};
};

// x * scale, and x * scale + offset where the product is exact. In assembly, since gcc would first copy the scale to all lanes,
// and the offset for each use. It stands in memory four times: loads are free here, and copies of registers are not.
inline Floats times(Floats x, float scale) {
  Floats product;
  asm("fmul %0.4s, %1.4s, %2.s[0]" : "=w"(product) : "w"(x), "w"(scale));
  return product;
}
inline Floats times_plus(Floats x, float scale, const float* offset) {
  Floats sum;
  asm volatile("ldr %q0, %1" : "=w"(sum) : "m"(*reinterpret_cast<const Floats*>(offset)));
  asm("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(sum) : "w"(x), "w"(scale));
  return sum;
}

// Codes less a bias. In bits 8 to 15 of the float 2^15, a code counts by ones; the difference is exact, so it is as good as a
// conversion, which blocks a pipe for two cycles.
class Counted {
 public:
  explicit Counted(int bias) : offset_(vdupq_n_f32(32768 + float(bias))) {}
  INLINED Values operator()(Sixteen codes) const {
    Values v = pick(codes, vdupq_n_u8(0x47), [](int i, int byte) { return uint8_t(byte == 1 ? i : byte == 3 ? 16 : 255); });
    unroll<4>([&](auto i) INLINED { v.part[i] = vsubq_f32(v.part[i], offset_); });
    return v;
  }

 private:
  Floats offset_;
};

#else

constexpr bool TABLES_PAY = false;

#if defined(BILLFISH_simd_avx512)
inline __m512i widened(Sixteen codes) { return _mm512_cvtepu8_epi32(reinterpret_cast<__m128i>(codes)); }
struct Counted {
  Floats bias;
  explicit Counted(int b) : bias(splat(float(b))) {}
  INLINED Values operator()(Sixteen codes) const { return {{_mm512_sub_ps(_mm512_cvtepi32_ps(widened(codes)), bias)}}; }
};
struct Lookup {
  Floats table;
  explicit Lookup(const float* t) : table(load_floats(t)) {}
  INLINED Values operator()(Sixteen codes) const { return {{_mm512_permutexvar_ps(widened(codes), table)}}; }
};
#elif defined(BILLFISH_simd_avx2)
template <int HALF> __m256i widened(Sixteen codes) {
  const __m128i v = reinterpret_cast<__m128i>(codes);
  return _mm256_cvtepu8_epi32(HALF ? _mm_unpackhi_epi64(v, v) : v);
}
struct Counted {
  Floats bias;
  explicit Counted(int b) : bias(splat(float(b))) {}
  INLINED Values operator()(Sixteen codes) const {
    return {{_mm256_sub_ps(_mm256_cvtepi32_ps(widened<0>(codes)), bias), _mm256_sub_ps(_mm256_cvtepi32_ps(widened<1>(codes)), bias)}};
  }
};
// Both halves of the table, and bit 3 of the code says which.
struct Lookup {
  Floats first, second;
  explicit Lookup(const float* t) : first(load_floats(t)), second(load_floats(t + 8)) {}
  Floats eight(__m256i codes) const {
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, codes), _mm256_permutevar8x32_ps(second, codes),
                            _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
  }
  INLINED Values operator()(Sixteen codes) const { return {{eight(widened<0>(codes)), eight(widened<1>(codes))}}; }
};
#else
template <class F> inline Values each_value(F f) {
  alignas(64) float out[16];
  for (int i = 0; i < 16; i++) out[i] = f(i);
  Values v;
  unroll<16 / LANES>([&](auto i) { v.part[i] = load_floats(out + LANES * i); });
  return v;
}
struct Counted {
  int bias;
  explicit Counted(int b) : bias(b) {}
  INLINED Values operator()(Sixteen codes) const { return each_value([&](int i) { return float(int(codes[i]) - bias); }); }
};
struct Lookup {
  const float* table;
  explicit Lookup(const float* t) : table(t) {}
  INLINED Values operator()(Sixteen codes) const { return each_value([&](int i) { return table[codes[i]]; }); }
};
#endif

using Counted5 = Counted;

inline Floats times(Floats x, float scale) { return x * scale; }
inline Floats times_plus(Floats x, float scale, const float* offset) { return x * scale + *offset; }

#endif

}  // namespace BILLFISH_ISA
