// The columns of x in the order in which weights have theirs (act-order): out[row][j] = x[row][order[j]]. A CTA has a row.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(256) marlin_reorder(const u16* __restrict__ x, const int* __restrict__ order, u16* __restrict__ out, int k) {
  let_next_start();
  wait_for_previous();
  for (int j = threadIdx.x; j < k; j += 256) out[(size_t)blockIdx.x * k + j] = x[(size_t)blockIdx.x * k + order[j]];
}
