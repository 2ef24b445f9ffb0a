// The instructions that simd/avx512.h, simd/avx2.h and simd/avx_vnni.h use, one lane after the other: to run these levels on any machine, slowly.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "simd/halves.h"

// Kernels are made of thousands of these: as calls, or they take minutes to compile.
#define EMULATED __attribute__((noinline)) inline
// Theirs only say what stays in a register of x86.
#define asm(...)

template <int BYTES> struct Lanes {
  alignas(BYTES) uint8_t bytes[BYTES];
  template <class T> T get(int i) const {
    T lane;
    std::memcpy(&lane, bytes + i * int(sizeof lane), sizeof lane);
    return lane;
  }
  template <class T> void set(int i, T lane) { std::memcpy(bytes + i * int(sizeof lane), &lane, sizeof lane); }
  template <class T, class F> static Lanes of(F f) {  // f(0), f(1), ...
    Lanes all;
    for (int i = 0; i < BYTES / int(sizeof(T)); i++) all.set<T>(i, T(f(i)));
    return all;
  }
  static Lanes at(const void* p) {
    Lanes all;
    std::memcpy(all.bytes, p, BYTES);
    return all;
  }
};
using __m128i = Lanes<16>;
using __m256i = Lanes<32>;
using __m512i = Lanes<64>;
struct __m256 : Lanes<32> {};
struct __m512 : Lanes<64> {};

// ---- vectors of 32 and of 64 bytes ----------------------------------------------------------------------------------------

#define LANEWISE(name, vector, type, expression) \
  EMULATED vector name(vector a, vector b) { return {vector::of<type>([=](int i) { return a.get<type>(i) expression b.get<type>(i); })}; }
#define SHIFTED(name, vector, type, direction) \
  EMULATED vector name(vector v, int count) { return vector::of<type>([=](int i) { return v.get<type>(i) direction count; }); }

