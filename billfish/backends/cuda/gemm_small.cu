// GEMV and skinny GEMM: y^T = W x^T by mma.m16n8k16, bound by the rate at which weights come from memory.
//
// A *course* is a row block of W: 16 rows, so 16 columns of y. A CTA takes COURSES of them at a time: a pass. In a pass its TEAMS of
// warps split K, a brick of 128 k at a time. After a barrier their partial sums are added in a fixed order. Bricks and x go through a
// ring in shared memory; each team has slots of its own and fills them itself. A team is one warp, or several that split the courses.
//
// Weights are exact in the tensor core. Scales multiply float32 sums, or, where groups are many and code times scale is exact, the
// codes. Where x has fewer than eight rows, the unused columns of the mma keep the sums of several groups apart, so that one
// multiplication serves them all: with one row, fragment kt of a brick has x in the column copy_of(kt), and zeros in the others.
// Zero points and the bias of codes are subtracted from such sums, and minimums added, times the sum of x, which is one more
// mma of x with a constant. With eight rows and more, the order of additions depends on TEAMS and the pass alone, so a row's
// result does not depend on its batch.
//
// Compiled with: TYPE, ELEMENT, SCALE, OFFSET, GROUPS, and TEAMS, SHARERS (warps of a team), COURSES, ROWS (of x: 1, 2, 4, 8, 16 or
// 32), ALONE (x has but one row, which stands for all), SLOTS, and RESIDENT, the CTAs that are to have room on a multiprocessor. With EXPERTS,
// the rows of a tile, which are up to ROWS, a pass is a tile of some expert's (rows.cuh). FRESH: the kernel before this one writes the table.
// RESIDUAL, NORMED: the product is the first or the second one of a folded norm (folded_norm.cuh).
#include "decode.cuh"
#include "folded_norm.cuh"
#include "hopper.cuh"
#include "rows.cuh"

constexpr int COLUMNS = ROWS < 8 ? 1 : ROWS / 8, COPIES = ROWS < 8 ? 8 / ROWS : 1;
// A brick's 8 fragments are SECTIONS, each of as many groups as are kept apart.
constexpr int SECTIONS = GROUPS > COPIES ? GROUPS / COPIES : 1, FRAGMENTS = 8 / SECTIONS;
static_assert(8 % COURSES == 0, "bricks of eight courses are neighbours");
static_assert(SLOTS % TEAMS == 0, "every team has as many slots");
static_assert(COURSES % SHARERS == 0, "every warp of a team has as many courses");
constexpr int WARPS = TEAMS * SHARERS, MINE = COURSES / SHARERS;  // courses of a warp
static_assert(ROWS > 1 || ALONE, "one row is one row");
constexpr int X_ROWS = ALONE ? 1 : ROWS < 8 ? 8 : ROWS, Y_ROWS = ALONE ? 1 : ROWS, DIFFERENT = Y_ROWS < 8 ? Y_ROWS : 8;
#ifdef EXPERTS
constexpr int TILE_ROWS = EXPERTS;
static_assert(EXPERTS <= ROWS && (EXPERTS == 1 || !ALONE), "the rows of a tile");
#else
constexpr int TILE_ROWS = Y_ROWS;
#endif
constexpr int X_BYTES = X_ROWS * 256, W_BYTES = COURSES * Brick::bytes, WIDTH = 16 * COURSES;
// Where groups are many and scales multiply codes, they bring up what is too small for bfloat16, too.
constexpr bool PRESCALED = SCALE::bytes == 1 && GROUPS == 8 && COPIES == 1;
constexpr float RAW = Element::raw * (PRESCALED && !TYPE::is_half ? 0x1p110f : 1);
// Codes as they are need few instructions, but, to take their center off, the product of x with a constant: that is worth it for
// many courses, or where it is needed anyway.
constexpr bool PLAIN = !PRESCALED && (OFFSET != NONE || MINE >= 4 || Element::center == 0);
constexpr float CENTER = PLAIN ? Element::center : 0, UNIT_LOW = PLAIN ? Element::unit_low : RAW, UNIT_HIGH = PLAIN ? Element::unit_high : RAW;
constexpr float ZERO_POINT = CENTER - (OFFSET == NONE ? 0 : MIDDLE);  // of all codes, as they are multiplied
constexpr bool SUMMED = ZERO_POINT != 0 || OFFSET != NONE;
constexpr bool FIRST = FRAGMENTS <= 2;  // sums of so few fragments begin with what is taken off; longer ones would wait for it
static __device__ constexpr int copy_of(int kt) { return (kt / Brick::group_fragments + GROUPS * (kt % Brick::group_fragments)) % COPIES; }

