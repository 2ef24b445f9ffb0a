// What the GEMMs for many rows of x share: tiles of y, the ring of stages in shared memory, the partial sums that partners of a
// cluster exchange by st.async (a *letter* is one warpgroup's part of them), and the store of y. A *strip* is 64 columns of y.
//
// Compiled with WARPGROUPS, TEAMS, TALL, WIDTH, STAGES, SPLIT and PAIRED (gemm_large.cu says what they are), besides what decode.cuh
// takes. REDUCED is known: sums are so many times what they mean.
#pragma once
#include "decode.cuh"
#include "hopper.cuh"
#include "rows.cuh"

constexpr int MEMBERS = WARPGROUPS / TEAMS, STRIPS = TALL * MEMBERS;  // members: warpgroups of a team
constexpr int W_BYTES = STRIPS * 4 * Brick::bytes;
constexpr int CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;  // registers move between whole warpgroups only
// Of 65536, what the copying warpgroup's 24 leave of the equal shares of 168 and 96 that the kernel starts with.
constexpr int REGISTERS = WARPGROUPS == 2 ? 240 : 112;
// Shared memory has four kilobytes a warpgroup for y on its way out, and an inbox for each team: what the other partners found for the
// OWNED rows of x that it finishes, 16 bytes for eight rows from each thread.
constexpr int PARTNERS = SPLIT * TEAMS, OWNED = (WIDTH / 8 + PARTNERS - 1) / PARTNERS * 8;
static_assert(!PAIRED || PARTNERS == 1, "sums of half the rows are not sent");
static_assert(!ROUTED || PARTNERS == 1, "who takes many tiles has no partner");
constexpr int LETTER = MEMBERS * 128 * 16, INBOX = (PARTNERS - 1) * TALL * (OWNED / 8) * LETTER;

// All rows of x, where there are no experts. A launch may have some of the places along the columns of y.
struct Rows {
  int m, across, first_place = 0, places = -1;  // -1: all of them
  __device__ __forceinline__ int count(int all) const { return (places < 0 ? all : places) * across; }
  __device__ __forceinline__ Part part(int i, int, int) const { return {0, i % across * WIDTH, m, first_place + i / across}; }
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

// The scales of x, where its rows have none. Others give those of the rows `row` and `row + 1` of a tile.
struct NoScales {
  __device__ __forceinline__ float2 of(int row) const { return {1, 1}; }
};

#ifdef Y_F32
// A warpgroup's sums of ROWS rows of x and the 64 columns from `column` on, as float32: the logits. Eight lanes store eight numbers of a row.
template <int ROWS, int COUNT, class Scales>
DEVICE void store(const float (&sums)[COUNT], const Column (&columns)[2], const Scales& scales, u32, int, int warp, int lane, u16* y, const Source&, int first_row, int last_row, int column, int n) {
  static_assert(!ROUTED, "rows of y are those of x");
  const int my_column = column + warp * 16 + (lane >> 2), left = last_row - first_row - (lane & 3) * 2;
  float* to = (float*)y + (size_t)(first_row + (lane & 3) * 2) * n + my_column;
#pragma unroll
  for (int i = 0; i < ROWS / 8; i++, to += (size_t)8 * n)
#pragma unroll
    for (int row = 0; row < 2; row++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (i * 8 + row < left && my_column + h * 8 < n) {
          const float2 by = scales.of(i * 8 + (lane & 3) * 2);
          to[(size_t)row * n + h * 8] = columns[h].finish(sums[i * 4 + h * 2 + row] * (row ? by.y : by.x));
        }
}
#else
// A warpgroup's sums of ROWS rows of x and the 64 columns from `column` on, which are 32 of y where they are GATED. It transposes 16 rows at
// a time, by stmatrix, in the halves of its four kilobytes at `turned`, and its threads store 16 bytes each while the next ones are transposed.
template <int ROWS, int COUNT, class Scales>
DEVICE void store(const float (&sums)[COUNT], const Column (&columns)[2], const Scales& scales, u32 turned, int barrier, int warp, int lane, u16* y, const Source& rows, int first_row, int last_row, int column, int n) {
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
      if (from >= ROWS / 2) return make_float2(0, 0);
      const float2 by = scales.of(j * 16 + eight * 8 + (lane & 3) * 2);
      return make_float2(columns[h].finish(sums[from] * by.x), columns[h].finish(sums[from + 1] * by.y));
    };
    if constexpr (GATED) {
      u32 pairs[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 gate = pair(i, 0), v = pair(i, 1);
        pairs[i] = TYPE::pack_finite(pass_gate(gate.x, v.x), pass_gate(gate.y, v.y));
      }
      store_matrices_transposed(write_at + j % 2 * 2048, pairs);
    } else {
      u32 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2 v = pair(i & 1, i >> 1);
        pairs[i] = TYPE::pack_finite(v.x, v.y);
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
  meet(barrier, 128);  // before the next strip is transposed there
}
#endif

// Which tiles and which part of K a CTA has.
struct Share {
  int bricks, courses, part, first_brick, last_brick, count, first_tile, stride;

  __device__ __forceinline__ Share(const Source& rows, int n, int k) {
    bricks = (k + 127) / 128, courses = (n + 15) / 16, part = SPLIT > 1 ? cluster_rank() : 0;
    first_brick = bricks * part / SPLIT, last_brick = bricks * (part + 1) / SPLIT;
    count = rows.count(Tile::places(n)), first_tile = blockIdx.x / SPLIT, stride = gridDim.x / SPLIT;
  }
};

// Barriers: a stage is filled, a stage is empty, a team's partial sums have arrived.
struct Barriers {
  u64 full[STAGES], empty[STAGES], received[TEAMS];
};

// Rows of x that a partner finishes.
DEVICE int owned(int partner) { return max(0, min(OWNED, WIDTH - partner * OWNED)); }

DEVICE void make_barriers(Barriers& barriers, int part) {
  const u32 full = shared_address(barriers.full), empty = shared_address(barriers.empty), received = shared_address(barriers.received);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 2), barrier_init(empty + 8 * i, 128 * MEMBERS);
    for (int i = 0; i < TEAMS; i++) barrier_init(received + 8 * i, 1);
    barrier_init_done();
    if constexpr (SPLIT > 1)
      for (int i = 0; i < TEAMS; i++) barrier_expect(received + 8 * i, (SPLIT - 1) * TEAMS * TALL * (owned(part * TEAMS + i) / 8) * LETTER);
  }
  if constexpr (SPLIT > 1) cluster_assemble();
  else __syncthreads();
}

