// Any machine: the compiler's own vectors of 16 bytes, which it maps to whatever there is.
#pragma once
#include <cstdint>
#include <cstring>

#include "halves.h"

namespace BILLFISH_ISA {

constexpr int LANES = 4;
constexpr int TILE_ROWS = 8;

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(16)));

template <class V> inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Bytes load_bytes(const uint8_t* p) { return load<Bytes>(p); }
inline void store_bytes(uint8_t* p, Bytes v) { std::memcpy(p, &v, sizeof v); }
inline Bytes splat_byte(uint8_t x) { return Bytes{} + x; }
inline Bytes bit_and(Bytes a, Bytes b) { return a & b; }
inline Bytes bit_or(Bytes a, Bytes b) { return a | b; }
inline Bytes subtract(Bytes a, Bytes b) { return a - b; }
template <int N> Bytes shift_right(Bytes a) { return a >> N; }
template <int N> Bytes shift_left(Bytes a) { return a << N; }
inline Bytes lookup(const uint8_t* table, Bytes index) {
  Bytes out{};
  for (int i = 0; i < 16; i++) out[i] = table[index[i]];
  return out;
}

inline Ints splat_int(int32_t x) { return Ints{} + x; }
inline Ints add(Ints a, Ints b) { return a + b; }
template <int N> Ints shift_left(Ints a) { return a * (1 << N); }

// Byte K of each lane, sign-extended. Shifting left in unsigned arithmetic is defined for every value.
template <int K> Ints signed_bytes(Bytes v) {
  typedef uint32_t Words __attribute__((vector_size(16)));
  return Ints(load<Words>(&v) << (24 - 8 * K)) >> 24;
}

struct Activations { const int8_t* p; };
inline Activations load_activations(const int8_t* p) { return {p}; }
template <int L, bool SIGNED> Ints dot(Ints sum, Bytes w, Activations x) {
  return sum + signed_bytes<0>(w) * x.p[4 * L] + signed_bytes<1>(w) * x.p[4 * L + 1] + signed_bytes<2>(w) * x.p[4 * L + 2] +
         signed_bytes<3>(w) * x.p[4 * L + 3];
}
constexpr int SIGNED_BIAS = 0;

inline Floats load_floats(const float* p) { return load<Floats>(p); }
inline void store_floats(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
inline Floats splat(float x) { return Floats{} + x; }
inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats multiply(Floats a, Floats b) { return a * b; }
inline Floats multiply_add(Floats sum, Floats a, Floats b) { return sum + a * b; }
inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }
template <int K> Floats signed_byte(Bytes v) { return to_floats(signed_bytes<K>(v)); }

struct FloatActivations { const float* p; };
inline FloatActivations load_x(const float* p) { return {p}; }
template <int L> Floats multiply_add_x(Floats sum, Floats w, FloatActivations x) { return sum + w * x.p[L]; }

template <int L> Floats multiply_x(Floats w, FloatActivations x) { return w * x.p[L]; }

template <class F> inline Floats each_lane(F f) { return Floats{f(0), f(1), f(2), f(3)}; }
inline Floats halves_to_floats(const uint8_t* p) {
  return each_lane([&](int i) { return half_to_float(uint16_t(p[2 * i] | p[2 * i + 1] << 8)); });
}
inline Floats unsigned_to_floats(const uint8_t* p) { return each_lane([&](int i) { return float(p[i]); }); }
inline Floats low_nibbles_to_floats(const uint8_t* p) { return each_lane([&](int i) { return float(p[i] & 15); }); }
inline Floats high_nibbles_to_floats(const uint8_t* p) { return each_lane([&](int i) { return float(p[i] >> 4); }); }
inline Floats signed_to_floats(const uint8_t* p) { return each_lane([&](int i) { return float(int8_t(p[i])); }); }
inline Floats exponents_to_floats(const uint8_t* p) {
  return each_lane([&](int i) { return bits_to_float(uint32_t(p[i]) << 23); });
}
inline Floats e4m3_to_floats(const uint8_t* p) {
  return each_lane([&](int i) { return half_to_float(uint16_t((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7)); });
}

}  // namespace BILLFISH_ISA
