// What a gated feed-forward part does to its gate and up rows, for one ISA level.
#pragma once
#include <algorithm>

#include "layout/problem.h"
#include "simd/exponential.h"

namespace BILLFISH_ISA {

using billfish::Gate;

constexpr float CLAMP = 7.0f, STEEPNESS = 1.702f;  // of clamped_silu

// SiLU is g sigmoid(g). GELU by its tanh formula is g sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3)).
template <Gate GATE> inline float opened(float g, float u) {
  if constexpr (GATE == Gate::clamped_silu) g = std::min(g, CLAMP), u = std::min(std::max(u, -CLAMP), CLAMP) + 1.0f;
  const float z = GATE == Gate::gelu ? g * (1.59576912f + 0.0713548163f * (g * g)) : GATE == Gate::clamped_silu ? STEEPNESS * g : g;
  return g / (1.0f + exponential(-z)) * u;
}

// Sixteen at a time, so that a compiler makes vectors of them, and then the rest.
template <Gate GATE> void open_all(const float* gate, const float* up, int64_t count, float* out) {
  constexpr int together = 16;
  int64_t i = 0;
  for (; i + together <= count; i += together)
    for (int j = 0; j < together; j++) out[i + j] = opened<GATE>(gate[i + j], up[i + j]);
  for (; i < count; i++) out[i] = opened<GATE>(gate[i], up[i]);
}

void open_gate(const float* gate, const float* up, Gate activation, int64_t count, float* out);

}  // namespace BILLFISH_ISA
