// marlin_rotate: the heads of q, k and v [rows, ...], normalized and rotated (RoPE), in the order that attention reads.
//
//   qkv [rows, q, k, v]     q has a gate behind each head where it is GATED; without v (SAME), values are keys as they come
//   v [rows, v]             where it is APART, qkv is without it
//   q [HEADS, rows, SIZE], kv [2, KV_HEADS, rows, SIZE]
//
// The first 2 PAIRS numbers of a head rotate: i with i + PAIRS, or 2i with 2i + 1 where pairs are ADJACENT. numbers: epsilon, and what cosine and
// sine are multiplied with. A simdgroup for each head of each row; grid (32, rows, HEADS + 2 KV_HEADS).
using namespace billfish;
threadgroup float head[SIZE];
const int lane = thread_position_in_grid.x, row = thread_position_in_grid.y, which = thread_position_in_grid.z, rows = qkv_shape[0];
const bool query = which < HEADS, value = which >= HEADS + KV_HEADS;
const int number = query ? which : (which - HEADS) % (KV_HEADS > 0 ? KV_HEADS : 1), queries = HEADS * SIZE * (GATED ? 2 : 1);
const int column = query ? number * SIZE * (GATED ? 2 : 1) : queries + (number + (value && !SAME ? KV_HEADS : 0)) * SIZE;
const device T* from = qkv + long(row) * qkv_shape[1] + column;
if (APART && value) from = v + long(row) * v_shape[1] + number * SIZE;
float squares = 0.0f;
for (int i = lane; i < SIZE; i += 32) {
  head[i] = float(from[i]);
  squares += head[i] * head[i];
}
const bool weighted = query ? Q_NORM : !value && K_NORM;
if (weighted || (value && V_NORM)) {
  const float factor = rsqrt(simd_sum(squares) / float(SIZE) + numbers[0]);
  for (int i = lane; i < SIZE; i += 32) head[i] *= weighted ? factor * (query ? q_norm[i] : k_norm[i]) : factor;
}
simdgroup_barrier(mem_flags::mem_threadgroup);
for (int pair = lane; pair < (value ? 0 : PAIRS); pair += 32) {
  const int first = ADJACENT ? 2 * pair : pair, second = ADJACENT ? 2 * pair + 1 : pair + PAIRS;
  const float angle = float(positions[row]) * frequencies[pair];
  const float cosine = numbers[1] * precise::cos(angle), sine = numbers[1] * precise::sin(angle), a = head[first], b = head[second];
  head[first] = a * cosine - b * sine;
  head[second] = b * cosine + a * sine;
}
simdgroup_barrier(mem_flags::mem_threadgroup);
device T* to = query ? q : kv;
to += (long(query || !value ? number : KV_HEADS + number) * rows + row) * SIZE;
for (int i = lane; i < SIZE; i += 32) to[i] = activation<T>(head[i]);
