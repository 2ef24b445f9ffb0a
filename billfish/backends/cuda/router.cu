// The router of a mixture: a product for logits, the experts of each row with their weights and, for few rows, the table of tiles (rows.cuh),
// all in one launch.
//
// A CTA has a course, 16 experts, and a block of up to ROWS rows of x; its warps split K, a brick of 128 k at a time, and add up in a fixed
// order, so a row's bits do not depend on its batch. The CTA of a block that is done last, by a ticket, chooses for all of its rows, a warp a
// row; the last one of these writes the table. Tickets: one for all blocks, then one for each.
// Weights are unquantized bricks. They do not depend on the kernel before this one, and are on their way before it ends.
//
// A row of the matrix behind those of the experts is the gate of a shared expert: SHARED is 2. SHARED 1: it has none, and weight 1; 0: there is
// no shared expert. Its weight comes behind those of the chosen experts.
//
// Compiled with TYPE, ROWS (8 or more), WARPS, EACH (experts of a lane), SIGMOIDAL, RENORMALIZED, SHARED, and SORTED: there is a table. Of one row
// x is copied then, once for each chosen expert, to `copies`.
#define ELEMENT Half
#define SCALE ScaleF16
#define OFFSET NONE
#define GROUPS 1
#include "choose_experts.cuh"
#include "decode.cuh"
#include "route.cuh"

constexpr int EIGHTS = ROWS / 8;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
marlin_router(const u8* __restrict__ weights, const float* __restrict__ row_scale, const float* __restrict__ bias, const float* __restrict__ selection_bias,
              const float* __restrict__ expert_scale, const u16* __restrict__ x, float* logits, int* ids, float* routing, u32* tickets, int4* table, int* order,
              uint4* copies, int rows, int experts, int outputs, int k, int chosen, int groups, int groups_used, int width, float scale) {
  extern __shared__ int counts[];
  __shared__ float sums[WARPS][16][8 + 1];
  __shared__ bool last;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const int bricks = (k + 127) / 128, courses = (outputs + 15) / 16, course = blockIdx.x, first_row = blockIdx.y * ROWS, count = min(ROWS, rows - first_row);
  uint4 codes[8];
  auto fetch = [&](int brick) {
    const u8* from = weights + Brick::at(course, brick, courses, bricks) + lane * 16;
#pragma unroll
    for (int kt = 0; kt < 8; kt++) codes[kt] = load_stream(from + kt * 512);
  };
  if (warp < bricks) fetch(warp);
  let_next_start();
  wait_for_previous();

  if (SORTED && rows == 1)  // every expert reads the same row
    for (int j = course; j < chosen; j += gridDim.x)
      for (int i = threadIdx.x; i < (k + 7) / 8; i += WARPS * 32) copies[j * ((k + 7) / 8) + i] = __ldg((const uint4*)x + i);

  float sum[EIGHTS][4] = {};
#pragma unroll 1
  for (int brick = warp; brick < bricks; brick += WARPS) {
    if (brick != warp) fetch(brick);
#pragma unroll
    for (int kt = 0; kt < 8; kt++) {
      const int column = brick * 128 + kt * 16 + 2 * c;
      const u32 halves[4] = {codes[kt].x, codes[kt].y, codes[kt].z, codes[kt].w};
      u32 high[4], low[4];  // a float16 number is the sum of two of bfloat16
#pragma unroll
      for (int p = 0; p < 4 && !TYPE::is_half; p++) {
        const float first = F16::to_float((u16)halves[p]), second = F16::to_float((u16)(halves[p] >> 16));
        high[p] = TYPE::pack(first, second);
        low[p] = TYPE::pack(first - TYPE::to_float((u16)high[p]), second - TYPE::to_float((u16)(high[p] >> 16)));
      }
#pragma unroll
      for (int mt = 0; mt < EIGHTS; mt++) {
        if (mt * 8 >= count) break;
        const int row = first_row + mt * 8 + g;
        const u16* from = x + (size_t)min(row, rows - 1) * k + column;
        const u32 b0 = row < rows && column < k ? __ldg((const u32*)from) : 0, b1 = row < rows && column + 8 < k ? __ldg((const u32*)(from + 8)) : 0;
        if constexpr (TYPE::is_half) TYPE::mma(sum[mt], halves, b0, b1);
        else {
          TYPE::mma(sum[mt], high, b0, b1);
          TYPE::mma(sum[mt], low, b0, b1);
        }
      }
    }
  }
#pragma unroll
  for (int mt = 0; mt < EIGHTS; mt++) {
    if (mt * 8 >= count) break;
    if (mt) __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) sums[warp][g + (i >> 1) * 8][2 * c + (i & 1)] = sum[mt][i];
    __syncthreads();
    for (int i = threadIdx.x; i < 128; i += WARPS * 32) {
      const int expert = course * 16 + i / 8, row = first_row + mt * 8 + i % 8;
      if (expert >= outputs || row >= rows) continue;
      float v = 0;
      for (int w = 0; w < WARPS; w++) v += sums[w][i / 8][i % 8];
      logits[(size_t)row * outputs + expert] = v * row_scale[expert] + (bias && expert < experts ? bias[expert] : 0.0f);
    }
  }
  auto is_last = [&](int ticket, int of) {
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      last = atomicInc(tickets + ticket, of - 1) == of - 1;  // and begins with 0 again
      __threadfence();
    }
    __syncthreads();
    return last;
  };
  if (!is_last(1 + blockIdx.y, gridDim.x)) return;

  const Choosing how{experts, chosen, groups, groups_used, scale, selection_bias, expert_scale};
  const int apart = chosen + (SHARED > 0);
  for (int row = first_row + warp; row < first_row + count; row += WARPS) {
    const float* from = logits + (size_t)row * outputs;
    float own[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) own[i] = i * 32 + lane < experts ? __ldcg(from + i * 32 + lane) : -INFINITE;
    choose_experts<SIGMOIDAL, RENORMALIZED>(own, how, lane, ids + (size_t)row * chosen, routing + (size_t)row * apart);
    if (SHARED && lane == 0) routing[(size_t)row * apart + chosen] = SHARED == 2 ? 1 / (1 + expf(-__ldcg(from + experts))) : 1.0f;
  }
  if (!SORTED) return;
  if (rows > 1) {
    if (!is_last(0, gridDim.y)) return;
    sort_visits<WARPS>(ids, table, order, counts, rows * chosen, experts, width);
    return;
  }
  __syncthreads();
  if (warp) return;  // one row takes each expert once
  const int expert = lane < chosen ? ids[lane] : experts;
  int rank = 0;
  for (int j = 0; j < chosen; j++) rank += __shfl_sync(ALL_LANES, expert, j) < expert;
  if (lane == 0) table[0] = make_int4(chosen, chosen, 0, 0);
  if (lane < chosen) table[1 + rank] = make_int4(expert, rank, 1, rank), order[rank] = lane;
}
