// marlin_gemm_experts_*: y [choices, N], a choice's row of x times the weights of its expert, + that expert's bias, for choices that
// are sorted by expert. A threadgroup for each TILE_M choices x 64 columns; grid (N tiles, tiles of choices). See experts.metal.
using namespace billfish;
constexpr int stride = Slab<T>::stride;
alignas(16) threadgroup T x_slabs[2 * TILE_M * stride];
alignas(16) threadgroup T w_slabs[2 * TILE_N * stride];
const int k = x_shape[1], n = codes_shape[2];
const int index = thread_index_in_threadgroup;
const int row0 = threadgroup_position_in_grid.y * TILE_M, column0 = threadgroup_position_in_grid.x * TILE_N;
const int last = min(row0 + TILE_M, size[0]);

simdgroup_matrix<float, 8, 8> sums[TILE_M / 16 * 4];
for (int begin = row0, end; begin < last; begin = end) {
  end = run_end(ids, begin, last);
  const uint expert = ids[begin];
  const bool known = expert < uint(codes_shape[0]);
  const SortedChoices<SHARE> choices = {order, begin, end};
  if (known) {
    const long before = long(expert) * n;  // in a plane of one row
    const auto w = weights<GROUP>(codes + before * codes_shape[1], high + before * high_shape[1],
                                  scales + before * scales_shape[1], offsets + before * offsets_shape[1], factor[expert], n, k);
    sum_tile<TILE_M>(x, choices, w, row0, column0, 0, k, x_slabs, w_slabs, index, sums);
  } else {
    for (int i = 0; i < TILE_M / 16 * 4; i++) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(as_type<float>(NO_NUMBER));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the slabs become scratch memory
  store_sums<TILE_M / 16, 4, HAS_BIAS>(sums, (threadgroup float*)w_slabs + index / 32 * 256, y,
                                       bias + (HAS_BIAS && known ? long(expert) * n : 0), choices, n,
                                       row0 + index / 64 * (TILE_M / 2), column0 + index / 32 % 2 * 32, index % 32);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // and slabs again
}