// The ring, as a team sees it: its slots are every TEAMS-th. Hopper fills one with bulk copies by one lane, the others with copies
// of 16 bytes by all. x is in two boxes of 64 k, rows of 128 bytes; the 16 bytes i of row r are at i ^ (r % 8),
// so eight rows lie in different banks. One row is one box.
struct Ring {
  u32 x, w, full;  // in shared memory; `full` is a barrier for each slot
  bool elected;    // to copy
  int lane, places, count, courses, bricks, first_row, rows, box_rows, k, x_stride;
  Visits visits;
  const u8* weights;
  const u16* source;
  const TensorMap* map;
  int pass, course, brick;  // to fetch next; of `count` passes, a CTA has every gridDim.x-th
  const u8* from;   // its first brick
  u32 stride;       // bytes from brick to brick along K

  __device__ __forceinline__ Part part(int i) const {
    if constexpr (ROUTED) return visits.part(i, places, TILE_ROWS);
    else return {0, first_row, first_row + rows, i};
  }
  __device__ __forceinline__ void begin(int first) {
    pass = first, brick = 0;
    const Part its = part(first);
    course = its.place * COURSES;
    from = weights + Brick::at(course, 0, courses, bricks), stride = min(8, courses - (course & ~7)) * Brick::bytes;
    if constexpr (ROUTED) from += (size_t)its.expert * courses * bricks * Brick::bytes, first_row = its.row, rows = its.end - its.row;
  }
  // That many bricks further on; false if there are none.
  __device__ __forceinline__ bool advance(int steps) {
    for (; brick + steps >= bricks; begin(pass + gridDim.x)) {
      if (pass + gridDim.x >= count) return false;
      steps -= bricks - brick;
    }
    brick += steps, from += (size_t)steps * stride;
    return true;
  }
#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ void fetch_weights(int slot) const {
    const u32 bytes = min(COURSES, courses - course) * Brick::bytes;
    if (elected) {
      barrier_expect(full + 8 * slot, box_rows * 256 + bytes);
      copy_bulk(w + slot * W_BYTES, from, bytes, full + 8 * slot);
    }
  }
  __device__ __forceinline__ void fetch_x(int slot) const {
    if (elected) {
      copy_box(x + slot * X_BYTES, map, full + 8 * slot, brick * 128, first_row);
      if (!ALONE) copy_box(x + slot * X_BYTES + X_ROWS * 128, map, full + 8 * slot, brick * 128 + 64, first_row);
    }
  }
  __device__ __forceinline__ void commit() const {}
  __device__ __forceinline__ void wait(int slot, u32 parity) const { barrier_wait(full + 8 * slot, parity); }
#else
  static_assert(SHARERS == 1, "who copies, waits");
  __device__ __forceinline__ void fetch_weights(int slot) const {
    for (int i = lane; i < min(COURSES, courses - course) * Brick::bytes / 16; i += 32) copy_async(w + slot * W_BYTES + i * 16, from + i * 16, 16);
  }
  __device__ __forceinline__ void fetch_x(int slot) const {
    const int sixteen = lane & 15, left = k - brick * 128 - sixteen * 8;
    const u32 to = x + slot * X_BYTES + (sixteen >> 3) * X_ROWS * 128;
    for (int row = lane >> 4; row < rows; row += 2) {
      const u16* from = source + (size_t)(first_row + row) * x_stride + (left > 0 ? brick * 128 + sixteen * 8 : 0);
      copy_async(to + row * 128 + (((sixteen & 7) ^ (row & 7)) << 4), from, 2 * max(0, min(8, left)));
    }
  }
  __device__ __forceinline__ void commit() const { copy_commit(); }
  __device__ __forceinline__ void wait(int, u32) const {
    copy_wait<SLOTS / TEAMS - 1>();
    __syncwarp();
  }
