// marlin_gemv_rows_*: y [M, N] = x [M, K] @ W.T + bias for M from 2 to 8. A threadgroup for each 16 columns; see matvec.metal.
using namespace billfish;
threadgroup float scratch[8 * MOST_PARTS * PANEL];
const int m = x_shape[0], panel = threadgroup_position_in_grid.x;
const int part = simdgroup_index_in_threadgroup, parts = simdgroups_per_threadgroup, lane = thread_index_in_simdgroup;
const auto w = weights<GROUP>(codes, high, scales, offsets, factor, size[0], size[1]);
if (!has_aligned_rows(x, w.k)) {  // each row by itself
  for (int row = 0; row < m; row++) {
    multiply_panel<1, 4, HAS_BIAS, GATE>(x + row * w.k, 1, w, panel, part, parts, lane, scratch + row * MOST_PARTS * PANEL,
                                         y + row * (GATE != 0 ? w.n / 2 : w.n), bias);
  }
} else if (m <= 2) {
  multiply_panel<2, 4, HAS_BIAS, GATE>(x, m, w, panel, part, parts, lane, scratch, y, bias);
} else if (m <= 4) {
  multiply_panel<4, 4, HAS_BIAS, GATE>(x, m, w, panel, part, parts, lane, scratch, y, bias);
} else {
  multiply_panel<8, 4, HAS_BIAS, GATE>(x, m, w, panel, part, parts, lane, scratch, y, bias);
}
