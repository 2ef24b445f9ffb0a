// Sampling: the next token of each row of logits [m, vocabulary], as choose_token of llm/sampler.py has it. Greedy, or with a temperature
// the token where the cumulative probability, in the order of tokens, passes `random` of the total. The token goes to `picked`, by row, and to
// `chosen`, by slot, where the next step reads it.
//
// Probabilities are integers, multiples of 2^-40 of the largest one, so that no sum depends on its order. The CTAs of a cluster split a row
// of the vocabulary. top_k and top_p keep all tokens above a threshold, and the first `ties` that are equal to it. The threshold is found
// by radix selection: ten bits at a time, by histograms of 1024 bins.
//
// Compiled for 1024 threads.
#include "hopper.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / 32, DIGIT = 10;
constexpr u64 UNIT = 1ull << 40;

struct Choice {  // of a row
  float temperature, top_p, min_p;
  int top_k, slot, unused;
  double random;
};
struct Best {
  float score;
  int token;
  __device__ __forceinline__ void take(float other, int i) {
    if (other > score || (other == score && i < token)) score = other, token = i;
  }
};
// How many tokens, and the sum of their probabilities.
struct Sum {
  u64 mass;
  u64 count;
  __device__ __forceinline__ void add(const Sum& other) { mass += other.mass, count += other.count; }
};

struct Shared {
  Best bests[WARPS], best;
  Sum warps[WARPS], bins[THREADS], part;
  int bin;
  Sum above;  // the bin
};

// What is at an address of the shared memory of a CTA of the cluster.
DEVICE u64 load_part(const u64* p, int part) {
#if __CUDA_ARCH__ >= 900
  const float2 v = load_cluster(cluster_address(shared_address(p), part));
  return (u64)__float_as_uint(v.y) << 32 | __float_as_uint(v.x);
#else
  return *p;
#endif
}
DEVICE Sum load_part(const Sum& sum, int part) { return {load_part(&sum.mass, part), load_part(&sum.count, part)}; }
DEVICE void meet_parts() {
#if __CUDA_ARCH__ >= 900
  cluster_meet();
#else
  __syncthreads();
#endif
}

// The sum of all threads up to this one, and `all`, that of the whole CTA.
DEVICE Sum scan(Sum v, Sum& all, Shared& s) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  auto up = [&](Sum& sum) {
    for (int d = 1; d < 32; d <<= 1) {
      const Sum other = {__shfl_up_sync(0xffffffff, sum.mass, d), __shfl_up_sync(0xffffffff, sum.count, d)};
      if (lane >= d) sum.add(other);
    }
  };
  up(v);
  __syncthreads();
  if (lane == 31) s.warps[warp] = v;
  __syncthreads();
  Sum before = s.warps[lane];
  up(before);
  all = {__shfl_sync(0xffffffff, before.mass, 31), __shfl_sync(0xffffffff, before.count, 31)};
  if (warp) v.add({__shfl_sync(0xffffffff, before.mass, warp - 1), __shfl_sync(0xffffffff, before.count, warp - 1)});
  return v;
}

// A row, as the CTAs of its cluster see it: each has the tokens from `first` to `last`.
struct Row {
  const float* scores;
  int first, last, part, parts;
  float best, factor;  // exponents are (score - best) * factor