#endif
  // Every slot once, with weights or with x; false if there are no more bricks than that.
  template <bool X> __device__ __forceinline__ bool fill(int team) {
    begin(blockIdx.x);
    bool more = advance(team);
#pragma unroll 1
    for (int slot = team; slot < SLOTS; slot += TEAMS) {
      if (more && X) fetch_x(slot);
      if (more && !X) fetch_weights(slot);
      commit();
      more = more && advance(TEAMS);
    }
    return more;
  }
};

// Y_F32: y is float32: the logits.
#ifdef Y_F32
typedef float Output;
DEVICE void put(float* y, size_t i, float v) { y[i] = v; }
#else
typedef u16 Output;
DEVICE void put(u16* y, size_t i, float v) { y[i] = (u16)TYPE::pack_finite(v, 0); }
#endif

DEVICE void multiply(const TensorMap& x_map, const u8* __restrict__ weights, const float* __restrict__ row_scale, const u16* __restrict__ x, const void* __restrict__ bias,
                     Output* __restrict__ y, const Visits& visits, const FoldedNorm& norm, int m, int n, int k, int x_stride) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ __align__(8) u64 barriers[SLOTS];
  __shared__ uint4 zeros[WARPS];
#ifdef NORMED
  __shared__ float row_factors[Y_ROWS];
#endif
  // Known to be the same for a whole warp, it keeps what copies want in uniform registers.
  const int warp = __shfl_sync(0xffffffff, threadIdx.x >> 5, 0), team = warp / SHARERS, sharer = warp % SHARERS;
  const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const int bricks = (k + 127) / 128, courses = (n + 15) / 16, places = (courses + COURSES - 1) / COURSES;
#ifdef FRESH
  wait_for_previous();
#endif
  const int count = ROUTED ? visits.count(places) : places;
  if (ROUTED && blockIdx.x >= count) {
    wait_for_previous();  // so that this kernel is not over before the one ahead of it
    return;
  }
  Ring ring;
  ring.x = shared_address(shared);
  ring.w = ring.x + SLOTS * X_BYTES;
  ring.full = shared_address(barriers);
  ring.lane = lane, ring.places = places, ring.count = count, ring.courses = courses, ring.bricks = bricks;
  ring.first_row = blockIdx.y * ROWS, ring.rows = min(ROWS, m - ring.first_row), ring.box_rows = ALONE ? 1 : min(ROWS, m), ring.k = k, ring.x_stride = x_stride;
  ring.weights = weights, ring.source = x, ring.map = &x_map, ring.visits = visits;
  const u32 zero = shared_address(zeros + warp);
#if __CUDA_ARCH__ >= 900
  ring.elected = elect() && sharer == 0;
#endif
  if (lane == 0) {
    zeros[warp] = make_uint4(0, 0, 0, 0);
#if __CUDA_ARCH__ >= 900
    for (int i = team; i < SLOTS && sharer == 0; i += TEAMS) barrier_init(ring.full + 8 * i, 1);
    barrier_init_done();
#endif
  }
  auto meet_team = [&] {
    if constexpr (SHARERS == 1) __syncwarp();
    else meet(1 + team, SHARERS * 32);
  };
  meet_team();

  if (!ROUTED) let_next_start();
  ring.fill<false>(team);
#if __CUDA_ARCH__ >= 900
  if (ring.elected) prefetch_map(&x_map);
#endif
  wait_for_previous();  // weights do not depend on the kernel before this one; x may
  if (ROUTED) let_next_start();  // not before: the kernel behind this one reads the table without waiting for it
  bool more = ring.fill<true>(team);
#ifdef NORMED
  norm.find_factors<Y_ROWS, WARPS>(row_factors, ring.first_row, ring.rows, k, warp, lane, blockIdx.x == 0);
