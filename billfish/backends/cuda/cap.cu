// Soft cap of logits [rows, count]: s becomes cap tanh(s / cap). A thread has one number.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(256) marlin_cap(float* __restrict__ scores, int count, float cap) {
  let_next_start();
  wait_for_previous();
  const int i = blockIdx.x * 256 + threadIdx.x;
  float* at = scores + (size_t)blockIdx.y * count + i;
  if (i < count) *at = cap * tanhf(*at / cap);
}
