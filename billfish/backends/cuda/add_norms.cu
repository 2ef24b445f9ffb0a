// y = RMSNorm(a) * a_weight + RMSNorm(b) * b_weight, a row for each CTA: a dense part and experts side by side, each with a norm behind it. y may be
// the memory of a or b.
//
// Compiled with TYPE, HIDDEN and THREADS.
#include "device.cuh"

constexpr int FOURS = HIDDEN / 4, EACH = (FOURS + THREADS - 1) / THREADS, WARPS = THREADS / 32;
static_assert(HIDDEN % 4 == 0, "numbers come in fours");

DEVICE float4 four(uint2 v) { return {TYPE::to_float((u16)v.x), TYPE::to_float((u16)(v.x >> 16)), TYPE::to_float((u16)v.y), TYPE::to_float((u16)(v.y >> 16))}; }

extern "C" __global__ void __launch_bounds__(THREADS)
marlin_add_norms(const u16* a, const float* __restrict__ a_weight, const u16* b, const float* __restrict__ b_weight, u16* y, float epsilon) {
  __shared__ float2 sums[WARPS];
  const int lane = threadIdx.x & 31;
  let_next_start();
  wait_for_previous();
  const size_t row = (size_t)blockIdx.x * HIDDEN;
  float4 first[EACH], second[EACH];
  float2 sum = {0, 0};
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int at = i * THREADS + threadIdx.x;
    if (at >= FOURS) continue;
    first[i] = four(((const uint2*)(a + row))[at]), second[i] = four(((const uint2*)(b + row))[at]);
    sum.x += first[i].x * first[i].x + first[i].y * first[i].y + first[i].z * first[i].z + first[i].w * first[i].w;
    sum.y += second[i].x * second[i].x + second[i].y * second[i].y + second[i].z * second[i].z + second[i].w * second[i].w;
  }
  auto add_up = [&] {
#pragma unroll
    for (int d = 16; d; d >>= 1) sum.x += __shfl_xor_sync(0xffffffff, sum.x, d), sum.y += __shfl_xor_sync(0xffffffff, sum.y, d);
  };
  add_up();
  if (lane == 0) sums[threadIdx.x >> 5] = sum;
  __syncthreads();
  if (lane < WARPS) sum = sums[lane];
  else sum.x = 0, sum.y = 0;
  add_up();
  const float p = rsqrtf(sum.x / HIDDEN + epsilon), q = rsqrtf(sum.y / HIDDEN + epsilon);
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (const int at = i * THREADS + threadIdx.x; at < FOURS) {
      const float4 v = first[i], w = second[i], s = __ldg((const float4*)a_weight + at), t = __ldg((const float4*)b_weight + at);
      ((uint2*)(y + row))[at] = make_uint2(TYPE::pack_finite(v.x * p * s.x + w.x * q * t.x, v.y * p * s.y + w.y * q * t.y), TYPE::pack_finite(v.z * p * s.z + w.z * q * t.z, v.w * p * s.w + w.w * q * t.w));
    }
}
