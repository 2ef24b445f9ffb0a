// Norm and RoPE of one head, a warp for it: each lane has pairs of numbers lane, lane + 32, ... of the head.
//
// With PAIRS (those that rotate; the numbers after them do not) and ADJACENT (a pair is 2i and 2i + 1, not i and i + PAIRS).
#pragma once
#include "pages.cuh"

static_assert(HEAD % 2 == 0 && 2 * PAIRS <= HEAD, "pairs of numbers");

// Where the numbers of pair t are in a head.
struct Pair {
  int first, second;
  bool turns, any;  // it rotates; it is there, and does not fill a page's row up to WIDE with zeros
  __device__ __forceinline__ explicit Pair(int t) {
    turns = t < PAIRS, any = t < HEAD / 2;
    first = !turns ? PAIRS * 2 + (t - PAIRS) * 2 : ADJACENT ? 2 * t : t, second = turns && !ADJACENT ? t + PAIRS : first + 1;
  }
};

// The numbers a and b of a pair by the angle (cosine, sine).
DEVICE void turn(float& a, float& b, float2 angle) {
  const float turned = a * angle.x - b * angle.y;
  b = a * angle.y + b * angle.x, a = turned;
}
