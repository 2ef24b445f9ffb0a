// marlin_add_norm: each row of the residual stream takes in y, and is normalized for the next matmul:
//
//   h = residual + scale (POST ? rms_norm(y) post : y),  x = NORM ? rms_norm(h) weight : h;  h = residual without ADD
//
// numbers: epsilon, scale. The width is a multiple of 4. Each threadgroup of a row reads all of it and writes its share:
// one core would take as long as a matmul. Grid (threads, rows, shares).
using namespace billfish;
threadgroup float scratch[2 * 32];
const int width = residual_shape[1], index = thread_position_in_threadgroup.x, threads = threads_per_threadgroup.x;
const int simdgroup = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup, simdgroups = simdgroups_per_threadgroup;
const long at = long(threadgroup_position_in_grid.y) * width;
const auto before = residual + at;  // of this row, so that an index has 32 bits
const auto added = y + at;
const int share = threadgroup_position_in_grid.z, shares = threadgroups_per_grid.z;
const int begin = width / 4 * share / shares * 4, end = width / 4 * (share + 1) / shares * 4;
const float epsilon = numbers[0];
float factor = numbers[1];
if (ADD && POST) {
  float squares = 0.0f;
  for (int first = 4 * index; first < width; first += 4 * threads) {
    #pragma unroll
    for (int i = first; i < first + 4; i++) squares = fma(float(added[i]), float(added[i]), squares);
  }
  squares = simd_sum(squares);
  if (lane == 0) scratch[simdgroup] = squares;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  factor *= rsqrt(simd_sum(lane < simdgroups ? scratch[lane] : 0.0f) / float(width) + epsilon);
}
float squares = 0.0f;
if (NORM) {
  for (int first = 4 * index; first < width; first += 4 * threads) {
    #pragma unroll
    for (int i = first; i < first + 4; i++) {
      const float v = ADD ? fma(factor * float(added[i]), POST ? post[i] : 1.0f, before[i]) : before[i];
      squares = fma(v, v, squares);
    }
  }
}
float normal = 1.0f;
if (NORM) {
  squares = simd_sum(squares);
  if (lane == 0) scratch[32 + simdgroup] = squares;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  normal = rsqrt(simd_sum(lane < simdgroups ? scratch[32 + lane] : 0.0f) / float(width) + epsilon);
}
device float* sums = h + at;
device T* normalized = x + at;
for (int first = begin + 4 * index; first < end; first += 4 * threads) {
  #pragma unroll
  for (int i = first; i < first + 4; i++) {
    const float v = ADD ? fma(factor * float(added[i]), POST ? post[i] : 1.0f, before[i]) : before[i];
    sums[i] = v;
    normalized[i] = activation<T>(v * normal * (NORM ? weight[i] : 1.0f));
  }
}
