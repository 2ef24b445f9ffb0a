// marlin_gemm_experts_*: y [choices, N], a choice's row of x times the weights of its expert, + that expert's bias, for
// choices that are sorted by expert. A threadgroup for some choices, at most 64, and 32 columns; grid (N tiles, tiles of
// choices). See experts.metal. marlin_gemm_fused_experts_* has one buffer of x.
using namespace billfish;
alignas(16) threadgroup T slabs[BUFFERS * Slab<T>::size];
const int n = size[0], k = size[1], index = thread_index_in_threadgroup;
const int panel = threadgroup_position_in_grid.x * TILE_PANELS + index / 32;
const int share = tile_choices(choices[0], threadgroups_per_grid.y);
const int row0 = threadgroup_position_in_grid.y * share, last = min(row0 + share, choices[0]);

simdgroup_matrix<float, 8, 8> sums[TILE_M / 4];
for (int begin = row0, end; begin < last; begin = end) {
  end = run_end(ids, begin, last);
  const uint expert = ids[begin];
  const bool known = expert < uint(codes_shape[0]);
  const SortedChoices<SHARE> rows = {order, begin, end};
  if (known) {
    const auto w = weights<GROUP>(codes + long(expert) * codes_shape[1], high + long(expert) * high_shape[1],
                                  scales + long(expert) * scales_shape[1], offsets + long(expert) * offsets_shape[1],
                                  factor[expert], n, k);
    sum_tile<BUFFERS>(x, rows, w, row0, begin - row0, end - row0, panel, 0, w.runs(), slabs, index, sums);
  } else {
    for (int i = 0; i < TILE_M / 4; i++) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(as_type<float>(NO_NUMBER));
  }
  store_tile<HAS_BIAS>(sums, y, bias + (HAS_BIAS && known ? long(expert) * n : 0), rows, n, row0, panel, index % 32);
  if (BUFFERS == 2) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // everybody is done with the last slab
  }
}
