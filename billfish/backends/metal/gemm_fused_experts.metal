// marlin_gemm_fused_experts_*: as marlin_gemm_experts_*, with the least threadgroup memory; see fused.metal.
using namespace billfish;
alignas(16) threadgroup T x_slab[TILE_M * Slab<T>::stride];
alignas(16) threadgroup T staging[4 * 64];
const int k = x_shape[1], n = codes_shape[2];
const int index = thread_index_in_threadgroup, part = index / 32;
const int row0 = threadgroup_position_in_grid.y * TILE_M;
const int column0 = threadgroup_position_in_grid.x * TILE_N + part * FUSED_COLUMNS;
const int last = min(row0 + TILE_M, size[0]);

simdgroup_matrix<float, 8, 8> sums[TILE_M / 4];
for (int begin = row0, end; begin < last; begin = end) {
  end = run_end(ids, begin, last);
  const uint expert = ids[begin];
  const bool known = expert < uint(codes_shape[0]);
  const SortedChoices<SHARE> choices = {order, begin, end};
  if (known) {
    const long before = long(expert) * n;  // in a plane of one row
    const auto w = weights<GROUP>(codes + before * codes_shape[1], high + before * high_shape[1],
                                  scales + before * scales_shape[1], offsets + before * offsets_shape[1], factor[expert], n, k);
    sum_tile_fused<TILE_M>(x, choices, w, row0, column0, x_slab, staging + part * 64, index, sums);
  } else {
    for (int i = 0; i < TILE_M / 4; i++) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(as_type<float>(NO_NUMBER));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the slab becomes scratch memory
  store_sums<TILE_M / 8, 2, HAS_BIAS>(sums, (threadgroup float*)x_slab + part * 128, y,
                                      bias + (HAS_BIAS && known ? long(expert) * n : 0), choices, n, row0, column0, index % 32);
  // The next run fills the slab behind a barrier of its own.
}