#endif

  // The teams' sums side by side, [TEAMS][Y_ROWS][LINE]: behind the ring, or in its place if there is no other pass.
  constexpr int LINE = WIDTH + 4;  // two of them are 8 banks apart
  float* sums = (float*)(gridDim.x >= count ? shared : shared + SLOTS * (X_BYTES + W_BYTES));
  float* scales = sums + TEAMS * Y_ROWS * LINE;
  int next = team, slot = team;  // the brick, counted through all passes, and the slot that this team takes next
  u32 parity = 0;
  int end = bricks;  // of this pass
  for (int pass = blockIdx.x; pass < count; pass += gridDim.x, end += bricks) {
    const Part part_of_y = ring.part(pass);
    const int first_course = part_of_y.place * COURSES, first_row = part_of_y.row, rows = part_of_y.end - first_row;
    const int column = first_course * 16 + threadIdx.x, of_expert = ROUTED ? part_of_y.expert * n : 0;
    float scale_of_column = 1;
    Bias bias_of_column = 0;
    if (threadIdx.x < WIDTH && column < n) scale_of_column = row_scale[of_expert + column], bias_of_column = load_bias(bias, of_expert + bias_at(column, n));
#ifdef RESIDUAL
    // A thread's numbers of y: where they are, and what comes from memory, on its way while codes are multiplied.
    constexpr int EACH = (WIDTH * Y_ROWS + WARPS * 32 - 1) / (WARPS * 32);
    float before[EACH], norm_weight[EACH], power[EACH];
    auto row_of = [](int e) { return (int)(e * WARPS * 32 + threadIdx.x) / WIDTH; };
    const int own = threadIdx.x % WIDTH, out_column = first_course * 16 + own;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      if (row_of(e) >= rows || out_column >= n) continue;
      const size_t row = first_row + row_of(e);
      before[e] = norm.hidden[row * n + out_column], norm_weight[e] = __ldg(norm.weight + out_column), power[e] = norm.factors[row].x;
    }
