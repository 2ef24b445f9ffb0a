// y[t] = sum over j, in that order, of weights[t][j] * x[t][j]: the weighted sum of the outputs of a token's experts, x [tokens, chosen, n].
//
// Rows of weights are `apart` numbers from each other. shared [tokens, n], if it is given, is added last, times weights[t][chosen]; y may be the
// same memory. A token with an expert id out of range gets NaN. A thread has eight columns of a token.
//
// Compiled with TYPE, ID (int, unsigned or long long), and WEIGHT (Float, Halves<F16> or Halves<BF16>).
#include "device.cuh"

struct Float {
  DEVICE float load(const void* from, size_t i) { return __ldg((const float*)from + i); }
};
template <class T> struct Halves {
  DEVICE float load(const void* from, size_t i) { return T::to_float(__ldg((const u16*)from + i)); }
};

extern "C" __global__ void __launch_bounds__(256)
marlin_mix(const u16* __restrict__ x, const ID* __restrict__ ids, const void* __restrict__ weights, const u16* shared, u16* y, int experts, int chosen,
           int apart, int n) {
  wait_for_previous();
  let_next_start();
  const int parts = (n + blockDim.x * 8 - 1) / (blockDim.x * 8), first = (blockIdx.x % parts * blockDim.x + threadIdx.x) * 8;
  const size_t token = blockIdx.x / parts;
  if (first >= n) return;
  float sums[8] = {};
  auto add = [&](float weight, const u16* from) {
    if (n % 8 == 0) {
      const uint4 v = *(const uint4*)from;
      const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 8; i++) sums[i] += weight * TYPE::to_float((u16)(words[i / 2] >> (i % 2 * 16)));
    } else {
      for (int i = 0; i < 8 && first + i < n; i++) sums[i] += weight * TYPE::to_float(from[i]);
    }
  };
  bool there = true;
#pragma unroll 8
  for (int j = 0; j < chosen; j++) {
    const size_t visit = token * chosen + j;
    const ID id = __ldg(ids + visit);
    there = there && id >= 0 && id < experts;
    add(WEIGHT::load(weights, token * apart + j), x + visit * n + first);
  }
  if (shared) add(WEIGHT::load(weights, token * apart + chosen), shared + token * n + first);
  u16* to = y + token * n + first;
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = there ? TYPE::pack_finite(sums[2 * i], sums[2 * i + 1]) : 0x7fff7fff;
  if (n % 8 == 0) *(uint4*)to = make_uint4(words[0], words[1], words[2], words[3]);
  else
    for (int i = 0; i < 8 && first + i < n; i++) to[i] = (u16)(words[i / 2] >> (i % 2 * 16));
}
