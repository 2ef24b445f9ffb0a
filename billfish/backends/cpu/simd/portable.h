// Any machine: the compiler's own vectors of 16 bytes, which it maps to whatever there is.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd/halves.h"
#include "simd/wide_sums.h"

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
inline Bytes load_operand(const uint8_t* p) { return load_bytes(p); }
inline void store_bytes(uint8_t* p, Bytes v) { std::memcpy(p, &v, sizeof v); }
inline Bytes splat_byte(uint8_t x) { return Bytes{} + x; }
inline Bytes bit_and(Bytes a, Bytes b) { return a & b; }
inline Bytes bit_or(Bytes a, Bytes b) { return a | b; }
inline Bytes bit_xor(Bytes a, Bytes b) { return a ^ b; }
inline Bytes subtract(Bytes a, Bytes b) { return a - b; }
template <int N> Bytes shift_right(Bytes a) { return a >> N; }
template <int N> Bytes shift_left(Bytes a) { return a << N; }
// The bits of `other` where `mask` has ones, else those of a, which are 0 there.
inline Bytes merge(Bytes a, Bytes other, int mask) { return a | (other & uint8_t(mask)); }
// The top N bits of a, and below them b shifted right by N.
template <int N> Bytes insert_right(Bytes a, Bytes b) { return merge(a & uint8_t(0xff00 >> N), b >> N, 0xff >> N); }
// High nibbles, signed: code - 8, because prepack has flipped their top bit.
inline Bytes high_nibbles(Bytes a) { return ((a >> 4) ^ 8) - 8; }
constexpr int HIGH_FLIP = 8;
inline Bytes lookup(const uint8_t* table, Bytes index) {
  Bytes out{};
  for (int i = 0; i < 16; i++) out[i] = table[index[i]];
  return out;
}

inline Ints splat_int(int32_t x) { return Ints{} + x; }
inline Ints add(Ints a, Ints b) { return a + b; }
inline Ints subtract(Ints a, Ints b) { return a - b; }
template <int N> Ints shift_left(Ints a) { return a * (1 << N); }

// Byte K of each lane, sign-extended. Shifting left in unsigned arithmetic is defined for every value.
template <int K> Ints signed_bytes(Bytes v) {
  typedef uint32_t Words __attribute__((vector_size(16)));
  return Ints(load<Words>(&v) << (24 - 8 * K)) >> 24;
}

struct Activations { const int8_t* p; };
inline Activations load_activations(const int8_t* p) { return {p}; }
constexpr bool X_IN_MEMORY = true;  // dot() takes x from where it lies, and not a lane of a register
template <int L, billfish::Operand> Ints dot(Ints sum, Bytes w, Activations x) {
  return sum + signed_bytes<0>(w) * x.p[4 * L] + signed_bytes<1>(w) * x.p[4 * L + 1] + signed_bytes<2>(w) * x.p[4 * L + 2] +
         signed_bytes<3>(w) * x.p[4 * L + 3];
}
constexpr int BUFFER_ROWS = 8, PACKED_BUFFER_ROWS = 8, GROUP_BUFFER_ROWS = 8;  // see simd/neon.h
constexpr bool FEW_FROM_STREAM = false;
constexpr int BUFFERED_ONE_BY_ONE = 2;
constexpr bool TAILS = false;
constexpr int HELD_ROWS = 0;
constexpr int SLICES_OF_FEW = 1, LINES_OF_SCALES = 1;
constexpr int MANY_TOGETHER = 4;
constexpr bool ROW_OF_X_FIRST = false;
constexpr bool DIGITS_IN_ONE_SUM = false;
constexpr int ONE_BY_ONE_16 = 2;  // see simd/neon.h
constexpr int ONE_ROW_AHEAD = 0;  // see simd/neon.h
constexpr int QUADS_TOGETHER = 1;  // see simd/neon.h
// What bytes of signed weights have more than their values when dot() gets them.
constexpr int SIGNED_BIAS = 0;
// Whether dot() takes any byte, two nibbles at once for example.
constexpr bool WHOLE_BYTES_FIT = true;

