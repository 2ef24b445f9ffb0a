// Many rows of x, on Hopper: y^T = W x^T by wgmma, decoded weights being the A operand in registers.
//
// One warp copies bricks of weights and another boxes of x, 128 k at a time, into a ring in shared memory. WARPGROUPS
// warpgroups decode and multiply, each for 64 * TALL columns of y and WIDTH rows of x. Decoding and wgmma share the issue
// slots and registers of a multiprocessor, so what counts is how few instructions there are beside each wgmma.
//
// TEAMS > 1: the warpgroups are that many teams, which take turns along K. SPLIT > 1: that many CTAs of a cluster share
// the tile, each with a part of K, which has at least one brick for each. In both cases the partners send each other their
// float32 sums, and each adds and stores a part of the rows. Otherwise a CTA goes from tile to tile, and the next one's
// copies already run while it stores.
//
// PAIRED: two tiles share a strip of 64 columns, and each multiplies it with one half of the rows of x. A tile then has half a strip
// less, and there are more of them, which may be what keeps all multiprocessors at work.
//
// EXPERTS: tiles are those of a table (rows.cuh). An expert's last tile is multiplied by half of its width if it has no more rows.
//
// Compiled with: TYPE, ELEMENT, SCALE, OFFSET, GROUPS, and WARPGROUPS, TEAMS, TALL, WIDTH, STAGES, SPLIT, PAIRED, BUFFERS
// (fragments whose weights are in registers) and BATCH (those that are decoded, then multiplied, at a time).
#include "factors.cuh"
#include "hopper.cuh"
#include "rows.cuh"
#include "wgmma.cuh"

constexpr int MEMBERS = WARPGROUPS / TEAMS, STRIPS = TALL * MEMBERS;  // members: warpgroups of a team
constexpr int X_BYTES = WIDTH * 256, W_BYTES = STRIPS * 4 * Brick::bytes;
constexpr int CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;  // registers move between whole warpgroups only
// Of 65536, what the copying warpgroup's 24 leave of the equal shares of 168 and 96 that the kernel starts with.
constexpr int REGISTERS = WARPGROUPS == 2 ? 240 : 112;
// Shared memory: STAGES of x, STAGES of bricks, four kilobytes a warpgroup for y on its way out, and an inbox for each team: what
// the other partners found for the OWNED rows of x that it finishes, 16 bytes for eight rows from each thread.
constexpr int PARTNERS = SPLIT * TEAMS, OWNED = (WIDTH / 8 + PARTNERS - 1) / PARTNERS * 8;
static_assert(!PAIRED || PARTNERS == 1, "sums of half the rows are not sent");
static_assert(!ROUTED || PARTNERS == 1, "who takes many tiles has no partner");
constexpr bool HALVES_ROWS = WIDTH >= 64;  // a product of half as many rows takes less time
constexpr int LETTER = MEMBERS * 128 * 16, INBOX = (PARTNERS - 1) * TALL * (OWNED / 8) * LETTER;

// All rows of x, where there are no experts.
struct Rows {
  int m, across;
  __device__ __forceinline__ int count(int places) const { return places * across; }
  __device__ __forceinline__ Part part(int i, int, int) const { return {0, i % across * WIDTH, m, i / across}; }
  __device__ __forceinline__ int out(int row) const { return row; }
};
#ifdef EXPERTS
typedef Visits Source;
static_assert(EXPERTS == WIDTH && !PAIRED, "the rows of a tile");
#else
typedef Rows Source;
#endif

// A tile of y: its rows of x and its strips of columns. Tiles with the same columns follow each other.
struct Tile {
  static constexpr int TOGETHER = PAIRED ? 2 * STRIPS - 1 : STRIPS;  // strips of two tiles, or one
  int expert, row, end, first;
  bool second;  // of two

