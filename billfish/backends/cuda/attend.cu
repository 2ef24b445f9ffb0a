// Attention over a paged KV cache: softmax(q K^T) V by mma.m16n8k16, 64 keys at a time, with a running maximum (flash attention).
//
// Sixteen rows of q are a warp's operand. Heads of a GQA group go together: row i of a CTA is the head i % GROUP of the position i / GROUP.
//
// FEW: a decode step, one position of a sequence, so up to 16 heads. The warps of a CTA split the keys of a tile, sixteen each; the CTAs of
// a cluster split the tiles. Partial results are added in a fixed order.
// Otherwise: prefill, WARPS * 16 rows of one sequence. Every warp attends to all keys up to its own positions.
//
// Compiled with TYPE, HEAD, GROUP, WARPS, STAGES (tiles of keys and values in shared memory), FEW, MOST_PARTS (CTAs of a cluster, at most), WINDOWED (a position attends to the last
// `window` ones), CAPPED (scores s become cap tanh(s / cap)), OUTPUT_GATE (a head of q has a gate behind it, whose sigmoid its output is
// multiplied with) and FP8 (of the KV cache). Scores are in powers of two: q, cap and sinks have log2(e) in them.
#include "hopper.cuh"
#include "pages.cuh"

// FP8: a register of an operand from shared memory has four codes, which become two registers of float16. A lane's four codes of a key are the numbers
// 4c to 4c + 3 of sixteen, so q is loaded in that order. Scores are multiplied by the scales of keys in float32. The four codes of two values' rows are
// two neighbouring columns, which go to two mmas, so a lane's sums are the columns 4c to 4c + 3 of sixteen. Values are multiplied by their scales in
// float16, which is exact but for the smallest.

// Heads of more than 256 numbers: registers hold half of the output, so that a CTA has the half of the columns of values, and no queries, which
// lie in shared memory.
constexpr int HALVES = WIDE > 256 ? 2 : 1, COLUMNS = WIDE / HALVES;
constexpr int STEPS = WIDE / 16, EIGHTS = COLUMNS / 8;                  // of 16 numbers of a head and of 8 columns
constexpr int KEYS = FEW ? PAGE / WARPS : PAGE;                         // that a warp takes of a tile
constexpr int CHUNKS = FEW ? (GROUP + 15) / 16 : 1;  // CTAs for the heads of a group
constexpr int AT_ONCE = WIDE > 128 ? 16 : KEYS;            // keys whose scores are in registers, beside large heads
static_assert(!FEW || KEYS == 16, "sixteen keys for each warp");

// Tiles on their way: keys and values of 64 positions, by bulk copies; before Hopper, by all threads.
struct Tiles {
  u32 keys, values, full;  // STAGES of each, and a barrier
  const u64* pages;
  int offset, kv_heads, head;
  __device__ __forceinline__ void fetch(int tile, int stage) const {
    const u64 k = tile_at(pages[tile], offset, 0, kv_heads, head), v = tile_at(pages[tile], offset, 1, kv_heads, head);
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      barrier_expect(full + 8 * stage, 2 * TILE_BYTES);
      copy_bulk(keys + stage * TILE_BYTES, (const void*)k, TILE_BYTES, full + 8 * stage);
      copy_bulk(values + stage * TILE_BYTES, (const void*)v, TILE_BYTES, full + 8 * stage);
    }
#else
    for (int i = threadIdx.x * 16; i < TILE_BYTES; i += WARPS * 32 * 16) {
      copy_async(keys + stage * TILE_BYTES + i, (const u8*)k + i, 16);
      copy_async(values + stage * TILE_BYTES + i, (const u8*)v + i, 16);
    }
#endif
  }
  __device__ __forceinline__ void commit() const {
#if __CUDA_ARCH__ < 900
    copy_commit();
#endif
  }
  __device__ __forceinline__ void wait(int stage, u32 parity) const {
#if __CUDA_ARCH__ >= 900
    barrier_wait(full + 8 * stage, parity);
#else
    copy_wait<STAGES - 1>();
    __syncthreads();
#endif
  }
};

DEVICE void load_matrices_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
// cap tanh(s / cap), whose error is small beside cap; scores are exponents, so that this is what counts.
DEVICE float capped(float s, float cap) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(s * (2.88539008f / cap)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1 + power));
  return cap - 2 * cap * inverse;
}
DEVICE float power_of_two(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }

// Partial results of a row: the largest score, the sum of powers of two, and two columns of the weighted values.
struct Sum {
  float largest, sum, low, high;
};
// Adds up `used` of COUNT, in their order: `of(i)` gives largest and sum, `values(i)` the two numbers.
template <int COUNT, class Of, class Values> DEVICE Sum add_up(Of of, Values values, int used) {
  float2 about[COUNT], pair[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; i++)
    if (i < used) about[i] = of(i), pair[i] = values(i);
  Sum all = {-INFINITE, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < COUNT; i++)
    if (i < used) all.largest = fmaxf(all.largest, about[i].x);
  const float base = all.largest == -INFINITE ? 0 : all.largest;
#pragma unroll
  for (int i = 0; i < COUNT; i++)
    if (i < used) {
      const float weight = power_of_two(about[i].x - base);
      all.sum += weight * about[i].y, all.low += weight * pair[i].x, all.high += weight * pair[i].y;
    }
  return all;
}

// A lane's part of sixteen rows of q, as the A operand of an mma.
struct Query {
  u32 a[HALVES == 1 ? STEPS : 1][4], at;  // or their address in shared memory
  __device__ __forceinline__ void put(int step, const u32 (&part)[4]) {
    if constexpr (HALVES == 1) {
#pragma unroll
      for (int i = 0; i < 4; i++) a[step][i] = part[i];
    } else store_shared16(at + step * 512, make_float4(__uint_as_float(part[0]), __uint_as_float(part[1]), __uint_as_float(part[2]), __uint_as_float(part[3])));
  }
  __device__ __forceinline__ void get(int step, u32 (&part)[4]) const {
    if constexpr (HALVES == 1) {
#pragma unroll
      for (int i = 0; i < 4; i++) part[i] = a[step][i];
    } else {
      const uint4 v = load_shared16(at + step * 512);
      part[0] = v.x, part[1] = v.y, part[2] = v.z, part[3] = v.w;
    }
  }
};

#if FP8
// The operands of four matrices of codes: of each, those of the low and of the high halves of its numbers of 16 bits.
struct Decoded {
  u32 low[4], high[4];
};
DEVICE Decoded decoded(const u32 (&codes)[4]) {
  Decoded r;
#pragma unroll
  for (int i = 0; i < 4; i++) r.low[i] = from_codes(codes[i]), r.high[i] = from_codes(codes[i] >> 16);
  return r;
}
#endif

// A warp's partial results for its sixteen rows: of the rows g and g + 8, the largest score, the sum of powers and the weighted values.
struct Found {
  float largest[2] = {-INFINITE, -INFINITE}, sum[2] = {}, out[EIGHTS][4] = {};

  // Adds COUNT keys from `first` on, whose tile is at `keys` and `values`; row h attends to those below `seen[h]`, to `window` of them.
  template <int COUNT> __device__ __forceinline__ void take(const Query& query, u32 keys, u32 values, int half, int first, int from, const int (&seen)[2], int lane, bool masked, int window, float cap) {
    float s[COUNT / 8][4] = {};
    const int i = lane >> 3, r = lane & 7, c = lane & 3;
#if FP8
#pragma unroll
    for (int step = 0; step < STEPS; step += 2) {
      u32 q[2][4];
      query.get(step, q[0]), query.get(step + 1, q[1]);
#pragma unroll
      for (int n = 0; n < COUNT / 16; n++) {
        u32 codes[4];
        load_matrices(codes, keys + (first + n * 16 + (i >> 1) * 8 + r) * ROW_BYTES + ((step + (i & 1) ^ swizzle(r)) << 4));
        const Decoded b = decoded(codes);
#pragma unroll
        for (int m = 0; m < 4; m++) TYPE::mma(s[2 * n + m / 2], q[m % 2], b.low[m], b.high[m]);
      }
    }
#pragma unroll
    for (int n = 0; n < COUNT / 8; n++) {
      const uint2 scales = load_shared8(keys + ROWS_BYTES + (first + n * 8 + 2 * c) * 4);
#pragma unroll
      for (int e = 0; e < 4; e++) s[n][e] *= __uint_as_float(e & 1 ? scales.y : scales.x);
    }
#else
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      u32 q[4];
      query.get(step, q);
#pragma unroll
      for (int n = 0; n < COUNT / 16; n++) {
        u32 b[4];
        load_matrices(b, keys + (first + n * 16 + (i >> 1) * 8 + r) * ROW_BYTES + ((step * 2 + (i & 1) ^ r) << 4));
        TYPE::mma(s[2 * n], q, b[0], b[1]);
        TYPE::mma(s[2 * n + 1], q, b[2], b[3]);
      }
    }
#endif
    if (CAPPED)
#pragma unroll
      for (int n = 0; n < COUNT / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][e] = capped(s[n][e], cap);
    if (masked)
#pragma unroll
      for (int n = 0; n < COUNT / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int key = from + first + n * 8 + 2 * c + (e & 1), behind = seen[e >> 1];
          if (key >= behind || (WINDOWED && key < behind - window)) s[n][e] = -INFINITE;
        }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float most = largest[h];
#pragma unroll
      for (int n = 0; n < COUNT / 8; n++) most = fmaxf(most, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
      const float base = most == -INFINITE ? 0 : most, shrink = power_of_two(largest[h] - base);
      largest[h] = most;
      sum[h] *= shrink;
#pragma unroll
      for (int n = 0; n < EIGHTS; n++) out[n][2 * h] *= shrink, out[n][2 * h + 1] *= shrink;
#pragma unroll
      for (int n = 0; n < COUNT / 8; n++)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; e++) s[n][e] = power_of_two(s[n][e] - base), sum[h] += s[n][e];
    }
