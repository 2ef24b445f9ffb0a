// marlin_gemm_*: y [M, N] = x [M, K] @ W.T + bias. A threadgroup for each 64 x 32 of y; grid (N tiles, M tiles).
// marlin_gemm_fused_* has one buffer of x, the least threadgroup memory; others have two.
using namespace billfish;
alignas(16) threadgroup T slabs[BUFFERS * Slab<T>::size];
const int m = x_shape[0], n = size[0], index = thread_index_in_threadgroup;
const int row0 = threadgroup_position_in_grid.y * TILE_M, panel = threadgroup_position_in_grid.x * TILE_PANELS + index / 32;
const auto w = weights<GROUP>(codes, high, scales, offsets, factor, n, size[1]);

simdgroup_matrix<float, 8, 8> sums[TILE_M / 4];
sum_tile<BUFFERS>(x, AllRows{m}, w, row0, 0, min(m - row0, TILE_M), panel, 0, w.runs(), slabs, index, sums);
store_tile<HAS_BIAS>(sums, y, bias, AllRows{m}, n, row0, panel, index % 32);
