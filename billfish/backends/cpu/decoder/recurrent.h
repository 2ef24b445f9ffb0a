// Token mixers with a state of fixed size instead of a KV cache, for one ISA level: a causal convolution over a few tokens, the gated delta
// rule, and the scan of Mamba-2.
//
// A state S [rows, columns] of a head lies as column blocks [columns / 16][rows][16]. Columns do not depend on each other, so a thread takes one
// block of one head, 8 KiB for 128 rows, through all tokens of a sequence while it stays in the first-level cache. Memory moves each state once
// per call, whether it has one token or a thousand, and a token gets the same bits however a sequence is cut into calls.
#pragma once
#include "decoder/kernels.h"

namespace BILLFISH_ISA {

using billfish::DeltaRule;
using billfish::MambaScan;

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
inline float silu(float x) { return x * sigmoid(x); }

// out [channels] = the sum of taps inputs, the oldest first, each times its row of weight [taps][channels]; then SiLU, where it is asked for.
inline void convolve(const float* const* inputs, int64_t taps, const float* weight, const float* bias, int64_t channels, bool activate, float* out) {
  for (int64_t i = 0; i < channels; i += COLUMNS) {
    float sums[COLUMNS];
    for (int j = 0; j < COLUMNS; j++) sums[j] = bias ? bias[i + j] : 0.0f;
    for (int64_t tap = 0; tap < taps; tap++)
      for (int j = 0; j < COLUMNS; j++) sums[j] += inputs[tap][i + j] * weight[tap * channels + i + j];
    if (activate)
      for (int j = 0; j < COLUMNS; j++) sums[j] = silu(sums[j]);
    std::copy(sums, sums + COLUMNS, out + i);
  }
}

inline float dot(const float* a, const float* b, int64_t count) {
  float sums[COLUMNS] = {};
  for (int64_t i = 0; i < count; i += COLUMNS)
    for (int j = 0; j < COLUMNS; j++) sums[j] += a[i + j] * b[i + j];
  return total_of(sums);
}

// x / sqrt(sum(x^2) + epsilon) * factor, in place.
inline void normalize_length(float* x, float epsilon, float factor, int64_t count) {
  scale(x, factor / std::sqrt(dot(x, x, count) + epsilon), count);
}

inline void multiply(float* x, const float* other, int64_t count) {
  for (int64_t i = 0; i < count; i++) x[i] *= other[i];
}

inline void multiply_sigmoid(float* x, const float* gate, int64_t count) {
  for (int64_t i = 0; i < count; i++) x[i] *= sigmoid(gate[i]);
}

// block [rows][16] = decay * block + column [rows] x row [16].
inline void update(float* block, int64_t rows, float decay, const float* column, const float* row) {
  constexpr int VECTORS16 = COLUMNS / LANES;
  Floats added[VECTORS16];
  unroll<VECTORS16>([&](auto c) { added[c] = load_floats(row + c * LANES); });
  const Floats kept = splat(decay);
  for (int64_t i = 0; i < rows; i++)
    unroll<VECTORS16>([&](auto c) {
      float* place = block + i * COLUMNS + c * LANES;
      store_floats(place, multiply_add(multiply(load_floats(place), kept), added[c], splat(column[i])));
    });
}

// One column block of one head through the tokens of a sequence. With S' = decay S, the delta rule writes what k does not recall yet,
//   d = beta (v - S'^T k),  S = S' + k d^T,  out = S^T q = S'^T q + (k q) d,
// so S^T k and S^T q are read from S together, before it is updated.
inline void delta_rule(const DeltaRule& rule, float* block) {
  float recalled[2 * COLUMNS], written[COLUMNS];
  for (int64_t token = 0; token < rule.tokens; token++) {
    const float* kq = rule.kq + token * rule.kq_stride;  // k, then q
    const float decay = rule.decay[token * rule.gate_stride], beta = rule.beta[token * rule.gate_stride];
    const float *v = rule.v + token * rule.v_stride, overlap = rule.overlap[token * rule.overlap_stride];
    float* out = rule.out + token * rule.out_stride;
    combine<2, true>(kq, rule.rows, block, rule.rows, recalled, COLUMNS);
    for (int j = 0; j < COLUMNS; j++) {
      written[j] = beta * (v[j] - decay * recalled[j]);
      out[j] = decay * recalled[COLUMNS + j] + overlap * written[j];
    }
    update(block, rule.rows, decay, kq, written);
  }
}

// The same for Mamba-2: S = decay S + B (step x)^T, out = S^T C + skip x.
inline void mamba_scan(const MambaScan& scan, float* block) {
  float added[COLUMNS];
  for (int64_t token = 0; token < scan.tokens; token++) {
    const float decay = scan.decay[token * scan.gate_stride], step = scan.step[token * scan.gate_stride];
    const float* x = scan.x + token * scan.x_stride;
    float* out = scan.out + token * scan.out_stride;
    for (int j = 0; j < COLUMNS; j++) added[j] = step * x[j];
    update(block, scan.rows, decay, scan.b + token * scan.b_stride, added);
    combine<1, true>(scan.c + token * scan.b_stride, 0, block, scan.rows, out, COLUMNS);
    for (int j = 0; j < COLUMNS; j++) out[j] += scan.skip * x[j];
  }
}

}  // namespace BILLFISH_ISA
