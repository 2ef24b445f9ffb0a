// Sorts visits, the (token, expert) pairs, by expert, in one CTA: route.cuh.
//
// Compiled with ID (int, unsigned or long long) and WARPS.
#include "route.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
marlin_route(const ID* __restrict__ ids, int4* __restrict__ table, int* __restrict__ order, int visits, int experts, int width) {
  extern __shared__ int counts[];
  wait_for_previous();
  let_next_start();
  sort_visits<WARPS>(ids, table, order, counts, visits, experts, width);
}
