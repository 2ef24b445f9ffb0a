// Sums over the lanes of a warp.
#pragma once
#include "device.cuh"

// Of COUNT numbers that each lane has, the sum of one over the lanes whose numbers differ in bits from LAST on: the lane's highest bits say which.
template <int LAST, int COUNT> DEVICE float sum_of_one(float (&t)[COUNT], int lane) {
  int d = 16;
#pragma unroll
  for (int n = COUNT / 2; n; n /= 2, d /= 2)
#pragma unroll
    for (int i = 0; i < n; i++) {
      const bool upper = lane & d;
      const float kept = upper ? t[i + n] : t[i], given = upper ? t[i] : t[i + n];
      t[i] = kept + __shfl_xor_sync(0xffffffff, given, d);
    }
#pragma unroll
  for (; d >= LAST; d /= 2) t[0] += __shfl_xor_sync(0xffffffff, t[0], d);
  return t[0];
}
