// sums [k, n] += x^T y, of x [rows, k] and y [rows, n] with 16 bits; sums are float32. For statistics of inputs, X^T X or X^T Y.
//
// A CTA has a tile of 128 x 128 sums, and warps have 64 x 32 of them. Rows of x and y come to shared memory as they are, 32 at a time: ldmatrix transposes
// them. k and n are multiples of 8.
//
// Compiled with TYPE, for 256 threads.
#include "device.cuh"

constexpr int THREADS = 256, TILE = 128, DEEP = 32, STAGES = 2;
constexpr int ROW_BYTES = TILE * 2 + 16, STAGE_BYTES = DEEP * ROW_BYTES;  // eight rows of a fragment are in different banks

DEVICE void load_matrices_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// TILE columns of DEEP rows from `row` on; what is outside of [rows, width] becomes zero.
DEVICE void copy_tile(u32 to, const u16* from, int row, int rows, int column, int width) {
#pragma unroll
  for (int i = 0; i < DEEP * TILE / 8 / THREADS; i++) {
    const int at = i * THREADS + threadIdx.x, r = at / (TILE / 8), c = at % (TILE / 8) * 8;
    const bool inside = row + r < rows && column + c < width;
    copy_async(to + r * ROW_BYTES + c * 2, from + (inside ? (size_t)(row + r) * width + column + c : 0), inside ? 16 : 0);
  }
}

extern "C" __global__ void __launch_bounds__(256)
marlin_add_outer(const u16* x, const u16* y, float* sums, int rows, int k, int n) {
  __shared__ __align__(16) u8 tiles[STAGES * 2 * STAGE_BYTES];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, down = blockIdx.y * TILE, across = blockIdx.x * TILE;
  const int my_down = (warp >> 2) * 64, my_across = (warp & 3) * 32, steps = (rows + DEEP - 1) / DEEP;
  const u32 start = shared_address(tiles);
  let_next_start();
  wait_for_previous();
  auto fetch = [&](int step) {
    const u32 to = start + step % STAGES * 2 * STAGE_BYTES;
    copy_tile(to, x, step * DEEP, rows, down, k);
    copy_tile(to + STAGE_BYTES, y, step * DEEP, rows, across, n);
    copy_commit();
  };
  float sum[4][4][4] = {};
  fetch(0);
  for (int step = 0; step < steps; step++) {
    copy_wait<0>();
    __syncthreads();  // this stage is there, and nobody reads the other any more
    if (step + 1 < steps) fetch(step + 1);
    const u32 left_at = start + step % STAGES * 2 * STAGE_BYTES + my_down * 2, right_at = start + step % STAGES * 2 * STAGE_BYTES + STAGE_BYTES + my_across * 2;
#pragma unroll
    for (int deep = 0; deep < DEEP; deep += 16) {
      u32 left[4][4], right[2][4];
#pragma unroll
      for (int i = 0; i < 4; i++) load_matrices_transposed(left[i], left_at + (deep + (lane >> 4) * 8 + (lane & 7)) * ROW_BYTES + (i * 16 + (lane >> 3 & 1) * 8) * 2);
#pragma unroll
      for (int j = 0; j < 2; j++) load_matrices_transposed(right[j], right_at + (deep + (lane >> 3 & 1) * 8 + (lane & 7)) * ROW_BYTES + (j * 16 + (lane >> 4) * 8) * 2);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) TYPE::mma(sum[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
    }
  }
  const int g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = down + my_down + i * 16 + h * 8 + g, column = across + my_across + j * 8 + 2 * c;
        if (row >= k || column >= n) continue;
        float2* to = (float2*)(sums + (size_t)row * n + column);
        const float2 before = *to;
        *to = make_float2(before.x + sum[i][j][2 * h], before.y + sum[i][j][2 * h + 1]);
      }
}