  // Tiles along the columns of y.
  static __device__ __forceinline__ int places(int n) { return ((n + 63) / 64 * (PAIRED ? 2 : 1) + TOGETHER - 1) / TOGETHER; }
  __device__ __forceinline__ Tile(int i, const Source& rows, int n) {
    const Part part = rows.part(i, places(n), WIDTH);
    expert = part.expert, row = part.row, end = part.end, second = PAIRED && part.place % 2, first = part.place / (PAIRED ? 2 : 1) * TOGETHER;
  }
  // The second goes backwards, so that what they share is the last strip of both.
  __device__ __forceinline__ int strip(int i) const { return second ? first + TOGETHER - 1 - i : first + i; }
  __device__ __forceinline__ int half_from() const { return second ? WIDTH / 2 : 0; }
};

// A place in the ring.
struct Ring {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next(int steps = 1) {
    if ((stage += steps) >= STAGES) stage -= STAGES, parity ^= 1;
  }
};

// What happens to the sums of a column at the end: loaded at the beginning.
struct Column {
  float scale;
  Bias bias;
  __device__ __forceinline__ float finish(float v) const { return activate(v * (scale * (1 / REDUCED)) + bias_value(bias)); }
};

// A warpgroup's sums of ROWS rows of x and the 64 columns from `column` on, which are 32 of y where they are GATED. It turns 16 rows at
// a time, by stmatrix, in the halves of its four kilobytes at `turned`, and its threads store 16 bytes each while the next ones are turned.
template <int ROWS, int COUNT>
DEVICE void store(const float (&sums)[COUNT], const Column (&columns)[2], u32 turned, int barrier, int warp, int lane, u16* y, const Source& rows, int first_row, int last_row, int column, int n) {
  constexpr int TIMES = (ROWS + 15) / 16, SIXTEENS = 8 >> GATED;  // 16 bytes of a row
  // The 16 bytes i of row r are at i ^ (r % 8), or, of rows of 64 bytes, at i ^ (r / 2 % 4): eight rows then fill all banks.
  auto at = [&](int row, int sixteen) { return turned + row * SIXTEENS * 16 + ((sixteen ^ (row >> GATED & SIXTEENS - 1)) << 4); };
  const int thread = warp * 32 + lane, my_row = thread / SIXTEENS;
  const u32 write_at = GATED ? at(lane & 15, warp) : at(lane & 15, warp * 2 + (lane >> 4)), read_at = at(my_row & 15, thread % SIXTEENS);
  const int out_n = n >> GATED, to_column = (column >> GATED) + thread % SIXTEENS * 8;
  // Matrices: rows 0..7 and 8..15 of x, for the columns 0..7 and then for 8..15. Of the last rows there may be eight.
  auto turn = [&](int j) {
    auto pair = [&](int eight, int h) {
      const int from = j * 8 + eight * 4 + h * 2;
      return from < ROWS / 2 ? make_float2(columns[h].finish(sums[from]), columns[h].finish(sums[from + 1])) : make_float2(0, 0);
    };
    if constexpr (GATED) {
      u32 pairs[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 gate = pair(i, 0), v = pair(i, 1);
        pairs[i] = TYPE::pack(pass_gate(gate.x, v.x), pass_gate(gate.y, v.y));
      }
      store_matrices_transposed(write_at + j % 2 * 2048, pairs);
    } else {
      u32 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2 v = pair(i & 1, i >> 1);
        pairs[i] = TYPE::pack(v.x, v.y);
      }
      store_matrices_transposed(write_at + j % 2 * 2048, pairs);
    }
  };
  turn(0);
