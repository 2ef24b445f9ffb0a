// The factors of an RMSNorm over all heads of a row, of queries and of keys: 1 / sqrt(mean square + epsilon). A CTA has a row of one of them.
//
// Compiled with TYPE, for 256 threads.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(256)
marlin_head_scales(const u16* __restrict__ q, const u16* __restrict__ k, float* __restrict__ scales, int q_stride, int k_stride, int q_size, int k_size, float epsilon) {
  __shared__ float sums[8];
  let_next_start();
  wait_for_previous();
  const bool is_k = blockIdx.y;
  const u16* from = is_k ? k + (size_t)blockIdx.x * k_stride : q + (size_t)blockIdx.x * q_stride;
  const int size = is_k ? k_size : q_size;
  float sum = 0;
  for (int i = threadIdx.x; i < size; i += 256) {
    const float v = TYPE::to_float(from[i]);
    sum += v * v;
  }
  for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, d);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x) return;
  sum = 0;
  for (int i = 0; i < 8; i++) sum += sums[i];
  scales[2 * blockIdx.x + is_k] = rsqrtf(sum / size + epsilon);
}
