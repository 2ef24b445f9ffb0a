// dequant_*: W [N, K] in T, bit for bit as the reference has it. A simdgroup turns 32 columns of 32 k through threadgroup
// memory, so that both the words it reads and the rows it writes are side by side.
using namespace billfish;
constexpr int stride = 32 + 2;
alignas(16) threadgroup T squares[4 * 32 * stride];
const int n = codes_shape[1], k = size[0];
const int lane = thread_index_in_simdgroup, part = simdgroup_index_in_threadgroup;
const int column0 = threadgroup_position_in_grid.x * 32;
const int k0 = (threadgroup_position_in_grid.y * 4 + part) * 32;
threadgroup T* square = squares + part * 32 * stride;

const auto w = weights<GROUP>(codes, high, scales, offsets, factor, n, k);
using W = decltype(weights<GROUP>(codes, high, scales, offsets, factor, n, k));
WeightRun<W> run;
for (int at = k0; at < k0 + 32; at += RUN_K) {
  run.fetch(w, column0 + lane, at, true);
  half4 numbers[W::word_k / 4];
  for (int i = 0; i < RUN_K / W::word_k; i++) {
    W::Element::decode(run.words[i], run.high >> (i * W::word_k), numbers);
    for (int j = 0; j < W::word_k; j++) {
      square[lane * stride + at - k0 + i * W::word_k + j] = T(W::apply(float4(numbers[j / 4]), run.group)[j % 4]);
    }
  }
}
simdgroup_barrier(mem_flags::mem_threadgroup);
if (k0 + lane < k) {
  for (int row = 0; row < 32 && column0 + row < n; row++) {
    y[long(column0 + row) * k + k0 + lane] = square[row * stride + lane];
  }
}
