// Token mixers with a state of fixed size instead of a KV cache, for one ISA level: a causal convolution over a few tokens, the gated delta
// rule, and the scan of Mamba-2.
//
// A state S [rows, columns] of a head lies as column blocks [columns / 16][rows][16]. Columns do not depend on each other, so a thread takes one
// block of one head, 8 KiB for 128 rows, through all tokens of a sequence while it stays in the first-level cache. Memory moves each state once
// per call, whether it has one token or a thousand, and a token gets the same bits however a sequence is cut into calls.
#pragma once
#include "decoder/kernels.h"

namespace BILLFISH_ISA {

using billfish::DELTA_CHUNK;
using billfish::DeltaInner;
using billfish::DeltaTokens;
using billfish::MambaScan;

constexpr int SIGMOID_VECTORS = COLUMNS / LANES;

// e becomes 1 + e^-x.
inline void sigmoid_divisors(const Floats (&x)[SIGMOID_VECTORS], Floats (&e)[SIGMOID_VECTORS]) {
  const auto each = [](auto f) INLINED { repeat<SIGMOID_VECTORS>(f); };
  each([&](int c) INLINED { e[c] = multiply(larger(splat(-LARGEST_EXPONENT), x[c]), splat(-1)); });
  exponentials(e);
  each([&](int c) INLINED { e[c] = add(e[c], splat(1)); });
}

// out [channels] = the sum of taps inputs, the oldest first, each times its row of weight [taps][channels]; then SiLU, where it is asked for. Of the
// channels, those from `first` to before `last`.
inline void convolve(const float* const* inputs, int64_t taps, const float* weight, const float* bias, int64_t channels, int64_t first, int64_t last, bool activate,
                     float* out) {
  const auto each = [](auto f) INLINED { repeat<SIGMOID_VECTORS>(f); };
  for (int64_t i = first; i < last; i += COLUMNS) {
    Floats sums[SIGMOID_VECTORS], divisors[SIGMOID_VECTORS];
    each([&](int c) INLINED { sums[c] = bias ? load_floats(bias + i + c * LANES) : splat(0); });
    for (int64_t tap = 0; tap < taps; tap++)
      each([&](int c) INLINED { sums[c] = multiply_add(sums[c], load_floats(inputs[tap] + i + c * LANES), load_floats(weight + tap * channels + i + c * LANES)); });
    if (activate) {
      sigmoid_divisors(sums, divisors);
      each([&](int c) INLINED { sums[c] = divide(sums[c], divisors[c]); });
    }
    each([&](int c) INLINED { store_floats(out + i + c * LANES, sums[c]); });
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
  const auto each = [](auto f) INLINED { repeat<SIGMOID_VECTORS>(f); };
  for (int64_t i = 0; i < count; i += COLUMNS) {
    Floats gates[SIGMOID_VECTORS], divisors[SIGMOID_VECTORS];
    each([&](int c) INLINED { gates[c] = load_floats(gate + i + c * LANES); });
    sigmoid_divisors(gates, divisors);
    each([&](int c) INLINED { store_floats(x + i + c * LANES, divide(load_floats(x + i + c * LANES), divisors[c])); });
  }
}

// block [rows][16] = decay * block + column [rows] x row [16].
inline void update(float* block, int64_t rows, float decay, const float* column, const float* row) {
  constexpr int VECTORS16 = COLUMNS / LANES;
  Floats added[VECTORS16];
  repeat<VECTORS16>([&](int c) INLINED { added[c] = load_floats(row + c * LANES); });
  const Floats kept = splat(decay);
  for (int64_t i = 0; i < rows; i++)
    repeat<VECTORS16>([&](int c) INLINED {
      float* place = block + i * COLUMNS + c * LANES;
      store_floats(place, multiply_add(multiply(load_floats(place), kept), added[c], splat(column[i])));
    });
}

// block [rows][16] = decay * block + the sum of column [rows] x row [16] of T tokens.
template <int T> __attribute__((flatten)) inline void add_outer_products(float* block, int64_t rows, float decay, const float* const* columns,
                                                                                 const float* added) {
  constexpr int VECTORS16 = COLUMNS / LANES;
  Floats row[T][VECTORS16];
  repeat<T>([&](int t) INLINED { repeat<VECTORS16>([&](int c) INLINED { row[t][c] = load_floats(added + t * COLUMNS + c * LANES); }); });
  const Floats kept = splat(decay);
  for (int64_t i = 0; i < rows; i += 4) {
    FloatActivations column[T];
    repeat<T>([&](int t) INLINED { column[t] = load_x(columns[t] + i); });
    unroll<4>([&](auto j) INLINED {
      repeat<VECTORS16>([&](int c) INLINED {
        float* place = block + (i + j) * COLUMNS + c * LANES;
        Floats sum = multiply(load_floats(place), kept);
        repeat<T>([&](int t) INLINED { sum = multiply_add_x<decltype(j)::value>(sum, row[t][c], column[t]); });
        store_floats(place, sum);
      });
    });
  }
}

// One column block of one head through tokens of a chunk. The delta rule writes what k does not recall yet: with S' = decay S,
//   d = beta (v - S'^T k),  S = S' + k d^T,  out = S^T q.
// The block stays what it was before the chunk, S0, until the chunk ends. With L the product of decays since, and of those behind token i,
//   S = L S0 + sum_i L_i k_i d_i^T,
// so tokens read S0 together, several at a time, and what those before them in the chunk have written, d_i. Every token adds up the same numbers in the
// same order, whichever tokens of its chunk come with it.
inline void delta_rule(const DeltaTokens& tokens, float* block) {
  constexpr int TOGETHER_KQ = COLUMNS / LANES == 1 ? 8 : 4;  // rows k and q of some tokens: as many sums as it takes to keep a core busy
  const int64_t rows = tokens.rows, last = tokens.first + tokens.count;
  float recalled[2 * DELTA_CHUNK * COLUMNS], written[DELTA_CHUNK * COLUMNS] = {};
  int64_t done = 0;
  for (; done + TOGETHER_KQ <= 2 * tokens.count; done += TOGETHER_KQ)
    combine<TOGETHER_KQ, true>(tokens.kq + done * rows, rows, block, rows, recalled + done * COLUMNS, COLUMNS);
  for (; done < 2 * tokens.count; done += 2) combine<2, true>(tokens.kq + done * rows, rows, block, rows, recalled + done * COLUMNS, COLUMNS);
  for (int64_t i = 0; i < tokens.first; i++) std::copy_n(tokens.written + i * tokens.written_stride, COLUMNS, written + i * COLUMNS);
  for (int64_t i = tokens.first; i < last; i++) {
    const int64_t token = i - tokens.first;
    const DeltaInner& inner = tokens.inner[token * tokens.head_stride];
    float within[2 * COLUMNS] = {};  // by k and by q, from the chunk
    if (i > 0) combine<2, true>(inner.k, DELTA_CHUNK, written, (i + 3) / 4 * 4, within, COLUMNS);
    const float *from_k = recalled + 2 * token * COLUMNS, *from_q = from_k + COLUMNS, *__restrict v = tokens.v + token * tokens.v_stride;
    const float beta = tokens.beta[token * tokens.head_stride], decay = inner.decay, own = inner.q[i];
    float *__restrict d = written + i * COLUMNS, *__restrict out = tokens.out + token * tokens.out_stride;
    for (int j = 0; j < COLUMNS; j++) {
      d[j] = beta * (v[j] - (decay * from_k[j] + within[j]));
      out[j] = decay * from_q[j] + within[COLUMNS + j] + own * d[j];
    }
    std::copy_n(d, COLUMNS, tokens.written + i * tokens.written_stride);
  }
  if (last < DELTA_CHUNK) return;
  const DeltaInner& inner = tokens.inner[(tokens.count - 1) * tokens.head_stride];
  for (int64_t i = 0; i < DELTA_CHUNK; i++)
    for (int j = 0; j < COLUMNS; j++) written[i * COLUMNS + j] *= inner.left[i];
  for (int64_t i = 0; i < DELTA_CHUNK; i += 4) add_outer_products<4>(block, rows, i ? 1.0f : inner.decay, tokens.keys + i, written + i * COLUMNS);
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
