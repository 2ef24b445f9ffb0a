// A causal convolution, each channel for itself, over the rows of a step and what a sequence has kept of earlier ones.
//
// Pointers to what the kernel before writes are not __restrict__: of memory that nobody writes, the compiler may move loads above wait_for_previous().
//
// FEW: a decode step, where a row is the next token of a sequence, or a drafted one behind it; a CTA takes all rows of a sequence. Otherwise rows come in
// chunks of one sequence, up to 64, and a CTA takes PART rows.
// Compiled with TAPS and FEW.
#pragma once
#include "device.cuh"

constexpr int CHUNK = 64, PART = 16, PARTS = CHUNK / PART;

// Rows that a CTA takes; `start` is the first row of their sequence in this step.
struct Rows {
  int first, count, text, start;
};
// chunks: the first row, how many rows, the sequence, and the sequence's first row. Chunks that are not used have no rows. FEW: int32, how many rows the
// sequence has that begins with each row; 0 for its other rows.
DEVICE Rows rows_of(const int4* chunks, int block) {
  if (FEW) return {block, ((const int*)chunks)[block], block, block};
  const int4 chunk = chunks[block / PARTS];
  const int skipped = block % PARTS * PART;
  return {chunk.x + skipped, min(chunk.y - skipped, PART), chunk.z, chunk.w};
}

// The inputs of a channel that an output is made of, the oldest first.
struct Window {
  float x[TAPS];

  // Those before `row`. value(row) is an input of this step. tail [TAPS - 1], `channels` apart: those before the sequence's row `start`.
  template <class Value> __device__ __forceinline__ void load(int row, int start, const float* tail, int channels, Value value) {
#pragma unroll
    for (int j = 0; j < TAPS - 1; j++) {
      const int from = row - (TAPS - 1) + j;
      x[j + 1] = from >= start ? value(from) : tail[(size_t)(from - start + TAPS - 1) * channels];
    }
  }
  __device__ __forceinline__ void push(float input) {
#pragma unroll
    for (int j = 0; j < TAPS - 1; j++) x[j] = x[j + 1];
    x[TAPS - 1] = input;
  }
  __device__ __forceinline__ float sum(const float (&weight)[TAPS], float bias) const {
    float sum = bias;
#pragma unroll
    for (int j = 0; j < TAPS; j++) sum += x[j] * weight[j];
    return sum;
  }
  // What the next row needs.
  __device__ __forceinline__ void store(float* tail, int channels) const {
#pragma unroll
    for (int j = 0; j < TAPS - 1; j++) tail[(size_t)j * channels] = x[j + 1];
  }
};

// weight [TAPS][channels].
DEVICE void load_taps(float (&to)[TAPS], const float* weight, int channel, int channels) {
#pragma unroll
  for (int j = 0; j < TAPS; j++) to[j] = __ldg(weight + (size_t)j * channels + channel);
}
