// e^x, for single numbers and for vectors.
#pragma once
#include <algorithm>

#include "simd/halves.h"
#include "simd/unroll.h"

namespace BILLFISH_ISA {

// x = (n + r) ln 2: 2^n goes into the exponent's bits, 2^r is a polynomial with a relative error of 4e-7 at most, |r| <= 0.5, which is exact for
// 0. The magic number rounds to n (see activations/quantize.h). What would be below the smallest normal number is that number.
constexpr float LOG2_E = 1.44269504f, ROUNDING = 12582912.0f, LEAST_EXPONENT = -87.0f, LARGEST_EXPONENT = 88.0f;
constexpr float POWERS_OF_R[6] = {1.0f, 0.693142831f, 0.240223507f, 0.0555740047f, 0.00966628252f, 0.00111255077f};

inline float exponential(float x) {
  x = std::min(std::max(x, LEAST_EXPONENT), LARGEST_EXPONENT);
  const float shifted = x * LOG2_E + ROUNDING, n = shifted - ROUNDING;
  const float r = ((x - n * 0.693145752f) - n * 1.42860677e-6f) * LOG2_E;
  float p = POWERS_OF_R[5];
  for (int i = 4; i >= 0; i--) p = p * r + POWERS_OF_R[i];
  return bits_to_float(float_to_bits(p) + ((float_to_bits(shifted) - 0x4b400000u) << 23));
}

// What sums of exponentials() begin with, in memory as often as a vector has lanes: see load_constant.
struct alignas(64) Repeated {
  float x[LANES];
  constexpr explicit Repeated(float value) : x() {
    for (float& each : x) each = value;
  }
};
constexpr Repeated MINUS_ROUNDING(-ROUNDING), R0(POWERS_OF_R[0]), R2(POWERS_OF_R[2]), R4(POWERS_OF_R[4]);

// N vectors of numbers up to LARGEST_EXPONENT, in place, step by step: none waits for the steps of another. NaN stays NaN.
template <int N> inline void exponentials(Floats (&x)[N]) {
  Floats minus_shifted[N], r[N], square[N], p[N], high[N];
  const auto each = [](auto f) INLINED { repeat<N>(f); };
  each([&](int i) INLINED { x[i] = larger(splat(LEAST_EXPONENT), x[i]); });  // in this order: NaN stays NaN on x86 too
  each([&](int i) INLINED { minus_shifted[i] = multiply_add(load_constant(MINUS_ROUNDING.x), x[i], splat(-LOG2_E)); });
  each([&](int i) INLINED { r[i] = add(minus_shifted[i], splat(ROUNDING)); });  // -n
  each([&](int i) INLINED { r[i] = multiply_add(r[i], x[i], splat(LOG2_E)); });
  each([&](int i) INLINED { high[i] = multiply_add(load_constant(R4.x), r[i], splat(POWERS_OF_R[5])); });
  each([&](int i) INLINED { square[i] = multiply(r[i], r[i]); });
  each([&](int i) INLINED { p[i] = multiply_add(load_constant(R2.x), r[i], splat(POWERS_OF_R[3])); });
  each([&](int i) INLINED { p[i] = multiply_add(p[i], high[i], square[i]); });
  each([&](int i) INLINED { high[i] = multiply_add(load_constant(R0.x), r[i], splat(POWERS_OF_R[1])); });
  each([&](int i) INLINED { p[i] = multiply_add(high[i], p[i], square[i]); });
  each([&](int i) INLINED { x[i] = times_power(p[i], minus_shifted[i]); });  // whose sign falls out
}

}  // namespace BILLFISH_ISA
