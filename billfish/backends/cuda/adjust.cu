// Copies rows of logits [.., vocabulary] to out [late rows, vocabulary] with penalties, biases and grammar masks, as Adjustments.apply of
// llm/sampler.py has it, to the bit. The CTAs (x) split a row (y).
#include "late.cuh"

extern "C" __global__ void __launch_bounds__(256) marlin_adjust(const float* __restrict__ logits, int vocabulary, const LateRow* __restrict__ rows, float* __restrict__ out) {
  let_next_start();
  wait_for_previous();
  const LateRow row = rows[blockIdx.y];
  const float* from = logits + (size_t)row.row * vocabulary;
  float* to = out + (size_t)blockIdx.y * vocabulary;
  const int each = (vocabulary + gridDim.x - 1) / gridDim.x;
  const int first = min(vocabulary, (int)blockIdx.x * each), last = min(vocabulary, first + each);
  auto allowed = [&](int i) { return !row.mask || row.mask[i >> 5] >> (i & 31) & 1; };
  for (int i = first + threadIdx.x; i < last; i += 256) to[i] = allowed(i) ? from[i] : -INFINITE;
  __syncthreads();
  for (int k = threadIdx.x; k < row.count; k += 256) {
    const Adjustment a = row.adjustments[k];
    if (a.token < first || a.token >= last || !allowed(a.token)) continue;
    float logit = from[a.token];
    if (a.seen) logit = __fmul_rn(logit, logit > 0 ? row.above : row.below);
    to[a.token] = __fadd_rn(__fsub_rn(logit, a.minus), a.plus);  // no FMA: NumPy rounds each
  }
}
