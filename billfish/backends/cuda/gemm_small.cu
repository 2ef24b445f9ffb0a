// Few rows of x: y^T = W x^T by mma.m16n8k16, as fast as the weights come from memory.
//
// A CTA owns 16 * TILES columns of y and 8 * COLUMNS rows of x. Its warps split K, a brick of 128 k at a time, each with
// a ring of bricks and of x in shared memory of its own that it fills itself, and they meet once, at the end, where the
// sums are added in a fixed order. Scales multiply the float32 sums of their groups, so weights are exact in the tensor
// core; offsets multiply the sums of x, which one more product with ones gives. The order of additions depends on WARPS
// alone, so a row's result does not depend on its batch.
//
// Compiled with: TYPE, ELEMENT, SCALE, OFFSET, GROUPS, and WARPS, TILES, COLUMNS, DEPTH (bricks in flight for each warp).
#include "decode.cuh"
#include "hopper.cuh"

constexpr int ROWS = 8 * COLUMNS, X_BYTES = ROWS * 256, W_BYTES = TILES * Brick::bytes, WIDTH = 16 * TILES;

// A warp's ring. Hopper fills a slot with three bulk copies by one lane, the others with copies of 16 bytes by all. x is
// in two boxes of 64 k, rows of 128 bytes; the 16-byte piece i of row r is at i ^ (r % 8), so eight rows lie in
// different banks.
struct Ring {
  u32 x, w, full;  // in shared memory; `full` is a barrier for each slot
  int lane, tile, count, tiles, bricks, first_row, rows, box_rows, k, x_stride;
  const u8* weights;
  const u16* source;
  const TensorMap* map;

#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ void fetch_weights(int slot, int brick) const {
    if (lane == 0) {
      barrier_expect(full + 8 * slot, box_rows * 256 + count * Brick::bytes);
      copy_bulk(w + slot * W_BYTES, weights + Brick::at(tile, brick, tiles, bricks), count * Brick::bytes, full + 8 * slot);
    }
  }
  __device__ __forceinline__ void fetch_x(int slot, int brick) const {
    if (lane == 0)
#pragma unroll
      for (int half = 0; half < 2; half++)
        copy_box(x + slot * X_BYTES + half * ROWS * 128, map, full + 8 * slot, brick * 128 + half * 64, first_row);
  }
  __device__ __forceinline__ void wait(int slot, u32 parity) const { barrier_wait(full + 8 * slot, parity); }
#else
  __device__ __forceinline__ void fetch_weights(int slot, int brick) const {
    const u8* from = weights + Brick::at(tile, brick, tiles, bricks);
    for (int i = lane; i < count * Brick::bytes / 16; i += 32) copy_async(w + slot * W_BYTES + i * 16, from + i * 16, 16);
  }
  __device__ __forceinline__ void fetch_x(int slot, int brick) const {
    const int piece = lane & 15, left = k - brick * 128 - piece * 8;
    const u32 to = x + slot * X_BYTES + (piece >> 3) * ROWS * 128;
    for (int row = lane >> 4; row < rows; row += 2) {
      const u16* from = source + (size_t)(first_row + row) * x_stride + (left > 0 ? brick * 128 + piece * 8 : 0);
      copy_async(to + row * 128 + (((piece & 7) ^ (row & 7)) << 4), from, 2 * max(0, min(8, left)));
    }
    copy_commit();
  }
  __device__ __forceinline__ void wait(int, u32) const {
    copy_wait<DEPTH - 1>();
    __syncwarp();
  }
#endif
};

extern "C" __global__ void __launch_bounds__(WARPS * 32)
marlin_gemm_small(const __grid_constant__ TensorMap x_map, const u8* __restrict__ weights, const float* __restrict__ row_scale,
                  const u16* __restrict__ x, const void* __restrict__ bias, u16* __restrict__ y, int m, int n, int k, int x_stride) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ __align__(8) u64 barriers[WARPS][DEPTH];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
  const int bricks = (k + 127) / 128, tiles = (n + 15) / 16, tile = blockIdx.x * TILES, first_row = blockIdx.y * ROWS;
  const int rows = min(ROWS, m - first_row), mine = (bricks - warp + WARPS - 1) / WARPS;
  Ring ring;
  ring.x = shared_address(shared) + warp * DEPTH * X_BYTES;
  ring.w = shared_address(shared) + WARPS * DEPTH * X_BYTES + warp * DEPTH * W_BYTES;
  ring.full = shared_address(barriers[warp]);
  ring.lane = lane, ring.tile = tile, ring.count = min(TILES, tiles - tile), ring.tiles = tiles, ring.bricks = bricks;
  ring.first_row = first_row, ring.rows = rows, ring.box_rows = min(ROWS, m), ring.k = k, ring.x_stride = x_stride;
  ring.weights = weights, ring.source = x, ring.map = &x_map;
#if __CUDA_ARCH__ >= 900
  if (lane == 0) {
    for (int i = 0; i < DEPTH; i++) barrier_init(ring.full + 8 * i, 1);
    barrier_init_done();
  }
  __syncwarp();
