// x = RMSNorm(hidden + added) * weight, a row for each CTA. The sum stays in `hidden`, which is float32.
//
// Compiled with TYPE (of x and of `added`), HIDDEN, THREADS and ADD (0: there is nothing to add).
#include "device.cuh"

constexpr int FOURS = HIDDEN / 4, EACH = (FOURS + THREADS - 1) / THREADS;
static_assert(HIDDEN % 4 == 0, "numbers come in fours");

// `rows`: which rows of `hidden`, or null for all. x has them one after the other.
extern "C" __global__ void __launch_bounds__(THREADS)
marlin_normalize(float* __restrict__ hidden, const u16* __restrict__ added, const float* __restrict__ weight, const int* __restrict__ rows, u16* __restrict__ x, float epsilon) {
  __shared__ float sums[THREADS / 32];
  const int row = rows ? rows[blockIdx.x] : blockIdx.x, lane = threadIdx.x & 31;
  float4 v[EACH], w[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (const int at = i * THREADS + threadIdx.x; at < FOURS) w[i] = __ldg((const float4*)weight + at);
  let_next_start();
  wait_for_previous();
  float4* from = (float4*)(hidden + (size_t)row * HIDDEN);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int at = i * THREADS + threadIdx.x;
    if (at >= FOURS) continue;
    v[i] = from[at];
    if (ADD) {
      const uint2 more = ((const uint2*)(added + (size_t)row * HIDDEN))[at];
      v[i].x += TYPE::to_float((u16)more.x), v[i].y += TYPE::to_float((u16)(more.x >> 16));
      v[i].z += TYPE::to_float((u16)more.y), v[i].w += TYPE::to_float((u16)(more.y >> 16));
      from[at] = v[i];
    }
    sum += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, d);
  if (lane == 0) sums[threadIdx.x >> 5] = sum;
  __syncthreads();
  sum = lane < THREADS / 32 ? sums[lane] : 0;
#pragma unroll
  for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, d);
  const float scale = rsqrtf(sum / HIDDEN + epsilon);
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (const int at = i * THREADS + threadIdx.x; at < FOURS)
      ((uint2*)(x + (size_t)blockIdx.x * HIDDEN))[at] = make_uint2(TYPE::pack(v[i].x * scale * w[i].x, v[i].y * scale * w[i].y), TYPE::pack(v[i].z * scale * w[i].z, v[i].w * scale * w[i].w));
}
