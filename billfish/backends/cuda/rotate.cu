// Norms and RoPE of queries and keys; keys and values go to their page of the KV cache. A CTA has one head of ROWS rows, a thread a pair
// of numbers.
//
// q, k and v have a row for each token, `stride` numbers apart. Queries stay there, times `scale`, which has log2(e) in it, so that
// attention takes powers of two, and times 1 + growth ln(1 + position / growth_length).
//
// Compiled with TYPE, HEAD, PAIRS (those that rotate; the numbers after them do not), ADJACENT (a pair is 2i and 2i + 1, not i and
// i + PAIRS), NORMED (an RMSNorm comes first: 1 of each head, 2 of all heads, with the factors of head_scales.cu), VALUES_NORMED (an RMSNorm
// of each head of values, without weights), OUTPUT_GATE (a head of q has its gate behind it), FP8 (keys and values become E4M3) and ROWS.
#include "pages.cuh"

constexpr int EACH = WIDE / 2, WARPS = EACH / 32;  // of a row
static_assert(HEAD % 2 == 0 && 2 * PAIRS <= HEAD, "pairs of numbers");

extern "C" __global__ void __launch_bounds__(EACH * ROWS)
marlin_rotate(u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v, int q_stride, int k_stride, int v_stride, const float2* __restrict__ angles,
              const int* __restrict__ positions, const int* __restrict__ sequences, const u64* __restrict__ pages, const float* __restrict__ q_norm, const float* __restrict__ k_norm,
              const float2* __restrict__ head_scales, float epsilon, float scale, float growth, int growth_length, int angle_stride, int heads, int kv_heads, int offset,
              int pages_of_sequence, int rows) {
  __shared__ float sums[ROWS][WARPS];
  let_next_start();
  const int head = blockIdx.x, mine = threadIdx.x / EACH, t = threadIdx.x % EACH, row = min(blockIdx.y * ROWS + mine, rows - 1);
  const bool again = blockIdx.y * ROWS + mine >= rows;  // rows of others, of which nothing is written
  const bool any = t < HEAD / 2;                        // the others write the zeros that fill a page's rows up to WIDE
  const bool is_q = head < heads, is_v = head >= heads + kv_heads, turns = t < PAIRS;
  const int first = !turns ? PAIRS * 2 + (t - PAIRS) * 2 : ADJACENT ? 2 * t : t, second = turns && !ADJACENT ? t + PAIRS : first + 1;
  // What the host sent was there before the step's first kernel began.
  const int position = positions[row], kv_head = head - heads - (is_v ? kv_heads : 0);
  const u64 page = is_q ? 0 : pages[(size_t)sequences[row] * pages_of_sequence + position / PAGE];
  wait_for_previous();
  const u16* from = is_q ? q + (size_t)row * q_stride + head * (1 + OUTPUT_GATE) * HEAD : is_v ? v + (size_t)row * v_stride + kv_head * HEAD : k + (size_t)row * k_stride + kv_head * HEAD;
  float a = any ? TYPE::to_float(from[first]) : 0, b = any ? TYPE::to_float(from[second]) : 0;
  if (is_v ? VALUES_NORMED : NORMED == 1) {
    float sum = a * a + b * b;
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, d);
    if (t % 32 == 0) sums[mine][t / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < WARPS; i++) sum += sums[mine][i];
    const float* weight = is_q ? q_norm : k_norm;
    const float factor = rsqrtf(sum / HEAD + epsilon);
    if (any) a *= is_v ? factor : factor * weight[first], b *= is_v ? factor : factor * weight[second];
  }
  if (NORMED == 2 && !is_v && any) {
    const float* weight = is_q ? q_norm + head * HEAD : k_norm + kv_head * HEAD;
    const float factor = is_q ? head_scales[row].x : head_scales[row].y;
    a *= factor * weight[first], b *= factor * weight[second];
  }
  if ((again && (!FP8 || is_q)) || (!any && is_q)) return;  // FP8: all threads of keys and values meet once more
  if (turns && !is_v) {
    const float2 angle = angles[(size_t)row * angle_stride + t];
    const float turned = a * angle.x - b * angle.y;
    b = a * angle.y + b * angle.x, a = turned;
  }
  if (is_q) {
    if (growth > 0) scale *= 1 + growth * logf(1 + (float)(position / growth_length));
    u16* to = (u16*)from;
    to[first] = (u16)TYPE::pack_finite(a * scale, 0), to[second] = (u16)TYPE::pack_finite(b * scale, 0);
  } else {
    u8* to = (u8*)tile_at(page, offset, is_v, kv_heads, kv_head);
#if FP8
    __shared__ float largest[ROWS][WARPS];
    a = within_codes(a), b = within_codes(b);
    float most = fmaxf(fabsf(a), fabsf(b));
    for (int d = 16; d; d >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, d));
    if (t % 32 == 0) largest[mine][t / 32] = most;
    __syncthreads();
    if (again) return;
    for (int i = 0; i < WARPS; i++) most = fmaxf(most, largest[mine][i]);
    const float2 scales = power_of_two_scale(most);
    const u16 codes = to_codes(a * scales.y, b * scales.y);
    to[in_tile(position % PAGE, first)] = (u8)codes, to[in_tile(position % PAGE, second)] = (u8)(codes >> 8);
    if (t == 0) *(float*)(to + ROWS_BYTES + position % PAGE * 4) = scales.x;
#else
    *(u16*)(to + in_tile(position % PAGE, first)) = (u16)TYPE::pack_finite(a, 0);
    *(u16*)(to + in_tile(position % PAGE, second)) = (u16)TYPE::pack_finite(b, 0);
#endif
  }
}
