// Many rows of x, on Hopper: y^T = W x^T by wgmma, decoded weights being the A operand in registers.
//
// One warp copies bricks of weights and boxes of x, 128 k at a time, into a ring in shared memory. WARPGROUPS warpgroups
// decode and multiply, each for 64 * TALL columns of y and WIDTH rows of x. A wgmma with A in registers holds its warps
// until it has begun, so what hides the decoding of one warpgroup is the products of the others.
//
// TEAMS > 1: the warpgroups are that many teams, which take turns along K. SPLIT > 1: that many CTAs of a cluster share
// the tile, each with a part of K. In both cases the float32 sums meet in shared memory and are added in a fixed order.
// Otherwise a CTA goes from tile to tile, and the next one's copies already run while it stores. SHARE > 1: that many
// CTAs of a cluster, with neighbouring columns of y, each fetch a part of x for all of them.
//
// Compiled with: TYPE, ELEMENT, SCALE, OFFSET, GROUPS, and WARPGROUPS, TEAMS, TALL, WIDTH, STAGES, STEPS (tiles of 16 k
// that are decoded at a time), SPLIT, SHARE.
#include "decode.cuh"
#include "hopper.cuh"
#include "wgmma.cuh"

constexpr int ROW_GROUPS = WARPGROUPS / TEAMS, HEIGHT = 64 * TALL * ROW_GROUPS, TILES = HEIGHT / 16;
constexpr int X_BYTES = WIDTH * 256, W_BYTES = TILES * Brick::bytes;
constexpr int CONSUMERS = 128 * WARPGROUPS, THREADS = CONSUMERS + 128;  // registers move between whole warpgroups only
// Of 65536, what the copying warpgroup's 24 leave of the equal shares of 168 and 96 that the kernel starts with.
constexpr int REGISTERS = WARPGROUPS == 2 ? 240 : 112;
// Shared memory: STAGES of x, STAGES of bricks, then a kilobyte a warp for y on its way out; or, where sums meet, the
// sums of each team over the ring, [TEAMS][WIDTH][SUM_LINE]. Two lines are 8 banks apart, so a fragment's eight rows and
// four pairs fill all 32.
[[maybe_unused]] constexpr int SUM_LINE = HEIGHT + 4;

// Scales multiply decoded weights as pairs of TYPE, and make up for Element::raw: they are below 2, so 2^14 times that is
// still a half. E4M3 reaches 448, and is taken down by 2^-8 until the end.
constexpr float REDUCED = SCALE::bytes == 1 && GROUPS == 8 ? 0x1p-8f : 1.0f;
DEVICE void to_pairs(float2 v, float factor, u32 (&pairs)[2]) {
  pairs[0] = TYPE::pack(v.x * factor, v.x * factor);
  pairs[1] = TYPE::pack(v.y * factor, v.y * factor);
}

// A lane's part of STEPS 16 x 16 tiles along k: first fetched from shared memory, then decoded.
struct Piece {
  static constexpr int groups = STEPS > Brick::group_tiles ? STEPS / Brick::group_tiles : 1;
  u32 words[STEPS * Element::words], scale[groups][2], offset[groups][2];

  __device__ __forceinline__ void fetch(u32 brick, int first_tile, int lane) {
#pragma unroll
    for (int i = 0; i < STEPS * Element::words; i += 4) {
      const uint4 chunk = Brick::codes(brick, (first_tile * Element::words + i) / 4, lane);
      const u32 all[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (int e = 0; e < 4 && i + e < STEPS * Element::words; e++) words[i + e] = all[(first_tile * Element::words + i) % 4 + e];
    }
#pragma unroll
    for (int i = 0; i < groups; i++) {
      const int group = first_tile / Brick::group_tiles + i;
      const float2 s = Brick::scale(brick, lane >> 2, group);
      to_pairs(s, REDUCED / Element::raw, scale[i]);
      if constexpr (OFFSET != NONE) to_pairs(Brick::offset(brick, lane >> 2, group, s), REDUCED, offset[i]);
    }
  }
  __device__ __forceinline__ void decode(u32 (&a)[STEPS][4]) const {
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
      const int group = j * groups / STEPS;
      Element::decode(words + j * Element::words, a[j]);
#pragma unroll
      for (int p = 0; p < 4; p++) {
        if constexpr (OFFSET != NONE) a[j][p] = TYPE::fma2(a[j][p], scale[group][p & 1], offset[group][p & 1]);
        else a[j][p] = TYPE::mul2(a[j][p], scale[group][p & 1]);
      }
    }
  }
};

