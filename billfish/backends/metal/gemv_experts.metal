// marlin_gemv_experts_*: y [choices, N], a choice's row of x times the weights of its expert, + that expert's bias.
// A threadgroup for each choice and each 16 columns; grid (panels, choices). See matvec.metal.
using namespace billfish;
threadgroup float scratch[MOST_PARTS * PANEL];
const int n = size[0], k = size[1], panel = threadgroup_position_in_grid.x, choice = threadgroup_position_in_grid.y;
const int part = simdgroup_index_in_threadgroup, parts = simdgroups_per_threadgroup, lane = thread_index_in_simdgroup;
const uint expert = ids[choice];
if (expert < uint(codes_shape[0])) {
  const auto w = weights<GROUP>(codes + long(expert) * codes_shape[1], high + long(expert) * high_shape[1],
                                scales + long(expert) * scales_shape[1], offsets + long(expert) * offsets_shape[1],
                                factor[expert], n, k);
  multiply_panel<1, 4, HAS_BIAS>(x + long(choice / SHARE) * k, 1, w, panel, part, parts, lane, scratch, y + long(choice) * n,
                                 bias + (HAS_BIAS ? long(expert) * n : 0));
} else if (part == 0 && lane < PANEL && panel * PANEL + lane < n) {
  store(y, long(choice) * n + panel * PANEL + lane, as_type<float>(NO_NUMBER));
}