#pragma unroll
  for (int j = 0; j < TIMES; j++) {
    meet(barrier, 128);
    const uint4 v = load_shared16(read_at + j % 2 * 2048);
    if (j + 1 < TIMES) turn(j + 1);
    const int row = j * 16 + my_row, to_row = first_row + row;
    if (my_row < 16 && row < ROWS && to_row < last_row && to_column < out_n) {
      u16* to = y + (size_t)rows.out(to_row) * out_n + to_column;
      if (out_n % 8 == 0) *(uint4*)to = v;
      else {
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 8; e++)
          if (to_column + e < out_n) to[e] = (u16)(words[e / 2] >> (e % 2 * 16));
      }
    }
  }
  meet(barrier, 128);  // before the next strip is turned there
}

DEVICE void multiply(const TensorMap& x_map, const u8* __restrict__ weights, const float* __restrict__ row_scale, const void* __restrict__ bias, u16* __restrict__ y,
                     const Source& rows, int n, int k) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ __align__(8) u64 full_bars[STAGES], empty_bars[STAGES], received_bars[TEAMS];
  const u32 xs = shared_address(shared), ws = xs + STAGES * X_BYTES, turned = ws + STAGES * W_BYTES, inboxes = turned + CONSUMERS * 32;
  const u32 full = shared_address(full_bars), empty = shared_address(empty_bars), received = shared_address(received_bars);
  const int bricks = (k + 127) / 128, courses = (n + 15) / 16;
  const int part = SPLIT > 1 ? cluster_rank() : 0;
  const int first_brick = bricks * part / SPLIT, last_brick = bricks * (part + 1) / SPLIT;
  const int count = rows.count(Tile::places(n));
  const int first_tile = blockIdx.x / SPLIT, stride = gridDim.x / SPLIT;
  auto owned = [&](int partner) { return max(0, min(OWNED, WIDTH - partner * OWNED)); };  // rows of x that a partner finishes
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 2), barrier_init(empty + 8 * i, 128 * MEMBERS);
    for (int i = 0; i < TEAMS; i++) barrier_init(received + 8 * i, 1);
    barrier_init_done();
    if constexpr (SPLIT > 1)
      for (int i = 0; i < TEAMS; i++) barrier_expect(received + 8 * i, (SPLIT - 1) * TEAMS * TALL * (owned(part * TEAMS + i) / 8) * LETTER);
  }
  if constexpr (SPLIT > 1) cluster_assemble();
  else __syncthreads();
  if (!ROUTED) let_next_start();
  // Known to be the same for a whole warp, these keep addresses in uniform registers, where copies and wgmma want them.
  const int any_warp = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0), warpgroup = any_warp >> 2;

  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    const bool elected = elect();
    Ring at;
    if (any_warp == CONSUMERS / 32) {  // weights, which do not depend on the kernel before this one
      for (int number = first_tile; number < count; number += stride) {
        constexpr int AT_ONCE = PAIRED || STRIPS == 1 ? 1 : 2;  // strips whose bricks lie together
        const Tile tile(number, rows, n);
        const u8* from = ROUTED ? weights + (size_t)tile.expert * courses * bricks * Brick::bytes : weights;
        auto to_copy = [&](int strip) { return max(0, min(4 * AT_ONCE, courses - 4 * tile.strip(strip))); };
        int all = 0;
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip += AT_ONCE) all += to_copy(strip);
        for (int brick = first_brick; brick < last_brick; brick++, at.next()) {
          barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
          if (elected) {
            barrier_expect(full + 8 * at.stage, all * Brick::bytes);
#pragma unroll
            for (int strip = 0; strip < STRIPS; strip += AT_ONCE)
              if (const int some = to_copy(strip))
                copy_bulk(ws + at.stage * W_BYTES + strip * 4 * Brick::bytes, from + Brick::at(4 * tile.strip(strip), brick, courses, bricks), some * Brick::bytes, full + 8 * at.stage);
          }
        }
      }
    } else if (any_warp == CONSUMERS / 32 + 1) {  // x, which may
      if (elected) prefetch_map(&x_map);
      wait_for_previous();
      if (ROUTED) let_next_start();  // not before: the kernel behind this one reads the table without waiting for it
      for (int number = first_tile; number < count; number += stride) {
        const int row = Tile(number, rows, n).row;
        for (int brick = first_brick; brick < last_brick; brick++, at.next()) {
          barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
          if (elected) {
            barrier_expect(full + 8 * at.stage, X_BYTES);
#pragma unroll
            for (int half = 0; half < 2; half++)
              copy_box(xs + at.stage * X_BYTES + half * WIDTH * 128, &x_map, full + 8 * at.stage, brick * 128 + half * 64, row);
          }
        }
      }
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
    const int mine = (last_brick - first_brick - team + TEAMS - 1) / TEAMS;
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
        if (is_half(r)) store<WIDTH / 2>(d[r], columns[r], my_turned, barrier, warp, lane, y, rows, tile.row + tile.half_from(), tile.end, column(r), n);
        else store<WIDTH>(d[r], columns[r], my_turned, barrier, warp, lane, y, rows, tile.row, tile.end, column(r), n);
    } else {
      const int me = part * TEAMS + team;
      const u32 letters = inboxes + (member * 128 + thread) * 16;
      float sums[TALL][OWNED / 2];
#pragma unroll
      for (int to = 0; to < PARTNERS; to++) {
        const u32 here = letters + to % TEAMS * INBOX + (me - (me > to)) * TALL * (OWNED / 8) * LETTER, bar = received + to % TEAMS * 8;
        const int there = to / TEAMS;
#pragma unroll
        for (int r = 0; r < TALL; r++)
#pragma unroll
          for (int i = 0; i < OWNED / 8; i++) {
            const int from = (to * (OWNED / 8) + i) * 4;
            if (from >= WIDTH / 2) continue;
            const float4 v = {d[r][from], d[r][from + 1], d[r][from + 2], d[r][from + 3]};
            const u32 letter = here + (r * (OWNED / 8) + i) * LETTER;
            if (to == me) sums[r][i * 4] = v.x, sums[r][i * 4 + 1] = v.y, sums[r][i * 4 + 2] = v.z, sums[r][i * 4 + 3] = v.w;
            else if (there == part) store_shared16(letter, v);
            else store_async(cluster_address(letter, there), v, cluster_address(bar, there));
          }
      }
      if constexpr (TEAMS > 1) meet(1, CONSUMERS);
      if constexpr (SPLIT > 1) barrier_wait(received + team * 8, 0);
#pragma unroll
      for (int r = 0; r < TALL; r++)
#pragma unroll
        for (int i = 0; i < OWNED / 8; i++) {
          // In the order of the partners, whoever adds: a row's sums do not depend on where it is.
          float4 v = {0, 0, 0, 0};
#pragma unroll
          for (int from = 0; from < PARTNERS; from++) {
            float4 w = {sums[r][i * 4], sums[r][i * 4 + 1], sums[r][i * 4 + 2], sums[r][i * 4 + 3]};
            if (from != me) {
              const uint4 u = load_shared16(letters + team * INBOX + (((from - (from > me)) * TALL + r) * (OWNED / 8) + i) * LETTER);
              w = {__uint_as_float(u.x), __uint_as_float(u.y), __uint_as_float(u.z), __uint_as_float(u.w)};
            }
            v.x += w.x, v.y += w.y, v.z += w.z, v.w += w.w;
          }
          sums[r][i * 4] = v.x, sums[r][i * 4 + 1] = v.y, sums[r][i * 4 + 2] = v.z, sums[r][i * 4 + 3] = v.w;
        }
      const int my_first = tile.row + me * OWNED;
#pragma unroll
      for (int r = 0; r < TALL; r++) store<OWNED>(sums[r], columns[r], my_turned, barrier, warp, lane, y, rows, my_first, min(tile.end, my_first + owned(me)), column(r), n);
    }
  };
  auto work = [&](bool shares) __attribute__((always_inline)) {
    for (int number = first_tile; number < count; number += stride) {
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
