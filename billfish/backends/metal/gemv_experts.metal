// marlin_gemv_experts_*: y [choices, N], a choice's row of x times the weights of its expert, + that expert's bias.
// A threadgroup for each choice and each 32 * COLUMNS columns; grid (columns, choices). See matvec.metal.
using namespace billfish;
alignas(16) threadgroup float scratch[SIMDGROUPS * 32 * COLUMNS];
const int k = x_shape[1], n = codes_shape[2];
const int lane = thread_index_in_simdgroup, part = simdgroup_index_in_threadgroup;
const int column0 = threadgroup_position_in_grid.x * 32 * COLUMNS;
const int choice = threadgroup_position_in_grid.y;
const uint expert = ids[choice];
const bool known = expert < uint(codes_shape[0]);
const int slice_k = slice_length<GROUP>(k, SIMDGROUPS);
const int k_begin = min(part * slice_k, k), k_end = min(k_begin + slice_k, k);

float sums[COLUMNS] = {0};
if (known) {
  const long before = long(expert) * n;  // in a plane of one row
  const auto w = weights<GROUP>(codes + before * codes_shape[1], high + before * high_shape[1],
                                scales + before * scales_shape[1], offsets + before * offsets_shape[1], factor[expert], n, k);
  sum_columns<1, COLUMNS>(x + long(choice / SHARE) * k, 1, w, column0 + lane * COLUMNS, k_begin, k_end, scratch + part * 32,
                          lane, sums);
} else {
  for (int c = 0; c < COLUMNS; c++) sums[c] = as_type<float>(NO_NUMBER);
}
store_columns<1, COLUMNS, SIMDGROUPS, HAS_BIAS>(sums, scratch, y + long(choice) * n,
                                                bias + (HAS_BIAS && known ? long(expert) * n : 0), 1,
                                                n, column0, part, lane);
