// The output of a block's part is added to the residual stream, which is normalized for the next part. A CTA has one row.
//
// hidden = (hidden + scale * RMSNorm(added) * post) * output_scale; x = RMSNorm(hidden) * weight. `hidden` is float32.
//
// Compiled with TYPE (of x and of `added`), HIDDEN, THREADS, ADD (0: there is nothing to add), POST (0: `added` is added as it is) and
// NORM (0: x is `hidden`).
#include "device.cuh"

constexpr int FOURS = HIDDEN / 4, EACH = (FOURS + THREADS - 1) / THREADS;
static_assert(HIDDEN % 4 == 0, "numbers come in fours");

DEVICE float squares(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
// The factor of a norm, from each thread's sum of squares.
DEVICE float factor(float sum, float epsilon, float* sums) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, d);
  if (lane == 0) sums[threadIdx.x >> 5] = sum;
  __syncthreads();
  sum = lane < THREADS / 32 ? sums[lane] : 0;
#pragma unroll
  for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, d);
  return rsqrtf(sum / HIDDEN + epsilon);
}

// `rows`: which rows of `hidden`, which stay as they are, or null for all. x has them one after the other. factors: null, or for folded_norm.cuh.
extern "C" __global__ void __launch_bounds__(THREADS)
marlin_normalize(float* __restrict__ hidden, const u16* __restrict__ added, const float* __restrict__ weight, const int* __restrict__ rows, u16* __restrict__ x,
                 const float* __restrict__ post, float2* factors, float epsilon, float scale, float output_scale) {
  __shared__ float sums[2][THREADS / 32];
  float4 v[EACH], w[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (const int at = i * THREADS + threadIdx.x; NORM && at < FOURS) w[i] = __ldg((const float4*)weight + at);
  let_next_start();
  wait_for_previous();
  const int row = rows ? rows[blockIdx.x] : blockIdx.x;
  float4* from = (float4*)(hidden + (size_t)row * HIDDEN);
  float4 more[EACH];
  float sum = 0, after = scale;
  if (ADD) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int at = i * THREADS + threadIdx.x;
      if (at >= FOURS) continue;
      const uint2 bits = ((const uint2*)(added + (size_t)row * HIDDEN))[at];
      more[i] = make_float4(TYPE::to_float((u16)bits.x), TYPE::to_float((u16)(bits.x >> 16)), TYPE::to_float((u16)bits.y), TYPE::to_float((u16)(bits.y >> 16)));
      if (POST) sum += squares(more[i]);
    }
    if (POST) after *= factor(sum, epsilon, sums[1]), sum = 0;
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int at = i * THREADS + threadIdx.x;
    if (at >= FOURS) continue;
    v[i] = from[at];
    if (ADD) {
      const float4 p = POST ? __ldg((const float4*)post + at) : make_float4(1, 1, 1, 1);
      v[i].x = (v[i].x + more[i].x * (after * p.x)) * output_scale, v[i].y = (v[i].y + more[i].y * (after * p.y)) * output_scale;
      v[i].z = (v[i].z + more[i].z * (after * p.z)) * output_scale, v[i].w = (v[i].w + more[i].w * (after * p.w)) * output_scale;
      if (!rows) from[at] = v[i];
    }
    if (NORM) sum += squares(v[i]);
    else w[i] = make_float4(1, 1, 1, 1);
  }
  const float own = NORM ? factor(sum, epsilon, sums[0]) : 1;
  if (factors && threadIdx.x == 0) factors[row].x = own;
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (const int at = i * THREADS + threadIdx.x; at < FOURS)
      ((uint2*)(x + (size_t)blockIdx.x * HIDDEN))[at] = make_uint2(TYPE::pack_finite(v[i].x * own * w[i].x, v[i].y * own * w[i].y), TYPE::pack_finite(v[i].z * own * w[i].z, v[i].w * own * w[i].w));
}
