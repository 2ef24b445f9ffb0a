// Sorts visits, the (token, expert) pairs, by expert: a stable counting sort by one CTA. rows.cuh says what it writes.
#pragma once
#include "device.cuh"

// Visit i goes to expert ids[i]. Pairs whose id is out of range come last, and are in no entry. Each of SORTERS warps counts, then places, a
// range of pairs. counts: shared memory, [SORTERS][experts + 1], then what is before each expert: rows, and entries.
template <int SORTERS, class Id>
DEVICE void sort_visits(const Id* ids, int4* table, int* order, int* counts, int visits, int experts, int width) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, columns = experts + 1;
  int *mine = counts + warp * columns, *rows = counts + SORTERS * columns, *entries = rows + columns + 1;
  const int each = (visits + SORTERS * 32 - 1) / (SORTERS * 32) * 32, first = warp * each, last = min(visits, first + each);
  for (int i = threadIdx.x; i < SORTERS * columns; i += SORTERS * 32) counts[i] = 0;
  __syncthreads();
  // A lane's pair; how many of the warp's 32 go to the same expert, and how many of these come before it. expert -1: none.
  struct Seen { int visit, expert, before, all; };
  auto look = [&](int i) -> Seen {
    const int visit = i + lane;
    const Id id = visit < last ? ids[visit] : 0;
    const int expert = visit >= last ? -1 : id >= 0 && id < experts ? (int)id : experts;
    const u32 same = __match_any_sync(0xffffffff, expert);
    return {visit, expert, __popc(same & (1u << lane) - 1), __popc(same)};
  };
  const bool once = each == 32;  // a lane has one pair, which it remembers
  Seen seen;
  for (int i = first; i < last; i += 32) {
    seen = look(i);
    if (seen.expert >= 0 && seen.before == 0) mine[seen.expert] += seen.all;
    __syncwarp();
  }
  __syncthreads();
  for (int e = threadIdx.x; e < columns; e += SORTERS * 32) {
    constexpr int AT_ONCE = SORTERS < 8 ? SORTERS : 8;
    static_assert(SORTERS % AT_ONCE == 0, "counts are loaded some at a time");
    int sum = 0, own[AT_ONCE];
#pragma unroll 1
    for (int first_warp = 0; first_warp < SORTERS; first_warp += AT_ONCE) {
      int* from = counts + first_warp * columns + e;
#pragma unroll
      for (int w = 0; w < AT_ONCE; w++) own[w] = from[w * columns];
#pragma unroll
      for (int w = 0; w < AT_ONCE; w++) from[w * columns] = sum, sum += own[w];
    }
    rows[e + 1] = sum;
    entries[e + 1] = e < experts ? (sum + width - 1) / width : 0;
  }
  __syncthreads();
  if (warp < 2) {  // rows by one warp, entries by another
    int *sums = warp ? entries : rows, before = 0;
    if (lane == 0) sums[0] = 0;
    for (int i = 1; i <= columns; i += 32) {
      int v = i + lane <= columns ? sums[i + lane] : 0;
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const int other = __shfl_up_sync(0xffffffff, v, d);
        if (lane >= d) v += other;
      }
      v += before;
      if (i + lane <= columns) sums[i + lane] = v;
      before = __shfl_sync(0xffffffff, v, 31);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) table[0] = make_int4(entries[experts], rows[experts], 0, 0);
  for (int e = warp; e < experts; e += SORTERS)
    for (int i = entries[e] + lane; i < entries[e + 1]; i += 32) table[1 + i] = make_int4(e, rows[e], rows[e + 1] - rows[e], entries[e]);
  for (int i = first; i < last; i += 32) {
    if (!once) seen = look(i);
    if (seen.expert >= 0) order[rows[seen.expert] + mine[seen.expert] + seen.before] = seen.visit;
    __syncwarp();
    if (seen.expert >= 0 && seen.before == 0) mine[seen.expert] += seen.all;
    __syncwarp();
  }
}