#pragma unroll
    for (int n = 0; n < COUNT / 16; n++) {
      // The sums' places in registers are those of an operand.
      const u32 p[4] = {TYPE::pack(s[2 * n][0], s[2 * n][1]), TYPE::pack(s[2 * n][2], s[2 * n][3]), TYPE::pack(s[2 * n + 1][0], s[2 * n + 1][1]), TYPE::pack(s[2 * n + 1][2], s[2 * n + 1][3])};
#if FP8
      u32 scales[2];  // of the keys 2c and 2c + 1 of each eight
#pragma unroll
      for (int m = 0; m < 2; m++) {
        const uint2 both = load_shared8(values + ROWS_BYTES + (first + n * 16 + m * 8 + 2 * c) * 4);
        scales[m] = TYPE::pack(__uint_as_float(both.x), __uint_as_float(both.y));
      }
#pragma unroll
      for (int d = 0; d < EIGHTS / 4; d++) {
        u32 codes[4];
        load_matrices_transposed(codes, values + (first + n * 16 + (i & 1) * 8 + r) * ROW_BYTES + ((half * (COLUMNS / 16) + d * 2 + (i >> 1) ^ swizzle(r)) << 4));
#pragma unroll
        for (int m = 0; m < 4; m++) codes[m] = permute(codes[m], 0, 0x3120);  // the even column of both keys, then the odd one
        const Decoded b = decoded(codes);
#pragma unroll
        for (int m = 0; m < 4; m += 2) {
          TYPE::mma(out[4 * d + m], p, TYPE::mul2(b.low[m], scales[0]), TYPE::mul2(b.low[m + 1], scales[1]));
          TYPE::mma(out[4 * d + m + 1], p, TYPE::mul2(b.high[m], scales[0]), TYPE::mul2(b.high[m + 1], scales[1]));
        }
      }
#else
#pragma unroll
      for (int d = 0; d < EIGHTS / 2; d++) {
        u32 b[4];
        load_matrices_transposed(b, values + (first + n * 16 + (i & 1) * 8 + r) * ROW_BYTES + ((half * EIGHTS + d * 2 + (i >> 1) ^ r) << 4));
        TYPE::mma(out[2 * d], p, b[0], b[1]);
        TYPE::mma(out[2 * d + 1], p, b[2], b[3]);
      }
#endif
    }
  }
  // Pair n of a lane's sums of row h: the column of the first, and both.
  static __device__ __forceinline__ int column(int n, int c) { return FP8 ? n / 2 * 16 + 4 * c + n % 2 * 2 : n * 8 + 2 * c; }
  __device__ __forceinline__ float low(int n, int h) const { return FP8 ? out[n & ~1][2 * h + n % 2] : out[n][2 * h]; }
  __device__ __forceinline__ float high(int n, int h) const { return FP8 ? out[n | 1][2 * h + n % 2] : out[n][2 * h + 1]; }
  // The sums of a row are with four lanes.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum[h] += __shfl_xor_sync(0xffffffff, sum[h], 1);
      sum[h] += __shfl_xor_sync(0xffffffff, sum[h], 2);
    }
  }
};

