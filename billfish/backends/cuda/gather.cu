// Rows of x in the order of experts: out[i] = x[order[i] / together]. A *visit* is a (token, expert) pair; `together` of them share a row of x.
//
// y [visits, n], if it is given, gets NaN in the rows of pairs whose expert id is out of range.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(256)
marlin_gather(const u16* __restrict__ x, const int4* __restrict__ table, const int* __restrict__ order, u16* __restrict__ out, u16* __restrict__ y, int visits, int k,
              int x_stride, int out_stride, int together, int n) {
  wait_for_previous();
  let_next_start();  // not before: kernels behind this one read the table without waiting for it
  const int good = table[0].y;
#pragma unroll 1
  for (int i = blockIdx.x; i < visits; i += gridDim.x) {
    const int visit = order[i];
    if (i >= good) {
#pragma unroll 1
      for (int j = threadIdx.x; j < n && y; j += 256) y[(size_t)visit * n + j] = 0x7fff;  // in float16 and in bfloat16
      continue;
    }
    const uint4* from = (const uint4*)(x + (size_t)(visit / together) * x_stride);
    uint4* to = (uint4*)(out + (size_t)i * out_stride);
#pragma unroll 2
    for (int j = threadIdx.x; j < (k + 7) / 8; j += 256) to[j] = __ldg(from + j);
  }
}
