// marlin_gemm_*_tensor: y [M, N] = x [M, K] @ W.T + bias in the matrix units of an M5, by Metal 4's matmul2d. A threadgroup for each
// 64 x 64 of y and each slice of K; grid (N tiles, M tiles, slices). With several slices y is partial sums [slices, M, N] in float,
// for marlin_reduce to add up.
//
// Weights are decoded into threadgroup memory, a panel by each simdgroup, in x's type: matmul2d takes no half with bfloat. x is read
// where it is. Both are cut off at K. Nobody may know which thread has which sum, so each is asked for its place.
using namespace billfish;
using Rows = tensor<device T, dextents<int, 2>, tensor_inline>;
using Columns = tensor<threadgroup T, dextents<int, 2>, tensor_inline>;
alignas(16) threadgroup T slabs[2 * UNIT_SLAB];
const int m = x_shape[0], n = size[0], k = size[1], lane = thread_index_in_simdgroup, own = simdgroup_index_in_threadgroup;
const int row0 = threadgroup_position_in_grid.y * UNIT_TILE, panel0 = threadgroup_position_in_grid.x * UNIT_PANELS;
auto w = weights<GROUP>(codes, high, scales, offsets, factor, n, k);
const int slice = threadgroup_position_in_grid.z, slices = threadgroups_per_grid.z;
const int length = (w.runs() + slices - 1) / slices;
const int begin = min(slice * length, w.runs()), end = min(begin + length, w.runs());
const int panels = min(UNIT_PANELS, w.panels() - panel0);
const bool active = own < panels;
w = w.from(panel0 + own);

mpp::tensor_ops::matmul2d<UNIT_PRODUCT, execution_simdgroups<UNIT_PANELS>> units;
auto sums = units.template get_destination_cooperative_tensor<Rows, Columns, float>();
for (ushort i = 0; i < sums.get_capacity(); i++) {
  if (sums.is_valid_element(i)) sums[i] = 0.0f;
}
WeightParts<decltype(w)> next;
if (active && begin < end) next.fetch(w, begin, lane);
for (int run = begin; run < end; run++) {
  threadgroup T* slab = slabs + run % 2 * UNIT_SLAB;
  if (active) next.put(slab + own * PANEL * UNIT_STRIDE, UNIT_STRIDE, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // it is full; and nobody reads the other any more
  if (active && run + 1 < end) next.fetch(w, run + 1, lane);
  const int left = min(k - run * RUN, RUN);
  Rows some_rows((device T*)x + (long(row0) * k + run * RUN), dextents<int, 2>(left, min(m - row0, UNIT_TILE)), array<int, 2>({1, k}));
  Columns some_columns(slab, dextents<int, 2>(left, panels * PANEL), array<int, 2>({1, UNIT_STRIDE}));
  units.run(some_rows, some_columns, sums);
}
for (ushort i = 0; i < sums.get_capacity(); i++) {
  if (!sums.is_valid_element(i)) continue;
  const auto at = sums.get_multidimensional_index(i);  // column, row
  const int row = row0 + at[1], column = panel0 * PANEL + at[0];
  if (row >= m || column >= n) continue;
  store(y, (long(slice) * m + row) * n + column, HAS_BIAS ? sums[i] + float(bias[column]) : sums[i]);
}