// q: rows of queries, `q_stride` numbers apart, as marlin_rotate left them. blocks [gridDim.x]: the first row of a block of queries, how many positions it has, its
// row in `pages` and its first position; FEW: blocks [gridDim.z], of one position, and instead of how many they are, the sequence's first position of this step: a
// draft has several, of which earlier ones may lie in an earlier page. A block without positions fills up the grid. sinks [heads]: a score
// beside those of keys, without a value; or null.
// out [m, heads * HEAD].
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
marlin_attend(const u16* __restrict__ q, const int4* __restrict__ blocks, const u64* __restrict__ pages, u16* __restrict__ out,
              const float* __restrict__ sinks, int q_stride, int heads, int kv_heads, int offset, int pages_of_sequence, int window, float cap) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ __align__(8) u64 barriers[STAGES];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const int half = HALVES == 1 ? 0 : blockIdx.y % HALVES, kv_head = blockIdx.y / HALVES / CHUNKS, chunk = blockIdx.y / HALVES % CHUNKS;
  // What the host sent, `blocks` and `pages`, was there before the step's first kernel began.
  const int4 block = blocks[FEW ? blockIdx.z : blockIdx.x];
  const int first_row = FEW ? blockIdx.z : block.x, count = FEW ? 1 : block.y, sequence = block.z, first_position = block.w;
  const int part = FEW ? blockIdx.x : 0, parts = FEW ? gridDim.x : 1;
  Tiles tiles;
  tiles.keys = shared_address(shared), tiles.values = tiles.keys + STAGES * TILE_BYTES, tiles.full = shared_address(barriers);
  tiles.pages = pages + (size_t)sequence * pages_of_sequence, tiles.offset = offset, tiles.kv_heads = kv_heads, tiles.head = kv_head;
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(tiles.full + 8 * i, 1);
    barrier_init_done();
  }
  __syncthreads();
#endif
  let_next_start();
  // Tiles from the window of the first position on.
  const int length = first_position + count, first_tile = WINDOWED ? max(0, first_position + 1 - window) / PAGE : 0;
  const int all = (length + PAGE - 1) / PAGE - first_tile, mine = (all - part + parts - 1) / parts;
  // Tiles before that of the sequence's first new position were there before the previous kernel began. Of a passage it may write any.
  const int old_tiles = FEW ? block.y / PAGE : 0;
  auto tile_of = [&](int i) { return first_tile + part + i * parts; };
  auto fetch = [&](int i, bool old) {
    if (i < mine && (tile_of(i) < old_tiles) == old) tiles.fetch(tile_of(i), i % STAGES);
  };
#if __CUDA_ARCH__ >= 900
  for (int i = 0; i < STAGES; i++) fetch(i, true);
  wait_for_previous();
  for (int i = 0; i < STAGES; i++) fetch(i, false);
#else
  for (int i = 0; i < STAGES; i++) {
    fetch(i, true), fetch(i, false);
    tiles.commit();
  }
