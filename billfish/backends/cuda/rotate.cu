// Queries and keys turn by their position; keys and values go to their page. A CTA has one head of one row, a thread a pair of numbers.
//
// qkv [m, (heads + 2 kv_heads) HEAD] is one row for each token: queries, which stay there, times 1 / sqrt(HEAD) * log2(e), so that
// attention takes powers of two; keys; values. Compiled with TYPE, HEAD, PAIRS (those that turn; the numbers after them do not),
// ADJACENT (a pair is 2i and 2i + 1, not i and i + PAIRS) and NORMED (an RMSNorm of each head comes first).
#include "pages.cuh"

constexpr int THREADS = WIDE / 2;
static_assert(HEAD % 2 == 0 && 2 * PAIRS <= HEAD, "pairs of numbers");

extern "C" __global__ void __launch_bounds__(THREADS)
marlin_rotate(u16* __restrict__ qkv, const float2* __restrict__ angles, const int* __restrict__ positions, const int* __restrict__ texts,
              const u64* __restrict__ pages, const float* __restrict__ q_norm, const float* __restrict__ k_norm, float epsilon, int heads, int kv_heads, int layer, int pages_of_text) {
  __shared__ float sums[THREADS / 32];
  let_next_start();
  const int head = blockIdx.x, row = blockIdx.y, t = threadIdx.x;
  const bool any = t < HEAD / 2;  // the others write the zeros that fill a page's rows up to WIDE
  const bool is_q = head < heads, is_v = head >= heads + kv_heads, turns = t < PAIRS;
  const int first = !turns ? PAIRS * 2 + (t - PAIRS) * 2 : ADJACENT ? 2 * t : t, second = turns && !ADJACENT ? t + PAIRS : first + 1;
  const int position = positions[row], text = texts[row];
  const u64 page = pages[(size_t)text * pages_of_text + position / PAGE];
  wait_for_previous();
  u16* from = qkv + ((size_t)row * (heads + 2 * kv_heads) + head) * HEAD;
  float a = any ? TYPE::to_float(from[first]) : 0, b = any ? TYPE::to_float(from[second]) : 0;
  if (NORMED && !is_v) {
    float sum = a * a + b * b;
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, d);
    if (t % 32 == 0) sums[t / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < THREADS / 32; i++) sum += sums[i];
    const float* weight = is_q ? q_norm : k_norm;
    const float scale = rsqrtf(sum / HEAD + epsilon);
    if (any) a *= scale * weight[first], b *= scale * weight[second];
  }
  if (!any && is_q) return;
  if (turns && !is_v) {
    const float2 angle = angles[(size_t)row * PAIRS + t];
    const float turned = a * angle.x - b * angle.y;
    b = a * angle.y + b * angle.x, a = turned;
  }
  if (is_q) {
    const float scale = 1.44269504f * rsqrtf(HEAD);
    from[first] = (u16)TYPE::pack(a * scale, 0), from[second] = (u16)TYPE::pack(b * scale, 0);
  } else {
    u8* to = (u8*)tile_at(page, layer, is_v, kv_heads, head - heads - (is_v ? kv_heads : 0));
    *(u16*)(to + in_tile(position % PAGE, first)) = (u16)TYPE::pack(a, 0);
    *(u16*)(to + in_tile(position % PAGE, second)) = (u16)TYPE::pack(b, 0);
  }
}
