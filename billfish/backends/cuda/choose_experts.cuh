// Which experts a row takes, and with what weight: by one warp, from the router's logits. models/description.py says what each field means.
#pragma once
#include "device.cuh"

constexpr u32 ALL_LANES = 0xffffffff;

struct Choosing {
  int experts, chosen, groups, groups_used;  // chosen, groups: up to 32
  float scale;
  const float *selection_bias, *expert_scale;  // or null
};

// Larger numbers have larger keys, and equal numbers the same. NaN has the least key, so that it spoils no index; 0 is nobody's.
DEVICE u32 key_of(float v) {
  if (v != v) return 1;
  const u32 bits = __float_as_uint(v + 0.0f);  // -0 becomes 0
  return bits >> 31 ? ~bits : bits | 0x80000000;
}
DEVICE float of_key(u32 key) { return key <= 1 ? -INFINITE : __uint_as_float(key >> 31 ? key ^ 0x80000000 : ~key); }

// The largest of a warp's keys, and where the first one of that size is; lane l has those of l, l + 32 and so on.
struct Best { u32 key; int index; };
template <int OWN> DEVICE Best best_of(const u32 (&keys)[OWN], int lane) {
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < OWN; i++) top = max(top, keys[i]);
  top = __reduce_max_sync(ALL_LANES, top);
  u32 index = OWN * 32 - 1;
#pragma unroll
  for (int i = OWN - 1; i >= 0; i--)
    if (keys[i] == top) index = i * 32 + lane;
  return {top, (int)__reduce_min_sync(ALL_LANES, index)};
}

// logits: lane l has those of the experts l, l + 32 and so on. Writes ids [chosen], the largest score first, of equal ones the lower index; and
// their weights. BY_SIGMOID: scores are sigmoids of logits, else a softmax. TO_ONE: the weights sum to 1 before they are scaled.
template <bool BY_SIGMOID, bool TO_ONE, int OWN>
DEVICE void choose_experts(const float (&logits)[OWN], const Choosing& how, int lane, int* ids, float* weights) {
  u32 keys[OWN];
  float scores[OWN];
  const bool biased = how.selection_bias != nullptr;
#pragma unroll
  for (int i = 0; i < OWN; i++) keys[i] = i * 32 + lane < how.experts ? key_of(logits[i]) : 0;
  float all = 0;
  if constexpr (BY_SIGMOID) {
#pragma unroll
    for (int i = 0; i < OWN; i++) scores[i] = 1 / (1 + expf(-logits[i]));
  } else {
    const float top = of_key(best_of(keys, lane).key);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      scores[i] = i * 32 + lane < how.experts ? expf(logits[i] - top) : 0;
      all += scores[i];
    }
    if (biased || !TO_ONE)
#pragma unroll
      for (int d = 16; d; d >>= 1) all += __shfl_xor_sync(ALL_LANES, all, d);
  }
  if (BY_SIGMOID || biased)
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (const int e = i * 32 + lane; e < how.experts) keys[i] = key_of((BY_SIGMOID ? scores[i] : scores[i] / all) + (biased ? how.selection_bias[e] : 0.0f));

  if (how.groups > 1) {  // only those with the largest sums of their two best are chosen from
    const int size = how.experts / how.groups;
    auto group_of = [&](int e) { return min(e / size, how.groups - 1); };
    u32 sums[1] = {0};  // of group `lane`
    for (int g = 0; g < how.groups; g++) {
      u32 own[OWN];
#pragma unroll
      for (int i = 0; i < OWN; i++) own[i] = group_of(i * 32 + lane) == g ? keys[i] : 0;
      const Best first = best_of(own, lane);
#pragma unroll
      for (int i = 0; i < OWN; i++)
        if (i * 32 + lane == first.index) own[i] = 0;
      const Best second = best_of(own, lane);
      const float sum = of_key(first.key) + (size > 1 ? of_key(second.key) : 0.0f);
      if (lane == g) sums[0] = key_of(sum);
    }
    u32 used = 0;  // a bit for each
    for (int j = 0; j < how.groups_used; j++) {
      const int g = best_of(sums, lane).index;
      used |= 1u << g;
      if (lane == g) sums[0] = 0;
    }
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (!(used >> group_of(i * 32 + lane) & 1)) keys[i] = 0;
  }

  int id = 0;
  float score = 0, sum = BY_SIGMOID ? TO_ONE ? 1e-20f : 1 : TO_ONE ? 0 : all;
  for (int j = 0; j < how.chosen; j++) {
    const int e = min(best_of(keys, lane).index, how.experts - 1);
    float own = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (i * 32 + lane == e) own = scores[i], keys[i] = 0;
    own = __shfl_sync(ALL_LANES, own, e & 31);
    if (TO_ONE) sum += own;
    if (lane == j) id = e, score = own;
  }
  if (lane >= how.chosen) return;
  float weight = score / sum * how.scale;
  if (how.expert_scale) weight *= how.expert_scale[id];
  ids[lane] = id, weights[lane] = weight;
}
