// GEMM for many rows of x on Hopper: y^T = W x^T by wgmma, with decoded weights as the A operand in registers.
//
// Warp-specialized: one warp copies bricks of weights and another boxes of x (TMA), 128 k at a time, into a ring in shared memory.
// WARPGROUPS warpgroups decode and multiply, each for 64 * TALL columns of y and WIDTH rows of x. Decoding and wgmma share the issue
// slots and registers of an SM, so what counts is how few instructions there are beside each wgmma. A *strip* is 64 columns of y,
// the M of one wgmma.
//
// TEAMS > 1: the warpgroups are that many teams, which alternate along K. SPLIT > 1: split K over that many CTAs of a cluster,
// each with at least one brick for each team. In both cases the partners send each other their
// float32 partial sums, and each adds and stores a part of the rows. Otherwise the kernel is persistent: a CTA loops over tiles, and the
// next tile's copies already run while it stores.
//
// PAIRED: two tiles share a strip, and each multiplies it with one half of the rows of x. A tile then has half a strip
// less, so there are more tiles, which may fill all SMs.
//
// EXPERTS: tiles are those of a table (rows.cuh). An expert's last tile is multiplied at half of its width if that is enough.
//
// Compiled with: TYPE, ELEMENT, SCALE, OFFSET, GROUPS, and WARPGROUPS, TEAMS, TALL, WIDTH, STAGES, SPLIT, PAIRED, BUFFERS
// (fragments whose weights are in registers) and BATCH (those that are decoded, then multiplied, at a time).
#include "factors.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"

// Shared memory: STAGES of x, STAGES of bricks, then what tiles.cuh says.
constexpr int X_BYTES = WIDTH * 256;
constexpr bool HALVES_ROWS = WIDTH >= 64;  // a product of half as many rows takes less time

template <class T> DEVICE void wgmma(float (&d)[WIDTH / 2], const u32 (&a)[4], u64 b, int accumulate) {
  if constexpr (T::is_half) WGMMA_ASM(WGMMA, "k16.f32.f16.f16", ", 1, 1, 0");
  else WGMMA_ASM(WGMMA, "k16.f32.bf16.bf16", ", 1, 1, 0");
}
// With half as many rows of B, into the first half of d.
template <class T> DEVICE void wgmma_half(float (&d)[WIDTH / 2], const u32 (&a)[4], u64 b, int accumulate) {
  if constexpr (T::is_half) WGMMA_ASM(WGMMA_HALF, "k16.f32.f16.f16", ", 1, 1, 0");
  else WGMMA_ASM(WGMMA_HALF, "k16.f32.bf16.bf16", ", 1, 1, 0");
}