inline Floats load_floats(const float* p) { return load<Floats>(p); }
inline Floats load_constant(const float* p) { return load_floats(p); }  // see simd/neon.h
inline void store_floats(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
inline Floats splat(float x) { return x - Floats{}; }  // a sum would make -0 of x 0
inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats multiply(Floats a, Floats b) { return a * b; }
inline Floats divide(Floats a, Floats b) { return a / b; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline float largest(Floats v) {
  float numbers[LANES];
  store_floats(numbers, v);
  return *std::max_element(numbers, numbers + LANES);
}
inline Floats multiply_add(Floats sum, Floats a, Floats b) { return sum + a * b; }
inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }
// p * 2^n, for a p between 0.5 and 2 and shifted = n + 1.5 * 2^23: n is in its last bits, and goes to the exponent of p.
inline Floats times_power(Floats p, Floats shifted) {
  typedef uint32_t Words __attribute__((vector_size(16)));
  return Floats(Words(p) + (Words(shifted) << 23));
}
// Byte K of each 32-bit lane, less byte_offset(bias).
inline Floats byte_offset(int bias) { return splat(float(bias)); }
template <int K> Floats byte_to_floats(Bytes v, Floats offset) { return to_floats(signed_bytes<K>(v) & 255) - offset; }

// Integer sums start at zero and are converted; see simd/neon.h for the other way.
constexpr int32_t SUM_START = 0;
constexpr float SUM_OFFSET = 0;
constexpr int START_INTS = 1;
inline Ints load_start(const int32_t* p) { return splat_int(*p); }
template <bool MAGIC> Floats sum_to_floats(Ints v) { return to_floats(v); }
template <bool MAGIC> Floats difference_to_floats(Ints a, Ints b) { return to_floats(subtract(a, b)); }
template <bool MAGIC> Floats scale_sum(Ints v, Floats scale, const float*) { return multiply(to_floats(v), scale); }

// Byte K of each lane, less a bias, times the scale; offset is (-BYTE_START - bias) * scale.
constexpr float BYTE_START = 0;
template <int K> Floats times_byte(Floats scale, const float* offset, Bytes v) { return multiply_add(load_floats(offset), byte_to_floats<K>(v, splat(0)), scale); }

// For exact products: whether few rows go through dot(), and for many, vectors of sums that registers hold for each of four rows, and how many times four.
constexpr bool EXACT_IN_DIGITS = false;
constexpr int SUM_VECTORS = 2, SUM_BUNDLES = 1;
constexpr int REGISTER_ROWS = 8;

struct FloatActivations { const float* p; };
inline FloatActivations load_x(const float* p) { return {p}; }
template <int L> Floats multiply_add_x(Floats sum, Floats w, FloatActivations x) { return sum + w * x.p[L]; }

template <int L> Floats multiply_x(Floats w, FloatActivations x) { return w * x.p[L]; }

template <class F> inline Floats each_lane(F f) { return Floats{f(0), f(1), f(2), f(3)}; }
__attribute__((noinline)) inline Floats halves_to_floats(const uint8_t* p) {  // a quarter of what kernels are to compile, if in each
  return each_lane([&](int i) { return half_to_float(uint16_t(p[2 * i] | p[2 * i + 1] << 8)); });
}
inline Floats bfloats_to_floats(const uint8_t* p) {
  return each_lane([&](int i) { return bits_to_float(uint32_t(p[2 * i] | p[2 * i + 1] << 8) << 16); });
}
// (field - bias) * d for the rows from ROW on, where the field of a byte is byte >> SHIFT & MASK; offset is -bias * d.
inline Floats times_bytes_offset(Floats d, int bias) { return d * float(-bias); }
template <int ROW, int SHIFT, int MASK> Floats byte_fields(const uint8_t* rows, int bias) {  // field - bias
  return each_lane([&](int i) { return float((rows[ROW + i] >> SHIFT & MASK) - bias); });
}
template <int ROW, int SHIFT, int MASK> Floats times_bytes(Floats d, const float* offset, const uint8_t* rows) {
  return load_floats(offset) + byte_fields<ROW, SHIFT, MASK>(rows, 0) * d;
}
template <int ROW> Floats exponents_to_floats(const uint8_t* rows) {
  return each_lane([&](int i) { return bits_to_float(uint32_t(rows[ROW + i]) << 23); });
}
// Bytes 0eeeemmm to a half whose exponent is biased by 8 more: 2^-8 of the E4M3 value.
template <int ROW> Floats e4m3_to_floats(const uint8_t* rows) {
  return each_lane([&](int i) { return half_to_float(uint16_t(rows[ROW + i] << 7)); });
}

// Four k of LANES rows, as Bytes has them: k[j] is byte j of every lane, as a number.
struct FourFloats {
  Floats k[4];
};
template <class F> inline FourFloats each_byte(F f) {
  FourFloats four;
  for (int k = 0; k < 4; k++) four.k[k] = each_lane([&](int i) { return f(4 * i + k); });
  return four;
}
// Bytes seeeemmm to 2^-120 of the E4M3 value: sign, exponent and mantissa where float32 has them.
inline FourFloats e4m3_to_floats(Bytes v) {
  return each_byte([&](int i) { return bits_to_float(uint32_t(v[i] & 128) << 24 | uint32_t(v[i] & 127) << 20); });
}
struct FloatTable { float numbers[16]; };  // a look-up in 16 float32
inline FloatTable load_table(const uint8_t* numbers) { return load<FloatTable>(numbers); }
inline FourFloats look_up(const FloatTable& table, Bytes index) {
  return each_byte([&](int i) { return table.numbers[index[i]]; });
}

}  // namespace BILLFISH_ISA