  __device__ __forceinline__ u64 weight(int i) const {
    const float power = exp2f((scores[i] - best) * factor);
    return power >= 0 ? min((u64)(power * (float)UNIT), UNIT - 1) : 0;  // NaN are none
  }
  // The largest limit such that tokens above it are fewer than `wanted` (or have less mass), and with those equal to it are enough; how
  // many of the equal ones are wanted; and the sum of all that are left.
  __device__ Sum find(bool by_count, u64 wanted, u64& limit, u64& ties, Shared& s) const {
    Sum above = {0, 0};
    limit = 0;
    for (int shift = 40 - DIGIT; shift >= 0; shift -= DIGIT) {
      __syncthreads();
      s.bins[threadIdx.x] = {0, 0};
      __syncthreads();
      Sum lowest = {0, 0};  // most are in this bin
      for (int i = first + threadIdx.x; i < last; i += THREADS) {
        const u64 w = weight(i);
        if (w >> shift >> DIGIT != limit >> shift >> DIGIT || w == 0) continue;
        const int bin = w >> shift & (1 << DIGIT) - 1;
        if (bin == 0) lowest.add({w, 1});
        else atomicAdd(&s.bins[bin].mass, w), atomicAdd(&s.bins[bin].count, 1ull);
      }
      Sum all;
      scan(lowest, all, s);
      if (threadIdx.x == 0) s.bins[0] = all;
      meet_parts();
      Sum mine = {0, 0};  // from the largest bin down, of all parts
      for (int p = 0; p < parts; p++) mine.add(load_part(s.bins[THREADS - 1 - threadIdx.x], p));
      Sum before = scan(mine, all, s);
      before = {before.mass - mine.mass + above.mass, before.count - mine.count + above.count};
      const u64 less = by_count ? before.count : before.mass, have = less + (by_count ? mine.count : mine.mass);
      // Where all together are too few, the last bin is as far as it goes.
      if (less < wanted && (have >= wanted || threadIdx.x == THREADS - 1)) s.bin = THREADS - 1 - threadIdx.x, s.above = before;
      meet_parts();
      above = s.above, limit |= (u64)s.bin << shift;
    }
    ties = by_count ? wanted - above.count : limit ? (wanted - above.mass + limit - 1) / limit : 0;
    return {above.mass + ties * limit, above.count + ties};
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
marlin_choose(const float* __restrict__ scores, int vocabulary, const Choice* __restrict__ choices, int* __restrict__ picked, int* __restrict__ chosen) {
  __shared__ Shared s;
  const int lane = threadIdx.x & 31, number = blockIdx.y;
  Row row;
  row.part = blockIdx.x, row.parts = gridDim.x, row.scores = scores + (size_t)number * vocabulary;
  const int each = (vocabulary + row.parts - 1) / row.parts;
  row.first = min(vocabulary, row.part * each), row.last = min(vocabulary, row.first + each);
  wait_for_previous();
  const Choice choice = choices[number];
  auto put = [&](int token) { picked[number] = token, chosen[choice.slot] = token; };

  Best best = {-INFINITE, 0};
  for (int i = row.first + threadIdx.x; i < row.last; i += THREADS) best.take(row.scores[i], i);
  for (int round = 0; round < 2; round++) {
    for (int d = 16; d; d >>= 1) best.take(__shfl_xor_sync(0xffffffff, best.score, d), __shfl_xor_sync(0xffffffff, best.token, d));
    if (round) break;
    if (lane == 0) s.bests[threadIdx.x >> 5] = best;
    __syncthreads();
    best = s.bests[lane];
  }
  if (threadIdx.x == 0) s.best = best;
  meet_parts();
  for (int p = 0; p < row.parts; p++) {
    const u64 other = load_part((const u64*)&s.best, p);
    best.take(__uint_as_float((u32)other), (int)(other >> 32));
  }
  const bool drawn = choice.temperature > 0 && fabsf(best.score) < INFINITE;
  if (!drawn) {
    if (row.part == 0 && threadIdx.x == 0) put(best.token);
    meet_parts();  // others may still read here
    return;
  }

  row.best = best.score, row.factor = 1.44269504f / choice.temperature;
  // Of all tokens: those above a limit of 0.
  Sum mine = {0, 0}, all;
  for (int i = row.first + threadIdx.x; i < row.last; i += THREADS) mine.mass += row.weight(i);
  scan(mine, all, s);
  if (threadIdx.x == 0) s.part = all;
  meet_parts();
  all = {0, 0};
  for (int p = 0; p < row.parts; p++) all.add(load_part(s.part, p));
  u64 limit = 0, ties = 0;
  if (choice.top_k > 0 && choice.top_k < vocabulary) all = row.find(true, choice.top_k, limit, ties, s);
  if (choice.top_p < 1) all = row.find(false, max((u64)1, (u64)((double)choice.top_p * all.mass)), limit, ties, s);
  if (const u64 least = min((u64)((double)choice.min_p * UNIT), UNIT - 1); least > limit) {  // min_p drops more: all that is below `least`
    limit = least - 1, ties = 0, mine = {0, 0};
    for (int i = row.first + threadIdx.x; i < row.last; i += THREADS)
      if (const u64 w = row.weight(i); w > limit) mine.mass += w;
    Sum own;
    scan(mine, own, s);
    meet_parts();  // others may still read `part`
    if (threadIdx.x == 0) s.part = own;
    meet_parts();
    all = {0, 0};
    for (int p = 0; p < row.parts; p++) all.add(load_part(s.part, p));
  }

  // This part's share: mass above the limit, and how many are equal to it.
  mine = {0, 0};
  for (int i = row.first + threadIdx.x; i < row.last; i += THREADS) {
    const u64 w = row.weight(i);
    if (w > limit) mine.mass += w;
    else if (w == limit && limit) mine.count++;
  }
  Sum share;
  scan(mine, share, s);
  meet_parts();
  if (threadIdx.x == 0) s.part = share;
  meet_parts();
  const u64 target = min((u64)(choice.random * all.mass), all.mass - 1);
  u64 before = 0, equal = 0;
  auto left = [&](u64 count) { return min(count, ties - min(ties, equal)); };  // of equal ones, after those of earlier parts
  for (int p = 0; p < row.part; p++) {
    const Sum other = load_part(s.part, p);
    before += other.mass + left(other.count) * limit, equal += other.count;
  }
  const u64 most = left(share.count), end = before + share.mass + most * limit;
  if (before <= target && target < end) {
    Sum sofar = {0, 0};
    for (int start = row.first; start < row.last; start += THREADS) {
      const int i = start + threadIdx.x;
      const u64 w = i < row.last ? row.weight(i) : 0;
      const Sum here = {w > limit ? w : 0, w == limit && limit ? 1u : 0u};
      Sum chunk, sum = scan(here, chunk, s);
      sum.add(sofar);
      const u64 with = before + sum.mass + min(sum.count, most) * limit;
      const u64 without = before + sum.mass - here.mass + min(sum.count - here.count, most) * limit;
      if (without <= target && target < with) put(i);
      sofar.add(chunk);
      if (before + sofar.mass + min(sofar.count, most) * limit > target) break;
    }
  }
  meet_parts();
}
