// e^x, for loops that a compiler turns into vectors.
#pragma once
#include <algorithm>

#include "simd/halves.h"

namespace BILLFISH_ISA {

// e^x without a branch, so that loops over it vectorise; 1e-7 relative. x = n ln 2 + r: 2^n goes into the exponent's bits,
// e^r is Taylor's polynomial, |r| <= 0.35. The magic number rounds to n (see activations/quantize.h). What would be below the
// smallest normal number is that number.
inline float exponential(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  const float shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
  const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  float p = 1.0f / 720;
  p = p * r + 1.0f / 120, p = p * r + 1.0f / 24, p = p * r + 1.0f / 6, p = p * r + 0.5f, p = p * r + 1.0f, p = p * r + 1.0f;
  return bits_to_float(float_to_bits(p) + ((float_to_bits(shifted) - 0x4b400000u) << 23));
}

// The same for x <= 0, in vectors: a compiler's own would ask of every number whether it is NaN.
inline Floats exponential(Floats x) {
  x = larger(splat(-87.0f), x);  // in this order: NaN stays NaN on x86 too
  const Floats shifted = multiply_add(splat(12582912.0f), x, splat(1.44269504f)), n = add(shifted, splat(-12582912.0f));
  const Floats r = multiply_add(multiply_add(x, n, splat(-0.693145752f)), n, splat(-1.42860677e-6f));
  Floats p = splat(1.0f / 720);
  for (float coefficient : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = multiply_add(splat(coefficient), p, r);
  return times_power(p, shifted);
}

}  // namespace BILLFISH_ISA
