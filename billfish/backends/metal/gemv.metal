// marlin_gemv_*: y [M, N] = x [M, K] @ W.T + bias for M <= ROWS. A threadgroup for each 32 * COLUMNS columns; see matvec.metal.
using namespace billfish;
alignas(16) threadgroup float scratch[SIMDGROUPS * 32 * (ROWS > COLUMNS ? ROWS : COLUMNS)];
const int m = x_shape[0], k = x_shape[1], n = codes_shape[1];
const int lane = thread_index_in_simdgroup, part = simdgroup_index_in_threadgroup;
const int column0 = threadgroup_position_in_grid.x * 32 * COLUMNS;
const int slice_k = slice_length<GROUP>(k, SIMDGROUPS);
const int k_begin = min(part * slice_k, k), k_end = min(k_begin + slice_k, k);

float sums[ROWS * COLUMNS] = {0};
const auto w = weights<GROUP>(codes, high, scales, offsets, factor, n, k);
sum_columns<ROWS, COLUMNS>(x, m, w, column0 + lane * COLUMNS, k_begin, k_end, scratch + part * ROWS * 32, lane, sums);

store_columns<ROWS, COLUMNS, SIMDGROUPS, HAS_BIAS>(sums, scratch, y, bias, m, n, column0, part, lane);
