// CTAs on a CPU, each of whose threads is a fiber: one runs until it meets others, then the next. All instructions of warps are here, as operands of the
// tensor cores lie over lanes. Included behind ptx.h, by kernels of any grid.
#pragma once
#include <ucontext.h>

#include <cstdio>

#include <memory>
#include <vector>

struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint32_t __float_as_uint(float v) { uint32_t bits; std::memcpy(&bits, &v, 4); return bits; }
inline float __int_as_float(int bits) { return __uint_as_float((uint32_t)bits); }
static Index gridDim;
inline float rsqrtf(float v) { return 1 / std::sqrt(v); }
using std::max;
#define __launch_bounds__(...)
#define __grid_constant__

namespace fibers {
constexpr size_t STACK = 1 << 17;
enum Waiting { NOTHING, WARP, CTA, DONE };
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Waiting waiting;
};
static std::vector<Fiber> all;
static ucontext_t scheduler;
static void (*entry)(void*);
static void* argument;
static uint64_t values[32][32];  // of warps and lanes
alignas(1024) static uint8_t dynamic[232448];

inline void wait(Waiting what) {
  Fiber& own = all[threadIdx.x];
  own.waiting = what;
  swapcontext(&own.context, &scheduler);
}
inline void start() {
  entry(argument);
  wait(DONE);
}
// One CTA, all its threads at once.
inline void run_cta(int threads) {
  all.resize(threads);
  for (Fiber& fiber : all) {
    if (!fiber.stack) fiber.stack.reset(new char[STACK]);
    fiber.waiting = NOTHING;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = STACK, fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, start, 0);
  }
  std::memset(dynamic, 0xff, sizeof(dynamic));  // NaN: nothing may be read before it is written
  for (bool any = true; any;) {
    any = false;
    for (int i = 0; i < threads; i++)
      if (all[i].waiting == NOTHING) {
        any = true, threadIdx.x = i;
        swapcontext(&scheduler, &all[i].context);
      }
    const auto release = [&](int first, int last, Waiting what) {  // where all that run have come
      bool arrived = true, some = false;
      for (int i = first; i < last; i++) arrived &= all[i].waiting == what || all[i].waiting == DONE, some |= all[i].waiting == what;
      if (!arrived || !some) return;
      any = true;
      for (int i = first; i < last; i++)
        if (all[i].waiting == what) all[i].waiting = NOTHING;
    };
    for (int warp = 0; warp < threads; warp += 32) release(warp, warp + 32, WARP);
    release(0, threads, CTA);
  }
  for (const Fiber& fiber : all)
    if (fiber.waiting != DONE) { std::fprintf(stderr, "threads wait for each other\n"); std::abort(); }
}
// What each lane of a warp puts in, as `use` sees all 32.
template <class T, class Use> auto exchanged(T value, Use use) {
  uint64_t(&own)[32] = values[threadIdx.x / 32];
  std::memcpy(&own[threadIdx.x % 32], &value, sizeof(T));
  wait(WARP);
  const auto result = use([&](int lane) { T of; std::memcpy(&of, &own[lane], sizeof(T)); return of; });
  wait(WARP);
  return result;
}
template <class T> T shuffle(uint32_t, T value, int lane) {
  return exchanged(value, [=](auto of) { return of(lane); });
}
template <class T> T shuffle_xor(uint32_t mask, T value, int by) { return shuffle(mask, value, threadIdx.x % 32 ^ by); }
template <class T> T shuffle_up(uint32_t mask, T value, int by) {
  const int lane = threadIdx.x % 32;
  return shuffle(mask, value, lane < by ? lane : lane - by);
}

// A kernel on its grid, its arguments in slots of 8 bytes.
template <class... A, size_t... I> void call(void (*kernel)(A...), const uint64_t* slots, std::index_sequence<I...>) {
  kernel(*(const std::remove_reference_t<A>*)(slots + I)...);
}
template <class... A> void launch(void (*kernel)(A...), const int* grid, int threads, const uint64_t* slots) {
  struct Call { void (*kernel)(A...); const uint64_t* slots; } both{kernel, slots};
  entry = [](void* p) { call(((Call*)p)->kernel, ((Call*)p)->slots, std::index_sequence_for<A...>()); };
  argument = &both;
  blockDim = {threads, 1, 1}, gridDim = {grid[0], grid[1], grid[2]};
  for (int z = 0; z < grid[2]; z++)
    for (int y = 0; y < grid[1]; y++)
      for (int x = 0; x < grid[0]; x++) {
        blockIdx = {x, y, z};
        run_cta(threads);
      }
}
}  // namespace fibers

