// GPTQ's rounding of some columns of W, one after the other. Columns are rows here, [columns, n] float64 each, and a thread has a row of W:
//   target_j = targets_j + sum over i < j of factors_ji wrong_i,   levels_j the nearest value of the element,   wrong_j = exact_j - what that means
// scale, inverse, zero and minimum are [groups, n]; zero and minimum may be null. groups: of each column. table: the element's values, in increasing order.
//
// For 128 threads, and up to 64 columns and 256 values.
#include "device.cuh"

constexpr int MOST = 64;

extern "C" __global__ void __launch_bounds__(128)
marlin_round_columns(const double* factors, int stride, const double* targets, const double* exact, double* wrong, float* levels, const int* groups, const float* scale,
                     const float* inverse, const float* zero, const float* minimum, const float* table, int values, int columns, int n) {
  __shared__ double factor[MOST * MOST];
  __shared__ float value[256];
  for (int i = threadIdx.x; i < columns * columns; i += 128) factor[i / columns * MOST + i % columns] = factors[(size_t)(i / columns) * stride + i % columns];
  for (int i = threadIdx.x; i < values; i += 128) value[i] = table[i];
  __syncthreads();
  const int row = blockIdx.x * 128 + threadIdx.x;
  if (row >= n) return;
  for (int j = 0; j < columns; j++) {
    const size_t at = (size_t)j * n + row, of_group = (size_t)groups[j] * n + row;
    double target = targets[at];
#pragma unroll 8
    for (int i = 0; i < j; i++) target += factor[j * MOST + i] * wrong[(size_t)i * n + row];
    float x = (float)target;
    if (minimum) x -= minimum[of_group];
    x *= inverse[of_group];
    if (zero) x += zero[of_group];
    int low = 0, high = values - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (x > (value[middle] + value[middle + 1]) * 0.5f) low = middle + 1;
      else high = middle;
    }
    float means = value[low];
    levels[at] = means;
    if (zero) means -= zero[of_group];
    means *= scale[of_group];
    if (minimum) means += minimum[of_group];
    wrong[at] = exact[at] - means;
  }
}
