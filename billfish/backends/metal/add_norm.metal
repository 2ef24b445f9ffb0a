// marlin_add_norm: each row of the residual stream takes in y, and is normalized for the next matmul:
//
//   h = residual + scale (POST ? rms_norm(y) post : y),  x = NORM ? rms_norm(h) weight : h;  h = residual without ADD
//
// numbers: epsilon, scale. A threadgroup for each row; grid (threads, rows).
using namespace billfish;
threadgroup float scratch[2 * 32];
const int width = residual_shape[1], index = thread_position_in_threadgroup.x, threads = threads_per_threadgroup.x;
const int simdgroup = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup, simdgroups = simdgroups_per_threadgroup;
const long at = long(threadgroup_position_in_grid.y) * width;
const float epsilon = numbers[0];
float factor = numbers[1];
if (ADD && POST) {
  float squares = 0.0f;
  for (int i = index; i < width; i += threads) squares += float(y[at + i]) * float(y[at + i]);
  squares = simd_sum(squares);
  if (lane == 0) scratch[simdgroup] = squares;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f;
  for (int i = 0; i < simdgroups; i++) sum += scratch[i];
  factor *= rsqrt(sum / float(width) + epsilon);
}
float squares = 0.0f;
for (int i = index; i < width; i += threads) {
  float v = residual[at + i];
  if (ADD) v += factor * float(y[at + i]) * (POST ? post[i] : 1.0f);
  h[at + i] = v;
  squares += v * v;
}
float normal = 1.0f;
if (NORM) {
  squares = simd_sum(squares);
  if (lane == 0) scratch[32 + simdgroup] = squares;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f;
  for (int i = 0; i < simdgroups; i++) sum += scratch[32 + i];
  normal = rsqrt(sum / float(width) + epsilon);
}
for (int i = index; i < width; i += threads) x[at + i] = activation<T>(h[at + i] * normal * (NORM ? weight[i] : 1.0f));
