// marlin_gemm_fused_*: y [M, N] = x [M, K] @ W.T + bias with the least threadgroup memory; see fused.metal.
using namespace billfish;
alignas(16) threadgroup T x_slab[TILE_M * Slab<T>::stride];
alignas(16) threadgroup T staging[4 * 64];
const int m = x_shape[0], k = x_shape[1], n = codes_shape[1];
const int index = thread_index_in_threadgroup, part = index / 32;
const int row0 = threadgroup_position_in_grid.y * TILE_M;
const int column0 = threadgroup_position_in_grid.x * TILE_N + part * FUSED_COLUMNS;

simdgroup_matrix<float, 8, 8> sums[TILE_M / 4];
const auto w = weights<GROUP>(codes, high, scales, offsets, factor, n, k);
sum_tile_fused<TILE_M>(x, AllRows{m}, w, row0, column0, x_slab, staging + part * 64, index, sums);
threadgroup_barrier(mem_flags::mem_threadgroup);  // the slab becomes scratch memory
store_sums<TILE_M / 8, 2, HAS_BIAS>(sums, (threadgroup float*)x_slab + part * 128, y, bias, AllRows{m}, n, row0, column0,
                                    index % 32);