// A place in the ring.
struct Ring {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next(int steps = 1) {
    if ((stage += steps) >= STAGES) stage -= STAGES, parity ^= 1;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
marlin_gemm_large(const __grid_constant__ TensorMap x_map, const u8* __restrict__ weights, const float* __restrict__ row_scale,
                  const void* __restrict__ bias, u16* __restrict__ y, int m, int n, int k) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ __align__(8) u64 full_bars[STAGES], empty_bars[STAGES];
  const u32 xs = shared_address(shared), ws = xs + STAGES * X_BYTES;
  const u32 full = shared_address(full_bars), empty = shared_address(empty_bars);
  const int bricks = (k + 127) / 128, tiles = (n + 15) / 16;
  const int rank = SPLIT * SHARE > 1 ? cluster_rank() : 0, part = rank / SHARE, side = rank % SHARE;
  const int first_brick = bricks * part / SPLIT, last_brick = bricks * (part + 1) / SPLIT;
  // A block is SHARE tiles of y side by side. Blocks with the same columns follow each other.
  const int across = (m + WIDTH - 1) / WIDTH, blocks = (n + HEIGHT * SHARE - 1) / (HEIGHT * SHARE) * across;
  const int first_block = blockIdx.x / (SPLIT * SHARE), stride = gridDim.x / (SPLIT * SHARE);
  if (threadIdx.x == 0) {
    prefetch_map(&x_map);
    for (int i = 0; i < STAGES; i++) barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, ROW_GROUPS * SHARE);
    barrier_init_done();
  }
  if constexpr (SPLIT * SHARE > 1) cluster_assemble();
  else __syncthreads();
  let_next_start();

  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == CONSUMERS) {
      // Where the copies are: which brick of which block. Divisions only when the block changes.
      struct Cursor {
        int block, brick, tile, row;
      };
      auto enter = [&](Cursor& at) {
        at.brick = first_brick;
        at.tile = (at.block / across * SHARE + side) * TILES, at.row = at.block % across * WIDTH;
      };
      auto advance = [&](Cursor& at) {
        if (++at.brick == last_brick) at.block += stride, enter(at);
      };
      auto copy_weights = [&](const Cursor& at, int stage) {  // past the end of n there are none
        const int count = max(0, min(TILES, tiles - at.tile));
        barrier_expect(full + 8 * stage, X_BYTES + count * Brick::bytes);
#pragma unroll
        for (int t = 0; t < TILES; t += 8)
          if (t < count)
            copy_bulk(ws + stage * W_BYTES + t * Brick::bytes, weights + Brick::at(at.tile + t, at.brick, tiles, bricks), min(8, count - t) * Brick::bytes, full + 8 * stage);
      };
      auto copy_x = [&](const Cursor& at, int stage) {
        constexpr int ROWS = WIDTH / SHARE;
        const u32 to = xs + stage * X_BYTES + side * ROWS * 128;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          if constexpr (SHARE == 1) copy_box(to + half * WIDTH * 128, &x_map, full + 8 * stage, at.brick * 128 + half * 64, at.row);
          else copy_box_to(((1 << SHARE) - 1) << (part * SHARE), to + half * WIDTH * 128, &x_map, full + 8 * stage, at.brick * 128 + half * 64, at.row + side * ROWS);
        }
      };
      // Weights do not depend on the kernel before this one; x may.
      Cursor weights_at{first_block}, x_at{first_block};
      enter(weights_at), enter(x_at);
      int ahead = 0;
      for (; ahead < STAGES && weights_at.block < blocks; ahead++, advance(weights_at)) copy_weights(weights_at, ahead);
      wait_for_previous();
      for (int i = 0; i < ahead; i++, advance(x_at)) copy_x(x_at, i);
      Ring ring;
      for (; x_at.block < blocks; advance(x_at), ring.next()) {
        barrier_wait(empty + 8 * ring.stage, ring.parity);
        copy_weights(x_at, ring.stage);
        copy_x(x_at, ring.stage);
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
  const int group = (threadIdx.x >> 7) % ROW_GROUPS, team = (threadIdx.x >> 7) / ROW_GROUPS;
  const int thread = threadIdx.x & 127, warp = thread >> 5, lane = thread & 31;
  auto release = [&](int stage) {  // to all who write to it
    if (thread < SHARE) {
      if constexpr (SHARE == 1) barrier_arrive(empty + 8 * stage);
      else barrier_arrive_at(empty + 8 * stage, part * SHARE + thread);
    }
  };
  Ring at;
  at.next(team);
  for (int block = first_block; block < blocks; block += stride) {
    const int first_column = (block / across * SHARE + side) * HEIGHT, first_row = block % across * WIDTH;
    float d[TALL][WIDTH / 2];
    u32 a[2][TALL][STEPS][4];
    int previous = -1;
    for (int step = first_brick + team; step < last_brick; step += TEAMS, at.next(TEAMS)) {
      barrier_wait(full + 8 * at.stage, at.parity);
      const u32 brick = ws + at.stage * W_BYTES + (group * TALL * 4 + warp) * Brick::bytes;
      const u64 b = wgmma_descriptor(xs + at.stage * X_BYTES);
#pragma unroll
      for (int piece = 0; piece < 8 / STEPS; piece++) {
        Piece fetched[TALL];
#pragma unroll
        for (int r = 0; r < TALL; r++) fetched[r].fetch(brick + r * 4 * Brick::bytes, piece * STEPS, lane);
        wgmma_wait<1>();  // the products that used these registers last are done
        if (piece == 1 && previous >= 0) release(previous);
#pragma unroll
        for (int r = 0; r < TALL; r++) fetched[r].decode(a[piece % 2][r]);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < STEPS; j++)
#pragma unroll
          for (int r = 0; r < TALL; r++) {
            const int kt = piece * STEPS + j;
            wgmma<TYPE>(d[r], a[piece % 2][r][j], b + (kt / 4) * (WIDTH * 8) + (kt % 4) * 2, previous >= 0 || kt);
          }
        wgmma_commit();
      }
      previous = at.stage;
    }
    wgmma_wait<0>();
    if (previous >= 0) release(previous);

#if SPLIT * TEAMS == 1
    // Each warp turns 16 x 16 of its sums at a time, by stmatrix, and stores 32 bytes of 16 rows.
    const u32 turned = ws + STAGES * W_BYTES + (threadIdx.x >> 5) * 1024;
    const int column = first_column + group * TALL * 64 + warp * 16;
    const u32 write_at = turned + (lane & 15) / 8 * 256 + (lane & 7) * 32, read_at = turned + (lane >> 1) * 32;
#pragma unroll
    for (int r = 0; r < TALL; r++) {
      float scale[2], added[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int mine = min(column + r * 64 + (lane >> 2) + h * 8, n - 1);
        scale[h] = row_scale[mine] * (1 / REDUCED), added[h] = load_bias(bias, mine);
      }
      const int to_column = column + r * 64 + (lane & 1) * 8;
#pragma unroll
      for (int j = 0; j < WIDTH / 16; j++) {
        // Matrices: rows 0..7 and 8..15 of x, for the columns 0..7 and then for 8..15.
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int h = i >> 1, from = j * 8 + (i & 1) * 4 + h * 2;
          pairs[i] = TYPE::pack(activate(d[r][from] * scale[h] + added[h]), activate(d[r][from + 1] * scale[h] + added[h]));
        }
        // Halves of 16 bytes change places in every other four rows: eight rows then fill all banks.
        const u32 buffer = j % 2 * 512;
        store_matrices_transposed(write_at + buffer + ((lane >> 4 ^ (lane & 7) >> 2) << 4), pairs);
        __syncwarp();
        const uint4 v = load_shared16(read_at + buffer + (((lane & 1) ^ (lane >> 3 & 1)) << 4));
        const int to_row = first_row + j * 16 + (lane >> 1);
        if (to_row < m && to_column < n) {
          u16* to = y + (size_t)to_row * n + to_column;
          if (n % 8 == 0) *(uint4*)to = v;
          else {
            const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int e = 0; e < 8; e++)
              if (to_column + e < n) to[e] = (u16)(words[e / 2] >> (e % 2 * 16));
          }
        }
      }
      __syncwarp();
    }