#endif
  // A lane's rows, g and g + 8 of its warp's.
  Query query;
  query.at = tiles.values + STAGES * TILE_BYTES + warp * 32 * WIDE + lane * 16;
  int seen[2], row_of[2], head_of[2];
  const u16* from_row[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int i = (FEW ? chunk : warp) * 16 + g + 8 * h, position = i / GROUP;
    const bool valid = FEW ? i < GROUP : position < count;
    row_of[h] = valid ? first_row + position : -1, head_of[h] = kv_head * GROUP + i % GROUP;
    seen[h] = first_position + (valid ? position : 0) + 1;
    from_row[h] = q + (size_t)max(0, row_of[h]) * q_stride + head_of[h] * (1 + OUTPUT_GATE) * HEAD;
  }
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    u32 part[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int h = i % 2, at = step * 16 + (FP8 ? 4 * c + i / 2 * 2 : i / 2 * 8 + 2 * c);
      part[i] = row_of[h] >= 0 && at < HEAD ? *(const u32*)(from_row[h] + at) : 0;
    }
    query.put(step, part);
  }
  // Of a warp's rows, the first attends to the fewest keys and the last to the most; a warp without rows to none.
  const int least = first_position + (FEW ? 0 : warp * 16 / GROUP) + 1, most = !FEW && warp * 16 / GROUP >= count ? 0 : first_position + (FEW ? 0 : min(count - 1, (warp * 16 + 15) / GROUP)) + 1;
  Found found;
  u32 parity = 0;
  for (int i = 0; i < mine; i++) {
    const int stage = i % STAGES, from = tile_of(i) * PAGE;
    tiles.wait(stage, parity);
    const u32 keys = tiles.keys + stage * TILE_BYTES, values = tiles.values + stage * TILE_BYTES;
    if (from + PAGE > length) {  // memory past the end of the sequence may hold NaN, and 0 * NaN is NaN
      for (int at = (length - from) * ROW_BYTES + threadIdx.x * 16; at < ROWS_BYTES; at += WARPS * 32 * 16) store_shared16(values + at, make_float4(0, 0, 0, 0));
#if FP8
      if (threadIdx.x < PAGE && threadIdx.x >= length - from) store_shared4(values + ROWS_BYTES + threadIdx.x * 4, 0);
#endif
      __syncthreads();
    }
    const bool some = from < most && (!WINDOWED || from + PAGE > least - window), masked = from + PAGE > least || (WINDOWED && from < most - window);
    for (int first = FEW ? warp * KEYS : 0, end = first + KEYS; first < end && some; first += AT_ONCE)
      found.take<AT_ONCE>(query, keys, values, half, first, from, seen, lane, masked, window, cap);
    __syncthreads();
    if (i + STAGES < mine) tiles.fetch(tile_of(i + STAGES), stage);
    tiles.commit();
    if (stage == STAGES - 1) parity ^= 1;
  }
  found.finish();
  auto put = [&](int row, int head, int at, float largest, float sum, float low, float high) {
    if (at >= HEAD) return;
    if (sinks) sum += power_of_two(sinks[head] - largest);
    low /= sum, high /= sum;
    if (OUTPUT_GATE) {
      const u32 gate = *(const u32*)(q + (size_t)row * q_stride + (2 * head + 1) * HEAD + at);
      low /= 1 + power_of_two(-1.44269504f * TYPE::to_float((u16)gate)), high /= 1 + power_of_two(-1.44269504f * TYPE::to_float((u16)(gate >> 16)));
    }
    *(u32*)(out + ((size_t)row * heads + head) * HEAD + at) = TYPE::pack_finite(low, high);
  };
  if constexpr (!FEW) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int n = 0; n < EIGHTS; n++)
        if (row_of[h] >= 0) put(row_of[h], head_of[h], half * COLUMNS + Found::column(n, c), found.largest[h], found.sum[h], found.low(n, h), found.high(n, h));
    return;
  }
  // Of the warps, [WARPS][16][COLUMNS] values, [WARPS][16] largest and sums, in the place of the tiles; the CTA's own are the first ones.
  float* outs = (float*)shared;
  float* largest = outs + WARPS * 16 * COLUMNS;
  float* sums = largest + WARPS * 16;
  __shared__ float2 of_row[16];  // the CTA's largest and sum
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = warp * 16 + g + 8 * h;
    if (c == 0) largest[row] = found.largest[h], sums[row] = found.sum[h];
#pragma unroll
    for (int n = 0; n < EIGHTS; n++) *(float2*)(outs + row * COLUMNS + Found::column(n, c)) = make_float2(found.low(n, h), found.high(n, h));
  }
  __syncthreads();
  const int rows = min(16, GROUP - chunk * 16), used = min(parts, all);
  for (int i = threadIdx.x * 2; i < rows * COLUMNS; i += WARPS * 64) {
    const int row = i / COLUMNS;
    const Sum sum = add_up<WARPS>([&](int w) { return make_float2(largest[w * 16 + row], sums[w * 16 + row]); },
                        [&](int w) { return *(float2*)(outs + w * 16 * COLUMNS + i); }, WARPS);
    if (used == 1 && part == 0) put(first_row, kv_head * GROUP + chunk * 16 + row, half * COLUMNS + i % COLUMNS, sum.largest, sum.sum, sum.low, sum.high);
    *(float2*)(outs + i) = make_float2(sum.low, sum.high);
    if (i % COLUMNS == 0) of_row[row] = make_float2(sum.largest, sum.sum);
  }
#if __CUDA_ARCH__ >= 900
  if (used == 1) return;  // the same for all CTAs of a cluster
  cluster_meet();
  for (int i = (part * WARPS * 32 + threadIdx.x) * 2; i < rows * COLUMNS; i += parts * WARPS * 64) {
    const int row = i / COLUMNS;
    const u32 about = shared_address(of_row + row), values = shared_address(outs + i);
    const Sum sum = add_up<MOST_PARTS>([&](int from) { return load_cluster(cluster_address(about, from)); },
                        [&](int from) { return load_cluster(cluster_address(values, from)); }, used);
    put(first_row, kv_head * GROUP + chunk * 16 + row, half * COLUMNS + i % COLUMNS, sum.largest, sum.sum, sum.low, sum.high);
  }
  cluster_meet();  // others may still read here
#endif
}
