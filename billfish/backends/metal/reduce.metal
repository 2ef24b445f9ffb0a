// marlin_reduce: y [M, N] = the sum of partials [slices, M, N], in their order, + bias. A thread for each number of y.
const uint n = partials_shape[2], count = partials_shape[1] * n;
const uint i = thread_position_in_grid.x;
if (i < count) {
  float sum = partials[i];
  for (int slice = 1; slice < partials_shape[0]; slice++) sum += partials[long(slice) * count + i];
  y[i] = T(HAS_BIAS ? sum + float(bias[i % n]) : sum);
}