#else
    float* sums = (float*)shared;
    if (previous < 0)  // fewer bricks than teams
#pragma unroll
      for (int i = 0; i < TALL * WIDTH / 2; i++) d[i / (WIDTH / 2)][i % (WIDTH / 2)] = 0;
    meet(1, CONSUMERS);  // nobody reads the ring any more
#pragma unroll
    for (int r = 0; r < TALL; r++)
#pragma unroll
      for (int i = 0; i < WIDTH / 2; i++)
        sums[(team * WIDTH + i / 4 * 8 + (lane & 3) * 2 + (i & 1)) * SUM_LINE + (group * TALL + r) * 64 + warp * 16 + (lane >> 2) + (i >> 1 & 1) * 8] = d[r][i];
    if constexpr (SPLIT > 1) cluster_meet();
    else meet(1, CONSUMERS);
    constexpr int ROWS = WIDTH / SPLIT, QUADS = HEIGHT / 4;  // every CTA adds its share of the rows
    for (int i = threadIdx.x; i < ROWS * QUADS; i += CONSUMERS) {
      const int row = part * ROWS + i / QUADS, column = i % QUADS * 4, out = first_column + column;
      if (first_row + row >= m || out >= n) continue;
      float4 v = {0, 0, 0, 0};
#pragma unroll
      for (int from = 0; from < SPLIT * TEAMS; from++) {
        const float* p = sums + (from % TEAMS * WIDTH + row) * SUM_LINE + column;
        const float4 a = SPLIT > 1 ? load_cluster(shared_address(p), from / TEAMS * SHARE + side) : *(const float4*)p;
        v.x += a.x, v.y += a.y, v.z += a.z, v.w += a.w;
      }
      const float values[4] = {v.x, v.y, v.z, v.w};
      u16* to = y + (size_t)(first_row + row) * n + out;
      u32 halves[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int column_e = min(out + e, n - 1);
        halves[e] = TYPE::pack(activate(values[e] * (row_scale[column_e] * (1 / REDUCED)) + load_bias(bias, column_e)), 0);
      }
      if (n % 4 == 0) *(uint2*)to = make_uint2(halves[0] | halves[1] << 16, halves[2] | halves[3] << 16);
      else
        for (int e = 0; e < 4 && out + e < n; e++) to[e] = (u16)halves[e];
    }
#endif
  }
  if constexpr (SPLIT * SHARE > 1) cluster_assemble();  // nobody leaves while others may still reach into its shared memory
}
