// Reads memory and does nothing else: what limits products of few rows.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* __restrict__ data, int count, u32* sink) {
  let_next_start();
  u32 all = 0;
  const int stride = gridDim.x * blockDim.x;
  for (int first = blockIdx.x * blockDim.x + threadIdx.x; first < count; first += 4 * stride) {
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = first + i * stride < count ? load_stream(data + first + i * stride) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 4; i++) all ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  }
  wait_for_previous();
  if (all == 0x12345678) *sink = all;  // never, but nobody knows
}
