// The best token of each row of scores [m, vocabulary], by CTAs that share a row; of equal ones the first. The last CTA of a row to end
// writes it where the next step reads it, and moves on by a position.
//
// Compiled with THREADS.
#include "device.cuh"

struct Best {
  float score;
  int token;
  __device__ __forceinline__ void take(float other, int i) {
    if (other > score || (other == score && i < token)) score = other, token = i;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
marlin_choose(const float* __restrict__ scores, int vocabulary, Best* __restrict__ parts, u32* __restrict__ ended, int* __restrict__ tokens, int* __restrict__ positions) {
  __shared__ Best bests[THREADS / 32];
  __shared__ bool last;
  const int row = blockIdx.y, lane = threadIdx.x & 31;
  let_next_start();
  wait_for_previous();
  auto gather = [&](Best best) {
    for (int round = 0; round < 2; round++) {
      for (int d = 16; d; d >>= 1) best.take(__shfl_xor_sync(0xffffffff, best.score, d), __shfl_xor_sync(0xffffffff, best.token, d));
      if (round) break;
      if (lane == 0) bests[threadIdx.x >> 5] = best;
      __syncthreads();
      best = lane < THREADS / 32 ? bests[lane] : Best{-INFINITE, 0};
    }
    return best;
  };
  Best best = {-INFINITE, 0};
  const float* from = scores + (size_t)row * vocabulary;
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < vocabulary; i += gridDim.x * THREADS) best.take(from[i], i);
  best = gather(best);
  if (threadIdx.x == 0) {
    parts[row * gridDim.x + blockIdx.x] = best;
    __threadfence();
    last = atomicAdd(ended + row, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  best = {-INFINITE, 0};
  for (int i = threadIdx.x; i < gridDim.x; i += THREADS) {
    const volatile Best* other = parts + row * gridDim.x + i;
    best.take(other->score, other->token);
  }
  __syncthreads();
  best = gather(best);
  if (threadIdx.x == 0) tokens[row] = best.token, positions[row]++, ended[row] = 0;
}
