// sums [k] += the squares of each column of x [rows, k], which has 16 bits; sums are float64. For statistics of inputs. A CTA has 64 columns, a warp every
// eighth row of them. k is even.
//
// Compiled with TYPE, for 256 threads.
#include "device.cuh"

constexpr int WARPS = 8;

extern "C" __global__ void __launch_bounds__(256) marlin_add_squares(const u16* x, double* sums, int rows, int k) {
  __shared__ float partial[WARPS][64];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, column = blockIdx.x * 64 + 2 * lane;
  let_next_start();
  wait_for_previous();
  float2 sum = make_float2(0, 0);
  for (int row = warp; row < rows && column < k; row += WARPS) {
    const u32 pair = *(const u32*)(x + (size_t)row * k + column);
    const float low = TYPE::to_float((u16)pair), high = TYPE::to_float((u16)(pair >> 16));
    sum.x += low * low, sum.y += high * high;
  }
  partial[warp][2 * lane] = sum.x, partial[warp][2 * lane + 1] = sum.y;
  __syncthreads();
  if (threadIdx.x >= 64 || blockIdx.x * 64 + threadIdx.x >= k) return;
  double all = 0;
  for (int i = 0; i < WARPS; i++) all += partial[i][threadIdx.x];
  sums[blockIdx.x * 64 + threadIdx.x] += all;
}
