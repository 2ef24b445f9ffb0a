// The AVX-512 instructions that simd/avx512.h uses, one lane after the other: to run that level on any machine, slowly.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd/halves.h"

// Kernels are made of thousands of these: as calls, or they take minutes to compile.
#define EMULATED __attribute__((noinline)) inline

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
struct __m512 : Lanes<64> {};

EMULATED __m128i _mm_loadu_si128(const __m128i* p) { return __m128i::at(p); }
EMULATED __m256i _mm256_loadu_si256(const __m256i* p) { return __m256i::at(p); }
EMULATED __m512i _mm512_loadu_si512(const void* p) { return __m512i::at(p); }
EMULATED __m512 _mm512_loadu_ps(const void* p) { return {__m512i::at(p)}; }
EMULATED void _mm512_storeu_si512(void* p, __m512i v) { std::memcpy(p, v.bytes, 64); }
EMULATED void _mm512_storeu_ps(void* p, __m512 v) { std::memcpy(p, v.bytes, 64); }
EMULATED __m512 _mm512_castsi512_ps(__m512i v) { return {v}; }
EMULATED __m512i _mm512_castps_si512(__m512 v) { return __m512i::at(v.bytes); }

EMULATED __m512i _mm512_set1_epi8(char x) { return __m512i::of<char>([=](int) { return x; }); }
EMULATED __m512i _mm512_set1_epi32(int x) { return __m512i::of<int>([=](int) { return x; }); }
EMULATED __m512 _mm512_set1_ps(float x) { return {__m512i::of<float>([=](int) { return x; })}; }
EMULATED __m512i _mm512_broadcast_i32x4(__m128i v) { return __m512i::of<uint8_t>([=](int i) { return v.bytes[i % 16]; }); }

#define LANEWISE(name, vector, type, expression)                                                   \
  EMULATED vector name(vector a, vector b) {                                                         \
    return {__m512i::of<type>([=](int i) { return a.get<type>(i) expression b.get<type>(i); })};   \
  }
LANEWISE(_mm512_and_si512, __m512i, uint64_t, &)
LANEWISE(_mm512_or_si512, __m512i, uint64_t, |)
LANEWISE(_mm512_xor_si512, __m512i, uint64_t, ^)
LANEWISE(_mm512_sub_epi8, __m512i, uint8_t, -)
LANEWISE(_mm512_add_epi32, __m512i, uint32_t, +)
LANEWISE(_mm512_sub_epi32, __m512i, uint32_t, -)
LANEWISE(_mm512_add_ps, __m512, float, +)
LANEWISE(_mm512_sub_ps, __m512, float, -)
LANEWISE(_mm512_mul_ps, __m512, float, *)
LANEWISE(_mm512_div_ps, __m512, float, /)
#undef LANEWISE
// The second one where either is NaN, as the instruction has it.
EMULATED __m512 _mm512_max_ps(__m512 a, __m512 b) {
  return {__m512i::of<float>([=](int i) { return a.get<float>(i) > b.get<float>(i) ? a.get<float>(i) : b.get<float>(i); })};
}

#define SHIFTED(name, vector, type, direction) \
  EMULATED vector name(vector v, int count) { return vector::of<type>([=](int i) { return v.get<type>(i) direction count; }); }
SHIFTED(_mm256_slli_epi16, __m256i, uint16_t, <<)
SHIFTED(_mm512_slli_epi16, __m512i, uint16_t, <<)
SHIFTED(_mm512_srli_epi16, __m512i, uint16_t, >>)
SHIFTED(_mm512_slli_epi32, __m512i, uint32_t, <<)
SHIFTED(_mm512_srli_epi32, __m512i, uint32_t, >>)
SHIFTED(_mm512_srai_epi32, __m512i, int32_t, >>)
#undef SHIFTED

// Bit 4a + 2b + c of the table, for each bit of the three.
EMULATED __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  return __m512i::of<uint8_t>([=](int i) {
    int byte = 0;
    for (int bit = 0; bit < 8; bit++)
      byte |= (table >> ((a.bytes[i] >> bit & 1) * 4 + (b.bytes[i] >> bit & 1) * 2 + (c.bytes[i] >> bit & 1)) & 1) << bit;
    return byte;
  });
}
EMULATED __m512i _mm512_shuffle_epi8(__m512i v, __m512i index) {  // within each 16 bytes
  return __m512i::of<uint8_t>([=](int i) { return index.bytes[i] & 128 ? 0 : v.bytes[i / 16 * 16 + (index.bytes[i] & 15)]; });
}
EMULATED __m512 _mm512_permutexvar_ps(__m512i index, __m512 v) {
  return {__m512i::of<float>([=](int i) { return v.get<float>(index.get<int32_t>(i) & 15); })};
}
EMULATED __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i u, __m512i s) {
  return __m512i::of<int32_t>([=](int lane) {
    int32_t total = sum.get<int32_t>(lane);
    for (int i = 4 * lane; i < 4 * lane + 4; i++) total += int32_t(u.bytes[i]) * int8_t(s.bytes[i]);
    return total;
  });
}
EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return {__m512i::of<float>([=](int i) { return std::fma(a.get<float>(i), b.get<float>(i), c.get<float>(i)); })};
}
EMULATED __m512 _mm512_cvtepi32_ps(__m512i v) { return {__m512i::of<float>([=](int i) { return v.get<int32_t>(i); })}; }
EMULATED __m512i _mm512_cvtepu8_epi32(__m128i v) { return __m512i::of<int32_t>([=](int i) { return v.bytes[i]; }); }
EMULATED __m512i _mm512_cvtepu16_epi32(__m256i v) { return __m512i::of<int32_t>([=](int i) { return v.get<uint16_t>(i); }); }
EMULATED __m256i _mm256_cvtepu8_epi16(__m128i v) { return __m256i::of<uint16_t>([=](int i) { return v.bytes[i]; }); }
EMULATED __m512 _mm512_cvtph_ps(__m256i v) { return {__m512i::of<float>([=](int i) { return BILLFISH_ISA::half_to_float(v.get<uint16_t>(i)); })}; }
