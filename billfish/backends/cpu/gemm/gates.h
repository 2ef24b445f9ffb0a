// What a gated feed-forward part does to its gate and up rows, for one ISA level.
#pragma once
#include <algorithm>

#include "layout/problem.h"
#include "simd/exponential.h"

namespace BILLFISH_ISA {

using billfish::Gate;

constexpr float CLAMP = 7.0f, STEEPNESS = 1.702f;  // of clamped_silu
constexpr int GATES_TOGETHER = 16, GATE_VECTORS = GATES_TOGETHER / LANES;

inline Floats negative(Floats x) { return multiply(x, splat(-1)); }
inline Floats at_most(float top, Floats x) { return negative(larger(splat(-top), negative(x))); }

// Sixteen of them. SiLU is g sigmoid(g). GELU by its tanh formula is g sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3)).
template <Gate GATE> inline void open_sixteen(const float* gate, const float* up, float* out) {
  Floats g[GATE_VECTORS], u[GATE_VECTORS], e[GATE_VECTORS];
  const auto each = [](auto f) INLINED { repeat<GATE_VECTORS>(f); };
  each([&](int i) INLINED { g[i] = load_floats(gate + i * LANES), u[i] = load_floats(up + i * LANES); });
  if constexpr (GATE == Gate::clamped_silu) each([&](int i) INLINED { g[i] = at_most(CLAMP, g[i]), u[i] = add(at_most(CLAMP, larger(splat(-CLAMP), u[i])), splat(1)); });
  each([&](int i) INLINED {
    Floats z = g[i];
    if constexpr (GATE == Gate::gelu) z = multiply(z, multiply_add(splat(1.59576912f), multiply(z, z), splat(0.0713548163f)));
    if constexpr (GATE == Gate::clamped_silu) z = multiply(z, splat(STEEPNESS));
    e[i] = negative(larger(splat(-LARGEST_EXPONENT), z));
  });
  exponentials(e);
  each([&](int i) INLINED { store_floats(out + i * LANES, multiply(divide(g[i], add(splat(1), e[i])), u[i])); });
}

// x Phi(x), where Phi is the normal distribution's: max(x, 0) - |x| Q(|x|) with Q(a) = (b1 t + ... + b5 t^5) e^(-a^2 / 2) and t = 1 / (1 + p a),
// Abramowitz and Stegun's 7.1.26 with its factors halved: Q is wrong by 1e-7 at most. From 16 on it is 0 beside x.
constexpr float ERF_P = 0.231641888f, ERF_B[5] = {0.127414796f, -0.142248368f, 0.710706871f, -0.726576013f, 0.530702714f};

template <> inline void open_sixteen<Gate::gelu_erf>(const float* gate, const float* up, float* out) {
  Floats g[GATE_VECTORS], a[GATE_VECTORS], e[GATE_VECTORS];
  const auto each = [](auto f) INLINED { repeat<GATE_VECTORS>(f); };
  each([&](int i) INLINED {
    g[i] = load_floats(gate + i * LANES);
    a[i] = at_most(16, larger(negative(g[i]), g[i]));
    e[i] = multiply(multiply(a[i], a[i]), splat(-0.5f));
  });
  exponentials(e);
  each([&](int i) INLINED {
    const Floats t = divide(splat(1), multiply_add(splat(1), a[i], splat(ERF_P)));
    Floats q = splat(ERF_B[4]);
    for (int j = 3; j >= 0; j--) q = multiply_add(splat(ERF_B[j]), q, t);
    const Floats behind = multiply(multiply(multiply(q, t), e[i]), a[i]);
    store_floats(out + i * LANES, multiply(add(larger(splat(0), g[i]), negative(behind)), load_floats(up + i * LANES)));
  });
}

template <Gate GATE> void open_all(const float* gate, const float* up, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + GATES_TOGETHER <= count; i += GATES_TOGETHER) open_sixteen<GATE>(gate + i, up + i, out + i);
  if (i == count) return;
  float rest[3][GATES_TOGETHER] = {};
  std::copy(gate + i, gate + count, rest[0]), std::copy(up + i, up + count, rest[1]);
  open_sixteen<GATE>(rest[0], rest[1], rest[2]);
  std::copy_n(rest[2], count - i, out + i);
}

void open_gate(const float* gate, const float* up, Gate activation, int64_t count, float* out);

}  // namespace BILLFISH_ISA
