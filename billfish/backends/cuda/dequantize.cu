// Bricks to numbers [n, k], bit for bit as the reference has them (values.cuh), rounded once to the type asked for. One warp takes a
// brick and writes it row by row.
//
// Compiled with ELEMENT, SCALE, OFFSET, GROUPS, OUTPUT (float, F16 or BF16) and ONE_ZERO (code 8 of E2M1 is +0).
#define TYPE F16  // every code of every element is exact in it
#include "values.cuh"
#ifndef ONE_ZERO
#define ONE_ZERO 0
#endif

DEVICE void store(float* to, float v) { *to = v; }
template <class T> struct Stored { u16 bits; };
template <class T> DEVICE void store(Stored<T>* to, float v) { to->bits = (u16)T::pack(v, 0); }

extern "C" __global__ void marlin_dequantize(const u8* __restrict__ weights, const float* __restrict__ row_scale, OUTPUT* __restrict__ out, int n, int k) {
  __shared__ float values[16][128 + 4];
  const int lane = threadIdx.x, along = (k + 127) / 128, brick = blockIdx.x % along, course = blockIdx.x / along;
  decode_brick<ONE_ZERO>(weights, row_scale, course, brick, n, along, lane, values);
  for (int row = 0; row < 16 && course * 16 + row < n; row++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int column = brick * 128 + i * 32 + lane;
      if (column < k) store(out + (size_t)(course * 16 + row) * k + column, values[row][i * 32 + lane]);
    }
}
