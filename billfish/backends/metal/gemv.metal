// marlin_gemv_*: y [1, N] = x [1, K] @ W.T + bias. A threadgroup for each 16 columns; see matvec.metal.
using namespace billfish;
threadgroup float scratch[MOST_PARTS * PANEL];
const auto w = weights<GROUP>(codes, high, scales, offsets, factor, size[0], size[1]);
multiply_panel<1, 4, HAS_BIAS, GATE>(x, 1, w, threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup,
                               simdgroups_per_threadgroup, thread_index_in_simdgroup, scratch, y, bias);
