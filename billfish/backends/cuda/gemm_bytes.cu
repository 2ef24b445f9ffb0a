// GEMM with 8-bit activations on Hopper: y^T = W x^T by wgmma, whose rate for bytes is twice that for 16 bits.
//
// As gemm_large.cu, with these differences. x comes from quantize_rows.cu: E4M3 or int8, each 16 k in the order of bytes.cuh, followed
// by a RowOfX for each row. GIVEN: x has a float32 scale for each 32 k of a row, and y is float32. A warpgroup has one
// strip (64 columns of y, the M of a wgmma). wgmma takes 32 k.
//
// *Promotion.* The tensor core adds E4M3 products with 13 bits below the leading bit of the sum and truncates the rest
// (docs/notes/2026-11-18-cuda-fp8.md). So it accumulates STEPS times 32 k, then the sums move to float32 registers, times the scales of
// the group if there are any. Sums of int8 are exact. FOLDED weights have no scales left and accumulate 512 k. Where a row of the tile is
// steep (has an outlier in x), only 32 k.
//
// PARTS: several launches share a GEMM, with tiles of different widths. Each has `places` tiles along the columns of y, from `first_place`
// on. A launch that has all of them must not pay registers for this.
//
// Compiled with: TYPE (of y), ELEMENT, SCALE, OFFSET, GROUPS, BYTES, GIVEN, PARTS, and the shape, as gemm_large.cu.
#include "bytes.cuh"
#include "row_of_x.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"

static_assert(OFFSET == NONE && Element::words == 1 && TALL == 1 && !PAIRED, "what this kernel takes");
constexpr int STEPS = FOLDED ? 16 : GIVEN ? 1 : 4 / GROUPS, IN_BRICK = 4;  // wgmmas of 32 k: until sums are promoted, and of a brick
static_assert(STEPS >= 1 && !(FOLDED && GIVEN), "a group has at least 32 k");
static_assert(!GIVEN || PARTNERS == 1, "float32 is stored by whoever has all sums");

// Shared memory: STAGES of x, of bricks, of scales of x; what tiles.cuh says; and for each warpgroup its scales of x, of all rows that
// partners own, which may be a few more than there are.
constexpr int X_BYTES = WIDTH * 128, SCALE_BYTES = WIDTH * (GIVEN ? 16 : (int)sizeof(RowOfX)), OWN_BYTES = PARTNERS * OWNED * 4;

template <Bytes X> struct Sums { typedef float type; };
template <> struct Sums<INT8> { typedef int type; };
typedef Sums<BYTES>::type Sum;

template <Bytes X> DEVICE void wgmma(Sum (&d)[WIDTH / 2], const u32 (&a)[4], u64 b, int accumulate) {
  if constexpr (X == INT8) WGMMA_ASM(WGMMA, "k32.s32.s8.s8", "");
  else if constexpr (Decoded::raw == E2M1<F16>::raw) WGMMA_ASM(WGMMA, "k32.f32.e5m2.e4m3", ", 1, 1");
  else WGMMA_ASM(WGMMA, "k32.f32.e4m3.e4m3", ", 1, 1");
}

// A scale for each row of a tile, in shared memory.
struct Scales {
  u32 at;
  __device__ __forceinline__ float2 of(int row) const {
    const uint2 v = load_shared8(at + row * 4);
    return {__uint_as_float(v.x), __uint_as_float(v.y)};
  }
};

// Sums that the compiler must not touch before, nor change after.
template <class Sums> DEVICE void settle(Sums& d) {
#pragma unroll
  for (int j = 0; j < WIDTH / 2; j++) asm volatile("" : "+f"(d[j])::"memory");
}

// Sums of FOLDED weights in tiles of 256 rows, for which registers are too few: of two float32 sums the upper halves share one. What the
// lower halves had goes back to the tensor core, so nothing is lost. That takes 7 operations for two sums instead of 2.
struct Halves {
  u32 halves[WIDTH / 4] = {};