// The warp that copies bricks of all tiles, which do not depend on the kernel before this one.
DEVICE void copy_weights(const Share& share, const Source& rows, int n, const u8* weights, u32 ws, u32 full, u32 empty, bool elected) {
  constexpr int AT_ONCE = PAIRED || STRIPS == 1 ? 1 : 2;  // strips whose bricks lie together
  Ring at;
  for (int number = share.first_tile; number < share.count; number += share.stride) {
    const Tile tile(number, rows, n);
    const u8* from = ROUTED ? weights + (size_t)tile.expert * share.courses * share.bricks * Brick::bytes : weights;
    auto to_copy = [&](int strip) { return max(0, min(4 * AT_ONCE, share.courses - 4 * tile.strip(strip))); };
    int all = 0;
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip += AT_ONCE) all += to_copy(strip);
    for (int brick = share.first_brick; brick < share.last_brick; brick++, at.next()) {
      barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
      if (elected) {
        barrier_expect(full + 8 * at.stage, all * Brick::bytes);
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip += AT_ONCE)
          if (const int some = to_copy(strip))
            copy_bulk(ws + at.stage * W_BYTES + strip * 4 * Brick::bytes, from + Brick::at(4 * tile.strip(strip), brick, share.courses, share.bricks), some * Brick::bytes, full + 8 * at.stage);
      }
    }
  }
}

// The warp that copies x, which the kernel before this one may have written: copy(stage, brick, row) for a tile's rows from `row` on.
template <class Copy> DEVICE void copy_x(const Share& share, const Source& rows, int n, u32 empty, Copy copy) {
  Ring at;
  wait_for_previous();
  if (ROUTED) let_next_start();  // not before: the kernel behind this one reads the table without waiting for it
  for (int number = share.first_tile; number < share.count; number += share.stride) {
    const int row = Tile(number, rows, n).row;
    for (int brick = share.first_brick; brick < share.last_brick; brick++, at.next()) {
      barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
      copy(at.stage, brick, row);
    }
  }
}

// Sums of a team's tile, d, to those of all partners for the OWNED rows of x that team `me` finishes.
DEVICE void meet_partners(const float (&d)[TALL][WIDTH / 2], float (&sums)[TALL][OWNED / 2], int part, int team, int member, int thread, u32 inboxes, u32 received) {
  const int me = part * TEAMS + team;
  const u32 letters = inboxes + (member * 128 + thread) * 16;
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
}
