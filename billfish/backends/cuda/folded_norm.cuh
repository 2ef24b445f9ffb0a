// An RMSNorm between two products, as a part of both, in place of normalize.cu.
//
// The first product (RESIDUAL) adds its output to the residual stream `hidden`, and stores x = hidden * weight * power and the sum of squares of each 16
// columns. The second one (NORMED) multiplies x, adds up these sums in their order, and multiplies a row of its output with 1 / (rms * power).
//
// x has 16 bits and is not normalized yet, so `power` brings it near 1: it is 2^-6 over the power of two of rms at the norm before, which is known when the
// first product begins. In float16 a number clamps if it is 2^22 times that rms, and those below 2^-8 of it lose bits.
#pragma once
#include "device.cuh"

constexpr int SQUARED = 16;  // columns of one sum of squares

struct FoldedNorm {
  float* hidden;        // [rows, hidden]
  const float* weight;  // of the norm
  float* squares;       // [rows, hidden / SQUARED]
  float2* factors;      // [rows]: 1 / rms at the row's last norm, and 1 / power of the norm that is on its way
  float epsilon, scale;  // scale: of the output that is added

  __device__ __forceinline__ static float power(float factor) { return __uint_as_float(__float_as_uint(factor) & 0x7f800000) * 0x1p-6f; }

  // What `count` rows, MOST at most, of the second product from `first_row` on are multiplied with, to shared memory. Each of STEP warps finds those of every STEP-th row.
  // keeps: of all CTAs, the one that tells the next norm.
  template <int MOST, int STEP> __device__ __forceinline__ void find_factors(float* to, int first_row, int count, int columns, int warp, int lane, bool keeps) const {
    constexpr int EACH = (MOST + STEP - 1) / STEP;
    const int fours = columns / SQUARED / 4;
    float sum[EACH] = {}, unit[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int row = first_row + warp + e * STEP;
      if (row >= first_row + count) continue;
      unit[e] = factors[row].y;
      for (int i = lane; i < fours; i += 32) {
        const float4 v = ((const float4*)squares)[(size_t)row * fours + i];
        sum[e] += v.x + v.y + (v.z + v.w);
      }
    }
#pragma unroll
    for (int d = 16; d; d >>= 1)
#pragma unroll
      for (int e = 0; e < EACH; e++) sum[e] += __shfl_xor_sync(0xffffffff, sum[e], d);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int row = warp + e * STEP;
      if (lane || row >= count) continue;
      const float found = rsqrtf(sum[e] / columns + epsilon);
      to[row] = found * unit[e];
      if (keeps) factors[first_row + row].x = found;
    }
  }
};