DEVICE void multiply(const TensorMap& x_map, const u8* __restrict__ weights, const float* __restrict__ row_scale, const void* __restrict__ bias, u16* __restrict__ y,
                     const Source& rows, int n, int k) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ __align__(8) Barriers barriers;
  const u32 xs = shared_address(shared), ws = xs + STAGES * X_BYTES, turned = ws + STAGES * W_BYTES, inboxes = turned + CONSUMERS * 32;
  const u32 full = shared_address(barriers.full), empty = shared_address(barriers.empty), received = shared_address(barriers.received);
  const Share share(rows, n, k);
  make_barriers(barriers, share.part);
  if (!ROUTED) let_next_start();
  // Known to be the same for a whole warp, these keep addresses in uniform registers, where copies and wgmma want them.
  const int any_warp = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0), warpgroup = any_warp >> 2;

  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    const bool elected = elect();
    if (any_warp == CONSUMERS / 32) copy_weights(share, rows, n, weights, ws, full, empty, elected);
    else if (any_warp == CONSUMERS / 32 + 1) {
      if (elected) prefetch_map(&x_map);
      copy_x(share, rows, n, empty, [&](int stage, int brick, int row) {
        if (!elected) return;
        barrier_expect(full + 8 * stage, X_BYTES);
#pragma unroll
        for (int half = 0; half < 2; half++) copy_box(xs + stage * X_BYTES + half * WIDTH * 128, &x_map, full + 8 * stage, brick * 128 + half * 64, row);
      });
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
  const int member = warpgroup % MEMBERS, team = TEAMS == 1 ? 0 : warpgroup / MEMBERS;
  const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
  const u32 filled = opaque(full), emptied = opaque(empty);
  // A lane's own, so that each of its loads is at a fixed distance.
  const u32 bricks_at = ws + (member * TALL * 4 + warp) * Brick::bytes;
  const u32 codes_at = opaque(bricks_at + lane * 16), scales_at = opaque(bricks_at + (lane >> 2) * 4 * Brick::group_words);
  auto release = [&](int stage) { barrier_arrive(emptied + 8 * stage); };  // by each thread, which racecheck understands
  // Once for warpgroups whose last strip is shared, once for the others: both have wgmmas of their own.
  Ring at;
  at.next(team);
  auto make = [&](const Tile& tile, bool shares, bool few) __attribute__((always_inline)) {
    auto is_half = [=](int r) { return few || (shares && r == TALL - 1); };
    auto column = [&](int r) { return tile.strip(member * TALL + r) * 64; };
    const int mine = (share.last_brick - share.first_brick - team + TEAMS - 1) / TEAMS;
    float d[TALL][WIDTH / 2];
    u32 a[BUFFERS][TALL][4];
    Load loads[2][TALL];  // one is multiplied while the next one is on its way from shared memory
    Factors factors[TALL];
    auto fetch = [&](int stage, int load) {
#pragma unroll
      for (int r = 0; r < TALL; r++) {
        const u32 further = stage * W_BYTES + r * 4 * Brick::bytes;
        loads[load % 2][r].fetch(codes_at + further, scales_at + further, load);
      }
    };
    ScaledSums scaled;
    barrier_wait(filled + 8 * at.stage, at.parity);
    fetch(at.stage, 0);
    Column columns[TALL][2];
#pragma unroll
    for (int r = 0; r < TALL; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int i = min(column(r) + warp * 16 + (lane >> 2) + h * 8, n - 1), of_expert = ROUTED ? tile.expert * n : 0;
        columns[r][h] = {__ldg(row_scale + of_expert + i), load_bias(bias, of_expert + bias_at(i, n))};
      }
    int previous = -1;
    for (int i = 0; i < mine; i++) {
      Ring next = at;
      if (i + 1 < mine) next.next(TEAMS);  // after the last one it is fetched again, rather than that there is a branch
      const u64 b = wgmma_descriptor(xs + at.stage * X_BYTES);
#pragma unroll
      for (int load = 0; load < LOADS; load++) {
        if (load + 1 < LOADS) fetch(at.stage, load + 1);
        else {
          barrier_wait(filled + 8 * next.stage, next.parity);
          fetch(next.stage, 0);
        }
        if (begins_group(load))
#pragma unroll
          for (int r = 0; r < TALL; r++) factors[r].take(loads[load % 2][r]);
#pragma unroll
        for (int j = 0; j < FRAGMENTS; j += BATCH) {
          const int kt = load * FRAGMENTS + j;
          wgmma_wait<BUFFERS / BATCH - 1>();  // the products that used these registers last are done
          if (!SCALED_LATER && kt == BUFFERS - BATCH && previous >= 0) release(previous);
#pragma unroll
          for (int q = 0; q < BATCH; q++)
#pragma unroll
            for (int r = 0; r < TALL; r++) factors[r].decode(loads[load % 2][r], j + q, a[(kt + q) % BUFFERS][r]);
          if (SCALED_LATER && kt == 0) {
            wgmma_wait<0>();
            if (previous >= 0) {
              release(previous);
              scaled.end(d);
            }
            scaled.begin(loads[0]);
          }
          wgmma_fence();
#pragma unroll
          for (int q = 0; q < BATCH; q++)
#pragma unroll
            for (int r = 0; r < TALL; r++) {
              const u64 x_at = b + (kt + q) / 4 * (WIDTH * 8) + (kt + q) % 4 * 2;
              const bool accumulate = (!SCALED_LATER && i > 0) || kt + q;
              if (is_half(r)) wgmma_half<TYPE>(d[r], a[(kt + q) % BUFFERS][r], x_at + tile.half_from() * 8, accumulate);
              else wgmma<TYPE>(d[r], a[(kt + q) % BUFFERS][r], x_at, accumulate);
            }
          wgmma_commit();
        }
      }
      previous = at.stage;
      at = next;
    }
    wgmma_wait<0>();
    release(previous);
    if constexpr (SCALED_LATER) {
      scaled.end(d);
      scaled.give(d);
    }
    at.next(TEAMS);

    const u32 my_turned = turned + warpgroup * 4096;
    const int barrier = 2 + warpgroup;
    if constexpr (PARTNERS == 1) {
#pragma unroll
      for (int r = 0; r < TALL; r++)
        if (is_half(r)) store<WIDTH / 2>(d[r], columns[r], NoScales{}, my_turned, barrier, warp, lane, y, rows, tile.row + tile.half_from(), tile.end, column(r), n);
        else store<WIDTH>(d[r], columns[r], NoScales{}, my_turned, barrier, warp, lane, y, rows, tile.row, tile.end, column(r), n);
    } else {
      float sums[TALL][OWNED / 2];
      meet_partners(d, sums, share.part, team, member, thread, inboxes, received);
      const int me = share.part * TEAMS + team;
      const int my_first = tile.row + me * OWNED;
#pragma unroll
      for (int r = 0; r < TALL; r++) store<OWNED>(sums[r], columns[r], NoScales{}, my_turned, barrier, warp, lane, y, rows, my_first, min(tile.end, my_first + owned(me)), column(r), n);
    }
  };
  auto work = [&](bool shares) __attribute__((always_inline)) {
    for (int number = share.first_tile; number < share.count; number += share.stride) {
      const Tile tile(number, rows, n);
      if (ROUTED && HALVES_ROWS && tile.end - tile.row <= WIDTH / 2) make(tile, shares, true);
      else make(tile, shares, false);
    }
  };
  if (PAIRED && member == MEMBERS - 1) work(true);
  else work(false);
}

#ifdef EXPERTS
extern "C" __global__ void __launch_bounds__(THREADS, 1)
marlin_experts_large(const __grid_constant__ TensorMap x_map, const u8* __restrict__ weights, const float* __restrict__ row_scale, const u16*, const void* __restrict__ bias,
                     u16* __restrict__ y, const int4* table, const int* order, int m, int n, int k, int) {
  multiply(x_map, weights, row_scale, bias, y, {table, order}, n, k);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
marlin_gemm_large(const __grid_constant__ TensorMap x_map, const u8* __restrict__ weights, const float* __restrict__ row_scale,
                  const u16*, const void* __restrict__ bias, u16* __restrict__ y, int m, int n, int k, int) {
  multiply(x_map, weights, row_scale, bias, y, {m, (m + WIDTH - 1) / WIDTH}, n, k);
}
#endif
