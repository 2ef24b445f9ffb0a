// marlin_gemm_*_striped: partial sums [slices, M, N] in float, slice s over the s-th part of K, for marlin_reduce to add up.
// A threadgroup for each 64 x 32 of y and each slice; grid (N tiles, M tiles, slices).
//
// Every sum is written by one threadgroup, so there is nothing to wait for and nothing to lock, and the result does not depend on
// who comes first.
using namespace billfish;
alignas(16) threadgroup T slabs[BUFFERS * Slab<T>::size];
const int m = x_shape[0], n = size[0], index = thread_index_in_threadgroup;
const int row0 = threadgroup_position_in_grid.y * TILE_M, panel = threadgroup_position_in_grid.x * TILE_PANELS + index / 32;
const int slice = threadgroup_position_in_grid.z, slices = threadgroups_per_grid.z;
const auto w = weights<GROUP>(codes, high, scales, offsets, factor, n, size[1]);
const int length = (w.runs() + slices - 1) / slices;
const int begin = min(slice * length, w.runs()), end = min(begin + length, w.runs());

simdgroup_matrix<float, 8, 8> sums[TILE_M / 4];
sum_tile<BUFFERS>(x, AllRows{m}, w, row0, 0, min(m - row0, TILE_M), panel, begin, end, slabs, index, sums);
store_tile<false>(sums, y + long(slice) * m * n, x, AllRows{m}, n, row0, panel, index % 32);