#define __syncthreads() fibers::wait(fibers::CTA)
#define __syncwarp() fibers::wait(fibers::WARP)
#define __shfl_sync fibers::shuffle
#define __shfl_xor_sync fibers::shuffle_xor
#define __shfl_up_sync fibers::shuffle_up

namespace ptx {
// ---- copies to shared memory: at once

EMULATED void cp_async_cg_shared_global(uint32_t to, const void* from, int bytes, int valid) {
  char* place = (char*)shared(to);
  if ((uint64_t)place % bytes || (uint64_t)from % bytes) { std::fprintf(stderr, "a copy from %p to %p is not aligned\n", from, (void*)place); std::abort(); }
  std::memset(place, 0, bytes);
  std::memcpy(place, from, valid);
}
EMULATED void cp_async_commit_group() {}
EMULATED void cp_async_wait_group(int) {}

// ---- operands of the tensor cores

template <bool TRANSPOSED> void load_matrices(uint32_t* out, uint32_t address) {
  if ((uint64_t)shared(address) % 16) { std::fprintf(stderr, "a row at %p is not aligned\n", (const void*)shared(address)); std::abort(); }
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  fibers::exchanged(address, [&](auto of) {
    for (int i = 0; i < 4; i++) {
      uint16_t pair[2];
      for (int j = 0; j < 2; j++) {
        const int r = TRANSPOSED ? column + j : row, c = TRANSPOSED ? row : column + j;
        std::memcpy(pair + j, (const char*)shared(of(i * 8 + r)) + c * 2, 2);
      }
      std::memcpy(out + i, pair, 4);
    }
    return 0;
  });
}
EMULATED void ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t address) {
  uint32_t out[4];
  load_matrices<false>(out, address);
  a = out[0], b = out[1], c = out[2], d = out[3];
}
EMULATED void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t address) {
  uint32_t out[4];
  load_matrices<true>(out, address);
  a = out[0], b = out[1], c = out[2], d = out[3];
}
EMULATED void cvt_rna_tf32_f32(uint32_t& d, float v) {
  std::memcpy(&d, &v, 4);
  d = (d + 0x1000) & ~0x1fffu;  // half a step away from zero, then cut
}

struct Operands { uint32_t a[4], b[2]; };
// Sums of WIDTH products for a lane's four places: rows g and g + 8, columns 2 c and 2 c + 1. left(of, row, k) and right(of, k, column) find a number.
template <int WIDTH, class Left, class Right> void multiply(float* sums, const Operands& own, Left left, Right right) {
  static Operands kept[32][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  kept[warp][lane] = own;
  fibers::wait(fibers::WARP);
  for (int e = 0; e < 4; e++) {
    double sum = sums[e];
    for (int k = 0; k < WIDTH; k++) sum += left(kept[warp], g + e / 2 * 8, k) * right(kept[warp], k, 2 * c + e % 2);
    sums[e] = float(sum);
  }
  fibers::wait(fibers::WARP);
}
EMULATED void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, float, float, float, float) {
  float sums[4] = {d0, d1, d2, d3};
  multiply<16>(sums, {{a0, a1, a2, a3}, {b0, b1}},
               [](const Operands* of, int row, int k) { return number<10>(of[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2] >> k % 2 * 16); },
               [](const Operands* of, int k, int column) { return number<10>(of[column * 4 + k % 8 / 2].b[k / 8] >> k % 2 * 16); });
  d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
}
inline double tf32(uint32_t bits) {
  if (bits & 0x1fff) { std::fprintf(stderr, "thread %d: %08x is no TF32 number\n", threadIdx.x, bits); std::abort(); }
  return __uint_as_float(bits);
}
EMULATED void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, float, float, float, float) {
  float sums[4] = {d0, d1, d2, d3};
  multiply<8>(sums, {{a0, a1, a2, a3}, {b0, b1}},
              [](const Operands* of, int row, int k) { return tf32(of[row % 8 * 4 + k % 4].a[row / 8 + k / 4 * 2]); },
              [](const Operands* of, int k, int column) { return tf32(of[column * 4 + k % 4].b[k / 4]); });
  d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
}
}  // namespace ptx
