// marlin_gemm_*: y [M, N] = x [M, K] @ W.T + bias. A threadgroup for each TILE_M x 64 of y; grid (N tiles, M tiles).
using namespace billfish;
constexpr int stride = Slab<T>::stride;
alignas(16) threadgroup T x_slabs[2 * TILE_M * stride];
alignas(16) threadgroup T w_slabs[2 * TILE_N * stride];
const int m = x_shape[0], k = x_shape[1], n = codes_shape[1];
const int index = thread_index_in_threadgroup;
const int row0 = threadgroup_position_in_grid.y * TILE_M, column0 = threadgroup_position_in_grid.x * TILE_N;

simdgroup_matrix<float, 8, 8> sums[TILE_M / 16 * 4];
const auto w = weights<GROUP>(codes, high, scales, offsets, factor, n, k);
sum_tile<TILE_M>(x, AllRows{m}, w, row0, column0, 0, k, x_slabs, w_slabs, index, sums);
threadgroup_barrier(mem_flags::mem_threadgroup);  // the slabs become scratch memory
store_sums<TILE_M / 16, 4, HAS_BIAS>(sums, (threadgroup float*)w_slabs + index / 32 * 256, y, bias, AllRows{m}, n,
                                     row0 + index / 64 * (TILE_M / 2), column0 + index / 32 % 2 * 32, index % 32);