#endif
    float sum[MINE][COLUMNS][4] = {};
    while (next < end) {
      ring.wait(slot, parity);
      const u32 bricks_here = ring.w + slot * W_BYTES + sharer * MINE * Brick::bytes, x_here = ring.x + slot * X_BYTES + (lane & 7) % DIFFERENT * 128;
      u32 b[COLUMNS][4];
      auto load_x = [&](int kt) {  // of two fragments
#pragma unroll
        for (int mt = 0; mt < COLUMNS; mt++) {
          u32 from = x_here + (kt / 4 * X_ROWS + mt * 8) * 128 + ((kt % 4 * 2 + (lane >> 3) ^ (lane & 7) % DIFFERENT) << 4);
          if (COPIES > 1 && (lane & 7) / ROWS != (lane < 16 ? copy_of(kt) : copy_of(kt + 1))) from = zero;
          load_matrices(b[mt], from);
        }
      };
#pragma unroll
      for (int section = 0; section < SECTIONS; section++) {
        constexpr int AT_ONCE = FRAGMENTS * Element::words < 4 ? FRAGMENTS * Element::words : 4;  // words of codes
        u32 codes[MINE][AT_ONCE];
        float part[MINE][COLUMNS][4], x_sum[COLUMNS][4] = {};
        auto add_x = [&](int kt) {
          const u32 units[4] = {Element::units_low, Element::units_high, Element::units_low, Element::units_high};
#pragma unroll
          for (int mt = 0; mt < COLUMNS; mt++) TYPE::mma(x_sum[mt], units, b[mt][kt % 2 * 2], b[mt][kt % 2 * 2 + 1]);
        };
        // A lane's two columns are of the same group, but for one row of x, where they are of neighbours.
        constexpr bool TWO = ROWS == 1 && GROUPS > 1;
        const int group = (section * COPIES + (COPIES > 1 ? 2 * c / ROWS : 0)) % GROUPS;
        uint2 scales_here[MINE][1 + TWO], offsets_here[MINE][1 + TWO];  // on their way while codes are multiplied
#pragma unroll
        for (int t = 0; t < MINE; t++)
#pragma unroll
          for (int i = 0; i < 1 + TWO; i++) {
            scales_here[t][i] = Brick::stored_scale(bricks_here + t * Brick::bytes, g, group + i);
            if constexpr (OFFSET != NONE) offsets_here[t][i] = Brick::stored_offset(bricks_here + t * Brick::bytes, g, group + i);
          }
        if constexpr (FIRST) {
          if (section * FRAGMENTS % 2 == 0) load_x(section * FRAGMENTS);
#pragma unroll
          for (int j = 0; j < FRAGMENTS && SUMMED; j++) add_x(section * FRAGMENTS + j);
        }
#pragma unroll
        for (int j = 0; j < FRAGMENTS; j++) {
          const int kt = section * FRAGMENTS + j, word = kt * Element::words % AT_ONCE;
          if (!FIRST && kt % 2 == 0) load_x(kt);
          if (!FIRST && SUMMED) add_x(kt);
#pragma unroll
          for (int t = 0; t < MINE; t++) {
            if (word == 0) Brick::codes(codes[t], bricks_here + t * Brick::bytes, kt * Element::words, lane);
            u32 a[4];
            if constexpr (PLAIN) Element::decode_plain(codes[t] + word, a);
            else Element::decode(codes[t] + word, a);
            if constexpr (PRESCALED) {
              u32 scale = Brick::scale_pair<SCALE>(scales_here[t][0]);
              if constexpr (!TYPE::is_half) scale = TYPE::mul2(scale, 0x76807680);  // 2^110
#pragma unroll
              for (int p = 0; p < 4; p++) a[p] = TYPE::mul2(a[p], twice(scale, p & 1));
            }
#pragma unroll
            for (int mt = 0; mt < COLUMNS; mt++) {
#pragma unroll
              for (int i = 0; i < 4 && j == 0; i++) part[t][mt][i] = FIRST && ZERO_POINT != 0 ? -ZERO_POINT * x_sum[mt][i] : 0;
              TYPE::mma(PRESCALED ? sum[t][mt] : part[t][mt], a, b[mt][kt % 2 * 2], b[mt][kt % 2 * 2 + 1]);
            }
          }
        }
#pragma unroll
        for (int t = 0; t < MINE && !PRESCALED; t++) {
          float2 s[2], o[2];
#pragma unroll
          for (int i = 0; i < 2; i++) {
            s[i] = SCALE::decode(scales_here[t][i & TWO].x, scales_here[t][i & TWO].y);
            if constexpr (OFFSET != NONE) o[i] = Brick::decode_offset(offsets_here[t][i & TWO]);
          }
#pragma unroll
          for (int mt = 0; mt < COLUMNS; mt++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
              const float scale = i < 2 ? s[i & 1].x : s[i & 1].y, offset = i < 2 ? o[i & 1].x : o[i & 1].y;
              float centered = part[t][mt][i];
              if constexpr (!FIRST && ZERO_POINT != 0) centered -= ZERO_POINT * x_sum[mt][i];
              if constexpr (OFFSET == ZERO) centered -= offset * x_sum[mt][i];
              sum[t][mt][i] += centered * scale;
              if constexpr (OFFSET == MINIMUM) sum[t][mt][i] += offset * x_sum[mt][i];
            }
        }
      }
      meet_team();  // all have read this slot
      if (more) {
        ring.fetch_weights(slot);
        ring.fetch_x(slot);
        more = ring.advance(TEAMS);
      }
      ring.commit();
      next += TEAMS, slot += TEAMS;
      if (slot >= SLOTS) slot = team, parity ^= 1;
    }

    if constexpr (COPIES > 1) {  // a row's columns, of which a lane has one or two, and others the rest
#pragma unroll
      for (int t = 0; t < MINE; t++)
#pragma unroll
        for (int i = 0; i < 4; i += ROWS == 1 ? 2 : 1) {
          float& v = sum[t][0][i];
          if (ROWS == 1) v += sum[t][0][i + 1];
          if (ROWS <= 2) v += __shfl_xor_sync(0xffffffff, v, 1);
          v += __shfl_xor_sync(0xffffffff, v, 2);
        }
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < MINE; t++)
#pragma unroll
      for (int mt = 0; mt < COLUMNS; mt++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int row = mt * 8 + 2 * c + (i & 1);
          if (row < Y_ROWS) sums[(team * Y_ROWS + row) * LINE + (sharer * MINE + t) * 16 + g + (i >> 1) * 8] = sum[t][mt][i];
        }
    if (threadIdx.x < WIDTH) scales[threadIdx.x] = scale_of_column, scales[WIDTH + threadIdx.x] = bias_value(bias_of_column);
    __syncthreads();
    if constexpr (SHARERS > 1) __syncthreads();  // for racecheck, which takes the team's barrier for one of these; it is no slower
    auto finished = [&](int row, int column) {
      float v = 0;
#pragma unroll
      for (int s = 0; s < TEAMS; s++) v += sums[(s * Y_ROWS + row) * LINE + column];
      const float unit = (column & 8 ? 1 / UNIT_HIGH : 1 / UNIT_LOW) * (1 / SCALE::raw);
      v = v * unit * scales[column];
#ifdef NORMED
      v *= row_factors[row];
#endif
      return activate(v + scales[WIDTH + column]);
    };
