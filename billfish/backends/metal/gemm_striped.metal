// marlin_gemm_*_striped: partial sums [SLICES, M, N] in float, slice s over the s-th part of K, for marlin_reduce to add up.
//
// Work is one list, tile after tile down the columns and all slices of a tile side by side; each threadgroup takes the same
// number of entries, one after the other. Every sum is written by one threadgroup, so there is nothing to wait for and
// nothing to lock, and the result does not depend on who comes first.
using namespace billfish;
constexpr int stride = Slab<T>::stride;
alignas(16) threadgroup T x_slabs[2 * TILE_M * stride];
alignas(16) threadgroup T w_slabs[2 * TILE_N * stride];
const int m = x_shape[0], k = x_shape[1], n = codes_shape[1];
const int index = thread_index_in_threadgroup;
const int row_tiles = (m + TILE_M - 1) / TILE_M, column_tiles = (n + TILE_N - 1) / TILE_N;
const int work = row_tiles * column_tiles * SLICES;
const int share = (work + int(threadgroups_per_grid.x) - 1) / int(threadgroups_per_grid.x);
const int slice_k = ((k + TILE_K - 1) / TILE_K + SLICES - 1) / SLICES * TILE_K;
const int first = int(threadgroup_position_in_grid.x) * share, last = min(first + share, work);

simdgroup_matrix<float, 8, 8> sums[TILE_M / 16 * 4];
const auto w = weights<GROUP>(codes, high, scales, offsets, factor, n, k);
for (int entry = first; entry < last; entry++) {
  const int tile = entry / SLICES, slice = entry % SLICES;
  const int row0 = tile % row_tiles * TILE_M, column0 = tile / row_tiles * TILE_N;
  const int k_begin = min(slice * slice_k, k), k_end = min(k_begin + slice_k, k);
  sum_tile<TILE_M>(x, AllRows{m}, w, row0, column0, k_begin, k_end, x_slabs, w_slabs, index, sums);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the slabs become scratch memory
  store_sums<TILE_M / 16, 4, false>(sums, (threadgroup float*)w_slabs + index / 32 * 256, y + long(slice) * m * n, x,
                                    AllRows{m}, n, row0 + index / 64 * (TILE_M / 2), column0 + index / 32 % 2 * 32, index % 32);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // and slabs again
}
