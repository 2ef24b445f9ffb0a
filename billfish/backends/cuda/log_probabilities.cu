// The log probabilities of the chosen token and of the best ones, of rows of logits as they were before penalties and masks, as with_best
// of llm/sampler.py has it. A CTA has a row. Each of its threads knows the best token that it has not given yet; the best of these is the
// next alternative, and the warp of the thread that had it finds that thread's next one.
//
// Compiled for 1024 threads.
#include "late.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / 32, MOST = 21;  // the chosen token and 20 alternatives

struct Scored {
  int token;
  float log_probability;
};
struct Best {
  float score;
  int token;
  __device__ __forceinline__ void take(float other, int i) {
    if (other > score || (other == score && i < token)) score = other, token = i;
  }
};

// The best of a warp, in all lanes.
DEVICE Best best_of_warp(Best best) {
  for (int d = 16; d; d >>= 1) best.take(__shfl_xor_sync(0xffffffff, best.score, d), __shfl_xor_sync(0xffffffff, best.token, d));
  return best;
}
// And of the CTA, in all threads.
DEVICE Best best_of_all(Best best, Best (&bests)[WARPS]) {
  best = best_of_warp(best);
  __syncthreads();  // others may still read `bests`
  if ((threadIdx.x & 31) == 0) bests[threadIdx.x >> 5] = best;
  __syncthreads();
  return best_of_warp(bests[threadIdx.x & 31]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
marlin_log_probabilities(const float* __restrict__ logits, int vocabulary, const LateRow* __restrict__ rows, const int* __restrict__ picked, Scored* __restrict__ out) {
  __shared__ Best bests[WARPS];
  __shared__ double sums[WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  let_next_start();
  wait_for_previous();
  const LateRow row = rows[blockIdx.x];
  if (row.alternatives < 0) return;
  const float* scores = logits + (size_t)row.row * vocabulary;
  const Best none = {-INFINITE, 0x7fffffff};
  Best mine = none;
  for (int i = threadIdx.x; i < vocabulary; i += THREADS) mine.take(scores[i], i);
  Best best = best_of_all(mine, bests);
  const float top = best.score;
  double sum = 0;
  for (int i = threadIdx.x; i < vocabulary; i += THREADS) sum += expf(scores[i] - top);
  for (int round = 0; round < 2; round++) {
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, d);
    if (round) break;
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = sums[lane];
  }
  const double log_sum = log(sum);
  auto give = [&](int place, int token) { out[blockIdx.x * MOST + place] = {token, (float)((double)scores[token] - top - log_sum)}; };
  if (threadIdx.x == 0) give(0, picked[blockIdx.x]);
  for (int n = 1; n <= min(row.alternatives, MOST - 1) && best.token < vocabulary; n++) {
    const int owner = best.token % THREADS;
    if (threadIdx.x == owner) give(n, best.token);
    if (warp == owner >> 5) {
      Best next = none;
      for (int i = owner + lane * THREADS; i < vocabulary; i += 32 * THREADS)
        if (scores[i] < best.score || (scores[i] == best.score && i > best.token)) next.take(scores[i], i);
      next = best_of_warp(next);
      if (threadIdx.x == owner) mine = next;
    }
    best = best_of_all(mine, bests);
  }
}