// One instruction set: what its names begin with, how many bits it has, and its vectors.
#define BOTH_SIZES(prefix, bits, integers, floats)                                                                                       \
  EMULATED floats prefix##_loadu_ps(const void* p) { return {integers::at(p)}; }                                                         \
  EMULATED void prefix##_storeu_ps(void* p, floats v) { std::memcpy(p, v.bytes, sizeof v); }                                             \
  EMULATED floats prefix##_castsi##bits##_ps(integers v) { return {v}; }                                                                 \
  EMULATED integers prefix##_castps_si##bits(floats v) { return integers::at(v.bytes); }                                                 \
  EMULATED integers prefix##_set1_epi8(char x) { return integers::of<char>([=](int) { return x; }); }                                    \
  EMULATED integers prefix##_set1_epi16(short x) { return integers::of<short>([=](int) { return x; }); }                                 \
  EMULATED integers prefix##_set1_epi32(int x) { return integers::of<int>([=](int) { return x; }); }                                     \
  EMULATED floats prefix##_set1_ps(float x) { return {integers::of<float>([=](int) { return x; })}; }                                    \
  LANEWISE(prefix##_and_si##bits, integers, uint64_t, &)                                                                                 \
  LANEWISE(prefix##_or_si##bits, integers, uint64_t, |)                                                                                  \
  LANEWISE(prefix##_xor_si##bits, integers, uint64_t, ^)                                                                                 \
  LANEWISE(prefix##_sub_epi8, integers, uint8_t, -)                                                                                      \
  LANEWISE(prefix##_add_epi16, integers, uint16_t, +)                                                                                    \
  LANEWISE(prefix##_add_epi32, integers, uint32_t, +)                                                                                    \
  LANEWISE(prefix##_sub_epi32, integers, uint32_t, -)                                                                                    \
  LANEWISE(prefix##_add_ps, floats, float, +)                                                                                            \
  LANEWISE(prefix##_sub_ps, floats, float, -)                                                                                            \
  LANEWISE(prefix##_mul_ps, floats, float, *)                                                                                            \
  LANEWISE(prefix##_div_ps, floats, float, /)                                                                                            \
  SHIFTED(prefix##_slli_epi16, integers, uint16_t, <<)                                                                                   \
  SHIFTED(prefix##_srli_epi16, integers, uint16_t, >>)                                                                                   \
  SHIFTED(prefix##_srai_epi16, integers, int16_t, >>)                                                                                    \
  SHIFTED(prefix##_slli_epi32, integers, uint32_t, <<)                                                                                   \
  SHIFTED(prefix##_srli_epi32, integers, uint32_t, >>)                                                                                   \
  SHIFTED(prefix##_srai_epi32, integers, int32_t, >>)                                                                                    \
  /* The second one where either is NaN, as the instruction has it. */                                                                   \
  EMULATED floats prefix##_max_ps(floats a, floats b) {                                                                                  \
    return {integers::of<float>([=](int i) { return a.get<float>(i) > b.get<float>(i) ? a.get<float>(i) : b.get<float>(i); })};          \
  }                                                                                                                                      \
  EMULATED integers prefix##_shuffle_epi8(integers v, integers index) { /* within each 16 bytes */                                       \
    return integers::of<uint8_t>([=](int i) { return index.bytes[i] & 128 ? 0 : v.bytes[i / 16 * 16 + (index.bytes[i] & 15)]; });        \
  }                                                                                                                                      \
  EMULATED floats prefix##_fmadd_ps(floats a, floats b, floats c) {                                                                      \
    return {integers::of<float>([=](int i) { return std::fma(a.get<float>(i), b.get<float>(i), c.get<float>(i)); })};                    \
  }                                                                                                                                      \
  EMULATED floats prefix##_cvtepi32_ps(integers v) { return {integers::of<float>([=](int i) { return v.get<int32_t>(i); })}; }           \
  EMULATED integers prefix##_cvtepu8_epi32(__m128i v) { return integers::of<int32_t>([=](int i) { return v.bytes[i]; }); }
BOTH_SIZES(_mm256, 256, __m256i, __m256)
BOTH_SIZES(_mm512, 512, __m512i, __m512)
SHIFTED(_mm_slli_epi16, __m128i, uint16_t, <<)
#undef BOTH_SIZES
#undef SHIFTED
#undef LANEWISE

// The sum of the products of four unsigned and four signed bytes, and a 32-bit lane.
template <class V> V add_dot_products(V sum, V u, V s) {
  return V::template of<int32_t>([=](int lane) {
    int32_t total = sum.template get<int32_t>(lane);
    for (int i = 4 * lane; i < 4 * lane + 4; i++) total += int32_t(u.bytes[i]) * int8_t(s.bytes[i]);
    return total;
  });
}

EMULATED __m128i _mm_loadu_si128(const __m128i* p) { return __m128i::at(p); }
EMULATED __m128i _mm_loadl_epi64(const __m128i* p) {
  __m128i low{};
  std::memcpy(low.bytes, p, 8);
  return low;
}
EMULATED __m128i _mm_cvtepu8_epi16(__m128i v) { return __m128i::of<uint16_t>([=](int i) { return v.bytes[i]; }); }

// ---- AVX2 and AVX-VNNI ------------------------------------------------------------------------------------------------------

EMULATED __m256i _mm256_loadu_si256(const __m256i* p) { return __m256i::at(p); }
EMULATED void _mm256_storeu_si256(__m256i* p, __m256i v) { std::memcpy(p, v.bytes, 32); }
EMULATED __m256i _mm256_broadcastsi128_si256(__m128i v) { return __m256i::of<uint8_t>([=](int i) { return v.bytes[i % 16]; }); }
EMULATED __m256 _mm256_broadcast_ss(const float* p) { return _mm256_set1_ps(*p); }
EMULATED __m256i _mm256_abs_epi8(__m256i v) { return __m256i::of<uint8_t>([=](int i) { return std::abs(int8_t(v.bytes[i])); }); }
EMULATED __m256i _mm256_sign_epi8(__m256i v, __m256i sign) {
  return __m256i::of<uint8_t>([=](int i) { return sign.bytes[i] == 0 ? 0 : int8_t(sign.bytes[i]) < 0 ? -v.bytes[i] : v.bytes[i]; });
}
EMULATED __m256i _mm256_maddubs_epi16(__m256i u, __m256i s) {  // what is too large becomes the largest
  return __m256i::of<int16_t>([=](int i) {
    const int pair = u.bytes[2 * i] * int8_t(s.bytes[2 * i]) + u.bytes[2 * i + 1] * int8_t(s.bytes[2 * i + 1]);
    return pair > 32767 ? 32767 : pair < -32768 ? -32768 : pair;
  });
}
EMULATED __m256i _mm256_madd_epi16(__m256i a, __m256i b) {
  return __m256i::of<int32_t>([=](int i) { return a.get<int16_t>(2 * i) * b.get<int16_t>(2 * i) + a.get<int16_t>(2 * i + 1) * b.get<int16_t>(2 * i + 1); });
}
EMULATED __m256i _mm256_dpbusd_avx_epi32(__m256i sum, __m256i u, __m256i s) { return add_dot_products(sum, u, s); }
EMULATED __m256 _mm256_permutevar8x32_ps(__m256 v, __m256i index) {
  return {__m256i::of<float>([=](int i) { return v.get<float>(index.get<int32_t>(i) & 7); })};
}
EMULATED __m256 _mm256_blendv_ps(__m256 a, __m256 b, __m256 mask) {
  return {__m256i::of<float>([=](int i) { return (mask.get<int32_t>(i) < 0 ? b : a).get<float>(i); })};
}
EMULATED __m256i _mm256_cvtepu16_epi32(__m128i v) { return __m256i::of<int32_t>([=](int i) { return v.get<uint16_t>(i); }); }
EMULATED __m256 _mm256_cvtph_ps(__m128i v) { return {__m256i::of<float>([=](int i) { return BILLFISH_ISA::half_to_float(v.get<uint16_t>(i)); })}; }

// ---- AVX-512 ----------------------------------------------------------------------------------------------------------------

EMULATED __m512i _mm512_loadu_si512(const void* p) { return __m512i::at(p); }
EMULATED void _mm512_storeu_si512(void* p, __m512i v) { std::memcpy(p, v.bytes, 64); }
EMULATED __m512i _mm512_broadcast_i32x4(__m128i v) { return __m512i::of<uint8_t>([=](int i) { return v.bytes[i % 16]; }); }
// Bit 4a + 2b + c of the table, for each bit of the three.
EMULATED __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  return __m512i::of<uint8_t>([=](int i) {
    int byte = 0;
    for (int bit = 0; bit < 8; bit++)
      byte |= (table >> ((a.bytes[i] >> bit & 1) * 4 + (b.bytes[i] >> bit & 1) * 2 + (c.bytes[i] >> bit & 1)) & 1) << bit;
    return byte;
  });
}
EMULATED float _mm512_reduce_max_ps(__m512 v) {
  float most = v.get<float>(0);
  for (int i = 1; i < 16; i++) most = most > v.get<float>(i) ? most : v.get<float>(i);
  return most;
}
EMULATED __m512 _mm512_permutexvar_ps(__m512i index, __m512 v) {
  return {__m512i::of<float>([=](int i) { return v.get<float>(index.get<int32_t>(i) & 15); })};
}
EMULATED __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i u, __m512i s) { return add_dot_products(sum, u, s); }
EMULATED __m512i _mm512_cvtepu16_epi32(__m256i v) { return __m512i::of<int32_t>([=](int i) { return v.get<uint16_t>(i); }); }
EMULATED __m256i _mm256_cvtepu8_epi16(__m128i v) { return __m256i::of<uint16_t>([=](int i) { return v.bytes[i]; }); }
EMULATED __m512 _mm512_cvtph_ps(__m256i v) { return {__m512i::of<float>([=](int i) { return BILLFISH_ISA::half_to_float(v.get<uint16_t>(i)); })}; }