#endif

  let_next_start();
  for (int i = 0; i < min(mine, DEPTH); i++) ring.fetch_weights(i, warp + i * WARPS);
  float scale_of_row = 1;
  if (threadIdx.x < WIDTH && tile * 16 + threadIdx.x < n) scale_of_row = row_scale[tile * 16 + threadIdx.x];
  wait_for_previous();  // weights do not depend on the kernel before this one; x may
  for (int i = 0; i < DEPTH; i++) {
    if (i < mine) ring.fetch_x(i, warp + i * WARPS);
    else copy_commit();
  }

  float sum[TILES][COLUMNS][4] = {};
  int slot = 0;
  u32 parity = 0;
  for (int i = 0; i < mine; i++) {
    ring.wait(slot, parity);
    const u32 bricks_here = ring.w + slot * W_BYTES, matrices = ring.x + slot * X_BYTES + (lane & 7) * 128;
    u32 b[COLUMNS][4];
    uint4 codes[TILES];
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      float part[TILES][COLUMNS][4] = {}, x_sum[COLUMNS][4] = {};
#pragma unroll
      for (int j = 0; j < Brick::group_tiles; j++) {
        const int kt = group * Brick::group_tiles + j, word = kt * Element::words % 4, at = kt % 2 * 2;
        if (kt % 2 == 0)
#pragma unroll
          for (int mt = 0; mt < COLUMNS; mt++)
            load_matrices(b[mt], matrices + (kt / 4 * ROWS + mt * 8) * 128 + ((kt % 4 * 2 + (lane >> 3) ^ (lane & 7)) << 4));
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          if (word == 0) codes[t] = Brick::codes(bricks_here + t * Brick::bytes, kt * Element::words / 4, lane);
          const u32 words[4] = {codes[t].x, codes[t].y, codes[t].z, codes[t].w};
          u32 a[4];
          Element::decode(words + word, a);
#pragma unroll
          for (int mt = 0; mt < COLUMNS; mt++) TYPE::mma(part[t][mt], a, b[mt][at], b[mt][at + 1]);
        }
        if constexpr (OFFSET != NONE) {
          const u32 ones[4] = {TYPE::ones, TYPE::ones, TYPE::ones, TYPE::ones};
#pragma unroll
          for (int mt = 0; mt < COLUMNS; mt++) TYPE::mma(x_sum[mt], ones, b[mt][at], b[mt][at + 1]);
        }
      }
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        const float2 s = Brick::scale(bricks_here + t * Brick::bytes, g, group);
        const float low = s.x * (1 / Element::raw), high = s.y * (1 / Element::raw);
#pragma unroll
        for (int mt = 0; mt < COLUMNS; mt++) {
          sum[t][mt][0] += part[t][mt][0] * low, sum[t][mt][1] += part[t][mt][1] * low;
          sum[t][mt][2] += part[t][mt][2] * high, sum[t][mt][3] += part[t][mt][3] * high;
        }
        if constexpr (OFFSET != NONE) {
          const float2 o = Brick::offset(Brick::stored_offset(bricks_here + t * Brick::bytes, g, group), s);
#pragma unroll
          for (int mt = 0; mt < COLUMNS; mt++) {
            sum[t][mt][0] += x_sum[mt][0] * o.x, sum[t][mt][1] += x_sum[mt][1] * o.x;
            sum[t][mt][2] += x_sum[mt][0] * o.y, sum[t][mt][3] += x_sum[mt][1] * o.y;
          }
        }
      }
    }
    __syncwarp();  // all lanes have read this slot
    if (i + DEPTH < mine) {
      ring.fetch_weights(slot, warp + (i + DEPTH) * WARPS);
      ring.fetch_x(slot, warp + (i + DEPTH) * WARPS);
    } else copy_commit();
    if (++slot == DEPTH) slot = 0, parity ^= 1;
  }

  // The warps' sums side by side in shared memory, [WARPS][ROWS][LINE], then added in order.
  constexpr int LINE = WIDTH + 4;  // two of them are 8 banks apart
  float* sums = (float*)shared;
  float* scales = sums + WARPS * ROWS * LINE;
  __syncthreads();
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int mt = 0; mt < COLUMNS; mt++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        sums[(warp * ROWS + mt * 8 + 2 * c + (i & 1)) * LINE + t * 16 + g + (i >> 1) * 8] = sum[t][mt][i];
  if (threadIdx.x < WIDTH) scales[threadIdx.x] = scale_of_row;
  __syncthreads();
  for (int i = threadIdx.x; i < WIDTH * rows; i += WARPS * 32) {
    const int column = i % WIDTH, row = i / WIDTH, out = tile * 16 + column;
    if (out >= n) continue;
    float v = 0;
#pragma unroll
    for (int s = 0; s < WARPS; s++) v += sums[(s * ROWS + row) * LINE + column];
    y[(size_t)(first_row + row) * n + out] = (u16)TYPE::pack(activate(v * scales[column] + bias_value(load_bias(bias, out))), 0);
  }
}