  // The second number is the whole word: the first one's bits are the lower half of it, each time.
  __device__ __forceinline__ float2 pair(int p) const { return {__uint_as_float(halves[p] << 16), __uint_as_float(halves[p])}; }
  template <class Sums> __device__ __forceinline__ void promote(Sums& d) {
#pragma unroll
    for (int p = 0; p < WIDTH / 4; p++) {
      const float2 before = pair(p);
      const float first = d[2 * p] + before.x, second = d[2 * p + 1] + before.y;
      halves[p] = permute(__float_as_uint(first), __float_as_uint(second), 0x7632);
      const float2 kept = pair(p);
      d[2 * p] = first - kept.x, d[2 * p + 1] = second - kept.y;
    }
    settle(d);
  }
};

// Where x is steep in some row of a tile, as RowOfX has it. A warp finds out by itself, of scales in shared memory.
struct Steep {
  u32 parts = 0;

  __device__ __forceinline__ Steep(u32 scales, const Tile& tile, int lane) {
#pragma unroll
    for (int row = lane; row < WIDTH; row += 32)
      if (tile.row + row < tile.end) parts |= load_shared4(scales + row * (int)sizeof(RowOfX) + 4);
    parts = __reduce_or_sync(0xffffffff, parts);
  }
  __device__ __forceinline__ bool at(int brick) const {
    return parts >> (brick / (PART / 128) % 32) & 1;
  }
};

// Whether the first weights of the next brick are decoded among the sums that are promoted. On an H200, integers in tiles of 208 rows take 6 % less
// time so. In narrower tiles they take 1 to 8 % more, and E2M1, which has 5 operations for 8 codes instead of 8, takes 5 % more.
constexpr bool AHEAD = Decoded::raw == BytesOf<Int4<F16>, FP8>::raw && !GIVEN && !PARTS && !GATED && WIDTH == 208;
// Whether the columns' scales are loaded in time for the last sums. Elsewhere, sums need the registers until they are promoted.
constexpr bool COLUMNS_EARLY = AHEAD || (FOLDED && WIDTH <= 192);