#ifdef RESIDUAL
    static_assert(WARPS * 32 % WIDTH == 0 && !GATED && !ROUTED, "a thread's numbers are of one column");
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const bool any = row_of(e) < rows && out_column < n;
      const size_t row = first_row + row_of(e);
      const float to = FoldedNorm::power(power[e]), v = any ? before[e] + norm.scale * finished(row_of(e), own) : 0;
      float squares = v * v;
#pragma unroll
      for (int d = SQUARED / 2; d; d >>= 1) squares += __shfl_xor_sync(0xffffffff, squares, d);
      if (!any) continue;
      norm.hidden[row * n + out_column] = v;
      put(y, row * n + out_column, v * norm_weight[e] * to);
      if (lane % SQUARED == 0) norm.squares[row * (n / SQUARED) + out_column / SQUARED] = squares;
      if (out_column == 0) norm.factors[row].y = 1 / to;
    }
#else
    constexpr int OUT_WIDTH = WIDTH >> GATED;
    for (int i = threadIdx.x; i < OUT_WIDTH * rows; i += WARPS * 32) {
      const int column = i % OUT_WIDTH, row = i / OUT_WIDTH, out = (first_course * 16 >> GATED) + column;
      if (out >= n >> GATED) continue;
      const int from = GATED ? (column & ~7) * 2 + (column & 7) : column;
      const float v = GATED ? pass_gate(finished(row, from), finished(row, from + 8)) : finished(row, column);
      const size_t to_row = ROUTED ? visits.out(first_row + row) : first_row + row;
      put(y, to_row * (n >> GATED) + out, v);
    }
#endif
  }
}

#ifdef EXPERTS
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
marlin_experts_small(const __grid_constant__ TensorMap x_map, const u8* __restrict__ weights, const float* __restrict__ row_scale, const u16* __restrict__ x,
                     const void* __restrict__ bias, Output* __restrict__ y, const int4* table, const int* order, int m, int n, int k, int x_stride) {
  multiply(x_map, weights, row_scale, x, bias, y, {table, order}, {}, m, n, k, x_stride);
}
#elif defined(RESIDUAL) || defined(NORMED)
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
marlin_gemm_small_normed(const __grid_constant__ TensorMap x_map, const u8* __restrict__ weights, const float* __restrict__ row_scale, const u16* __restrict__ x,
                         const void* __restrict__ bias, Output* __restrict__ y, int m, int n, int k, int x_stride, float* hidden, const float* norm_weight, float* squares,
                         float2* factors, float epsilon, float scale) {
  multiply(x_map, weights, row_scale, x, bias, y, {}, {hidden, norm_weight, squares, factors, epsilon, scale}, m, n, k, x_stride);
}
#else
extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
marlin_gemm_small(const __grid_constant__ TensorMap x_map, const u8* __restrict__ weights, const float* __restrict__ row_scale,
                  const u16* __restrict__ x, const void* __restrict__ bias, Output* __restrict__ y, int m, int n, int k, int x_stride) {
  multiply(x_map, weights, row_scale, x, bias, y, {}, {}, m, n, k, x_stride);
}
#endif
