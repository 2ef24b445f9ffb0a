// The RMSNorm of a head or a group, and a gate: norm(x) * weight * SiLU(z), or norm(x * SiLU(z)) * weight where GATE_FIRST.
//
// x is float32, y has 16 bits. TEAM threads have a group of GROUP numbers, four at a time. Compiled with TYPE, GROUP, GATE_FIRST, TEAM and TEAMS (of a CTA; 1
// where a team is more than a warp).
#include "device.cuh"

constexpr int FOURS = GROUP / 4, EACH = (FOURS + TEAM - 1) / TEAM, WARPS = TEAM / 32;
static_assert(GROUP % 4 == 0 && TEAM % 32 == 0 && (TEAM == 32 || TEAMS == 1), "numbers come in fours, teams in warps");

// z [rows, `stride` apart]; weight [count * GROUP] where it has `apart` numbers for each group, or [GROUP] where `apart` is 0.
extern "C" __global__ void __launch_bounds__(TEAM * TEAMS)
marlin_gated_norm(const float* x, const u16* z, const float* __restrict__ weight, u16* y, float epsilon, int rows, int count, int stride, int apart) {
  __shared__ float sums[WARPS];
  let_next_start();
  wait_for_previous();
  const int t = threadIdx.x % TEAM, lane = threadIdx.x & 31, group = blockIdx.x * TEAMS + threadIdx.x / TEAM, row = group / count, of_row = group % count;
  if (row >= rows) return;  // all lanes of a warp, and all of a CTA that is one team
  const float4* from = (const float4*)(x + (size_t)group * GROUP);
  const u16* gate = z + (size_t)row * stride + of_row * GROUP;
  float4 v[EACH], g[EACH];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int at = i * TEAM + t;
    if (at >= FOURS) continue;
    v[i] = from[at];
    float* gates = (float*)(g + i);
#pragma unroll
    for (int j = 0; j < 4; j++) gates[j] = activated<SILU>(TYPE::to_float(gate[at * 4 + j]));
    if (GATE_FIRST) v[i].x *= g[i].x, v[i].y *= g[i].y, v[i].z *= g[i].z, v[i].w *= g[i].w;
    sum += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, d);
  if (WARPS > 1) {
    if (lane == 0) sums[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < WARPS; i++) sum += sums[i];
  }
  const float scale = rsqrtf(sum / GROUP + epsilon);
  const float4* weights = (const float4*)(weight + (size_t)of_row * apart);
  uint2* to = (uint2*)(y + (size_t)group * GROUP);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int at = i * TEAM + t;
    if (at >= FOURS) continue;
    const float4 w = __ldg(weights + at);
    float4 out = make_float4(v[i].x * scale * w.x, v[i].y * scale * w.y, v[i].z * scale * w.z, v[i].w * scale * w.w);
    if (!GATE_FIRST) out.x *= g[i].x, out.y *= g[i].y, out.z *= g[i].z, out.w *= g[i].w;
    to[at] = make_uint2(TYPE::pack_finite(out.x, out.y), TYPE::pack_finite(out.z, out.w));
  }
}