DEVICE void multiply(const TensorMap& x_map, const u8* __restrict__ weights, const float* __restrict__ row_scale, const u8* x_scale, const void* __restrict__ bias,
                     u16* __restrict__ y, const Rows& rows, int n, int k) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ __align__(8) Barriers barriers;
  const u32 xs = shared_address(shared), ws = xs + STAGES * X_BYTES, ss = ws + STAGES * W_BYTES, turned = ss + STAGES * SCALE_BYTES;
  const u32 inboxes = turned + CONSUMERS * 32, own = inboxes + TEAMS * INBOX;
  const u32 full = shared_address(barriers.full), empty = shared_address(barriers.empty), received = shared_address(barriers.received);
  const Share share(rows, n, k);
  make_barriers(barriers, share.part);
  let_next_start();
  const int any_warp = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0), warpgroup = any_warp >> 2;

  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    const bool elected = elect();
    if (any_warp == CONSUMERS / 32) copy_weights(share, rows, n, weights, ws, full, empty, elected);
    else if (any_warp == CONSUMERS / 32 + 1) {
      if (elected) prefetch_map(&x_map);
      copy_x(share, rows, n, empty, [&](int stage, int brick, int row) {
        if (!elected) return;
        const bool first = GIVEN || brick < share.first_brick + TEAMS;  // each team wants the scales of its rows once
        barrier_expect(full + 8 * stage, X_BYTES + (first ? SCALE_BYTES : 0));
        if (first) copy_bulk(ss + stage * SCALE_BYTES, x_scale + (GIVEN ? ((size_t)brick * rows.m + row) * 16 : row * sizeof(RowOfX)), SCALE_BYTES, full + 8 * stage);
        copy_box(xs + stage * X_BYTES, &x_map, full + 8 * stage, brick * 128, row);
      });
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
  const int member = warpgroup % MEMBERS, team = TEAMS == 1 ? 0 : warpgroup / MEMBERS;
  const int thread = threadIdx.x & 127, lane = thread & 31, barrier = 2 + warpgroup;
  const u32 filled = opaque(full), emptied = filled + 8 * STAGES, my_scales = own + warpgroup * OWN_BYTES;
  const u32 bricks_at = ws + (member * 4 + (thread >> 5)) * Brick::bytes;
  const u32 codes_at = opaque(bricks_at + lane * 16), groups_at = opaque(bricks_at + (lane >> 2) * 4 * Brick::group_words);
  auto release = [&](int stage) { barrier_arrive(emptied + 8 * stage); };
  Ring at;
  at.next(team);
  for (int number = share.first_tile; number < share.count; number += share.stride) {
    Sum d[WIDTH / 2];
    float sums[1][WIDTH / 2] = {};
    int brick = share.first_brick + team;
    auto is_left = [&] { return brick < share.last_brick; };
    Load loads[2];
    auto fetch = [&](int stage, int load) { loads[load].fetch(codes_at + stage * W_BYTES, groups_at + stage * W_BYTES, load); };
    auto after = [&] {  // the last brick is fetched again, rather than that there is a branch
      Ring next = at;
      if (brick + TEAMS < share.last_brick) next.next(TEAMS);
      return next;
    };
    auto await_next = [&](const Ring& next) {
      barrier_wait(filled + 8 * next.stage, next.parity);
      fetch(next.stage, 0);
    };
    auto scale_of_group = [&](int group) {
      const uint2 stored = Brick::stored_scale(groups_at + at.stage * W_BYTES, 0, group);
      return SCALE::decode(stored.x, stored.y);
    };
    auto promote = [&](float2 factor, int step) {
#pragma unroll
      for (int eight = 0; eight < WIDTH / 8; eight++) {
        float2 of_x = {1, 1};
        if constexpr (GIVEN) {
          const u32 from = ss + at.stage * SCALE_BYTES + (eight * 8 + (lane & 3) * 2) * 16 + step * 4;
          of_x = {__uint_as_float(load_shared4(from)), __uint_as_float(load_shared4(from + 16))};
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int j = eight * 4 + h * 2;
          const float by = h ? factor.y : factor.x;
          sums[0][j] += (float)d[j] * (by * of_x.x), sums[0][j + 1] += (float)d[j + 1] * (by * of_x.y);
        }
      }
    };
    Column columns[2];
    auto load_columns = [&](const Tile& tile, int thread) {
      const int column = tile.strip(member) * 64 + (thread >> 5) * 16 + ((thread & 31) >> 2);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int i = min(column + h * 8, n - 1);
        columns[h] = {__ldg(row_scale + i), load_bias(bias, i)};
      }
    };
    await_next(at);
    const u32 scales = ss + at.stage * SCALE_BYTES;
    if constexpr (!GIVEN)
      for (int row = thread; row < WIDTH; row += 128) store_shared4(my_scales + row * 4, load_shared4(scales + row * (int)sizeof(RowOfX)));
    bool is_steep = false;
    if constexpr (BYTES == FP8 && WIDTH <= 208) is_steep = Steep(scales, Tile(number, rows, n), lane).parts != 0;
    if constexpr (FOLDED && WIDTH > 208) {
      // One product is under way while the next one's weights are decoded, in the other one of two sets of registers.
      Halves held;
      const Steep steep(scales, Tile(number, rows, n), lane);
      int alone = 0;  // steps of a steep brick that are promoted
      u32 a[2][4];
#pragma unroll
      for (int j = 0; j < WIDTH / 2; j++) d[j] = 0;
      loads[0].decode(0, a[0]);
      auto multiply_step = [&](int step, u32 (&a)[4]) {
        wgmma_fence();
        wgmma<BYTES>(d, a, wgmma_descriptor(xs + at.stage * X_BYTES) + step * 2, 1);
        wgmma_commit();
      };
      auto finish_brick = [&](const Ring& next) {
        const int stage = at.stage;
        at = next, brick += TEAMS;
        return stage;
      };
      while (true) {
        int done = -1;  // the stage of a brick that is not released yet
        if (steep.at(brick)) {
          loads[1].fetch(codes_at + at.stage * W_BYTES, groups_at + at.stage * W_BYTES, alone / 2);
          if (alone % 2) loads[1].skip_first();
          loads[1].decode(0, a[1]);
          multiply_step(alone, a[1]);
          if (alone = (alone + 1) % IN_BRICK; alone == 0) {
            const Ring next = after();
            await_next(next);
            loads[0].decode(0, a[0]);
            done = finish_brick(next);
          }
        } else {
          do {
            const Ring next = after();
#pragma unroll
            for (int step = 0; step < IN_BRICK; step++) {
              multiply_step(step, a[step % 2]);
              if (step == 0) fetch(at.stage, 1);
              if (step == 2) await_next(next);
              wgmma_wait<1>();
              if (step == 0 && done >= 0) release(done);
              const int then = (step + 1) % IN_BRICK;
              loads[then / 2].decode(then % 2, a[then % 2]);
            }
            done = finish_brick(next);
          } while (is_left() && (brick / TEAMS + member * (STEPS / IN_BRICK / 2)) % (STEPS / IN_BRICK) > 0 && !steep.at(brick));  // members by turns
        }
        wgmma_wait<0>();
        settle(d);
        if (done >= 0) release(done);
        if (!is_left()) break;
        held.promote(d);
      }
#pragma unroll
      for (int p = 0; p < WIDTH / 4; p++) {
        const float2 kept = held.pair(p);
        sums[0][2 * p] = d[2 * p] + kept.x, sums[0][2 * p + 1] = d[2 * p + 1] + kept.y;
      }
    } else if (is_steep) {
      // Sums of each product are promoted.
      u32 a[4];
      for (; is_left(); brick += TEAMS) {
        const Ring next = after();
        for (int step = 0; step < IN_BRICK; step++) {
          loads[0].fetch(codes_at + at.stage * W_BYTES, groups_at + at.stage * W_BYTES, step / 2);
          if (step % 2) loads[0].skip_first();
          loads[0].decode(0, a);
          wgmma_fence();
          wgmma<BYTES>(d, a, wgmma_descriptor(xs + at.stage * X_BYTES) + step * 2, 0);
          wgmma_commit();
          wgmma_wait<0>();
          promote(FOLDED ? make_float2(1, 1) : scale_of_group(0), 0);
        }
        barrier_wait(filled + 8 * next.stage, next.parity);
        release(at.stage);
        at = next;
      }
      if constexpr (COLUMNS_EARLY) load_columns(Tile(number, rows, n), thread);
    } else if constexpr (FOLDED) {
      // Two products are under way, each with registers of its own, while the next one's weights are decoded.
      u32 a[2][4];
      for (bool first = true; is_left(); brick += TEAMS, first = false) {
        const Ring next = after();
        const u64 b = wgmma_descriptor(xs + at.stage * X_BYTES);
        const bool anew = first || (brick / TEAMS + member * 2) % (STEPS / IN_BRICK) == 0;  // members by turns
#pragma unroll
        for (int step = 0; step < IN_BRICK; step++) {
          if (step == 0) fetch(at.stage, 1);
          if (step == 2) await_next(next);
          wgmma_wait<1>();
          if (step == 1 && !first) release(at.stage < TEAMS ? at.stage + STAGES - TEAMS : at.stage - TEAMS);  // the brick before
          loads[step / 2].decode(step % 2, a[step % 2]);
          if (step == 0 && anew && !first) {
            wgmma_wait<0>();
            promote(make_float2(1, 1), 0);
          }
          wgmma_fence();
          wgmma<BYTES>(d, a[step % 2], b + step * 2, step > 0 || !anew);
          wgmma_commit();
        }
        if (brick + TEAMS < share.last_brick) at = next;
      }
      if constexpr (COLUMNS_EARLY) load_columns(Tile(number, rows, n), thread);
      wgmma_wait<0>();
      release(at.stage);
      promote(make_float2(1, 1), 0);
    } else {
      u32 a[IN_BRICK][4];
      if constexpr (AHEAD) loads[0].decode(0, a[0]);
      for (; is_left(); brick += TEAMS) {
        const Ring next = after();
        const u64 b = wgmma_descriptor(xs + at.stage * X_BYTES);
        fetch(at.stage, 1);
        uint2 stored;  // scales of a group
#pragma unroll
        for (int step = 0; step < IN_BRICK; step++) {
          if (step % STEPS == 0) stored = Brick::stored_scale(groups_at + at.stage * W_BYTES, 0, step * GROUPS / IN_BRICK);
          if (!AHEAD || step > 0) loads[step / 2].decode(step % 2, a[step]);  // only the first one of a group waits for the sums to be promoted
          wgmma_fence();
          wgmma<BYTES>(d, a[step], b + step * 2, step % STEPS > 0);
          if (AHEAD && step == 0) wgmma_commit();
          if (step % STEPS < STEPS - 1) continue;
          wgmma_commit();
          if (step == IN_BRICK - 1) await_next(next);
          if constexpr (AHEAD) {
            wgmma_wait<1>();  // the first product is done, and its registers are free
            loads[0].decode(0, a[0]);
          }
          wgmma_wait<0>();
          if (!GIVEN && step == IN_BRICK - 1) release(at.stage);
          promote(SCALE::decode(stored.x, stored.y), step);
        }
        if constexpr (GIVEN) release(at.stage);
        at = next;
      }
      if constexpr (COLUMNS_EARLY) load_columns(Tile(number, rows, n), thread);
    }
    at.next(TEAMS);

    // Not before, though it could be: until here, sums need the registers.
    const int late = opaque(threadIdx.x & 127), warp = late >> 5, lane = late & 31;
    const Tile tile(opaque(number), rows, n);
    const int column = tile.strip(member) * 64;
    if constexpr (!COLUMNS_EARLY) load_columns(tile, late);
    const u32 my_turned = turned + warpgroup * 4096;
    meet(barrier, 128);  // the scales of x are there
    if constexpr (GIVEN) {
#pragma unroll
      for (int i = 0; i < WIDTH / 2; i++) {
        const int row = tile.row + i / 4 * 8 + (lane & 3) * 2 + i % 2, to = column + warp * 16 + (lane >> 2) + i / 2 % 2 * 8;
        if (row < tile.end && to < n) ((float*)y)[(size_t)row * n + to] = columns[i / 2 % 2].finish(sums[0][i]);
      }
    } else if constexpr (PARTNERS == 1) store<WIDTH>(sums[0], columns, Scales{my_scales}, my_turned, barrier, warp, lane, y, rows, tile.row, tile.end, column, n);
    else {
      float all[1][OWNED / 2];
      meet_partners(sums, all, share.part, team, member, thread, inboxes, received);
      const int me = share.part * TEAMS + team, from = tile.row + me * OWNED;
      store<OWNED>(all[0], columns, Scales{my_scales + me * OWNED * 4}, my_turned, barrier, warp, lane, y, rows, from, min(tile.end, from + owned(me)), column, n);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
marlin_gemm_bytes(const __grid_constant__ TensorMap x_map, const u8* __restrict__ weights, const float* __restrict__ row_scale,
                  const u8* x, const void* __restrict__ bias, u16* __restrict__ y, int m, int n, int k, int x_stride, int first_place, int places) {
  multiply(x_map, weights, row_scale, x + (size_t)m * x_stride, bias, y, {m, (m + WIDTH - 1) / WIDTH, PARTS ? first_place : 0, PARTS ? places : -1}, n, k);
}
