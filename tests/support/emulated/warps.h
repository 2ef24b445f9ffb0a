// Threads of a CTA that meet, on a CPU: each is a thread of the system. Included behind ptx.h, by kernels that talk between lanes.
#pragma once
#include <pthread.h>

#include <thread>
#include <vector>

namespace warps {
struct Warp {
  pthread_barrier_t barrier;
  int values[32];
};
static pthread_barrier_t cta;
static std::vector<Warp> all;

inline Warp& mine() { return all[threadIdx.x / 32]; }
inline void meet_warp() { pthread_barrier_wait(&mine().barrier); }
inline void meet_cta() { pthread_barrier_wait(&cta); }
// What each lane puts in, as `use` sees all 32 of them.
template <class Use> auto exchanged(int value, Use use) {
  mine().values[threadIdx.x % 32] = value;
  meet_warp();
  const auto result = use(mine().values);
  meet_warp();
  return result;
}
inline uint32_t match(uint32_t, int value) {
  return exchanged(value, [=](const int* values) {
    uint32_t same = 0;
    for (int i = 0; i < 32; i++) same |= uint32_t(values[i] == value) << i;
    return same;
  });
}
template <class T> T shuffle(uint32_t, T value, int lane) {  // of 32 bits
  int bits;
  std::memcpy(&bits, &value, 4);
  bits = exchanged(bits, [=](const int* values) { return values[lane]; });
  std::memcpy(&value, &bits, 4);
  return value;
}
inline int shuffle_up(uint32_t mask, int value, int by) {
  const int lane = threadIdx.x % 32;
  return shuffle(mask, value, lane < by ? lane : lane - by);
}
template <class T> T shuffle_xor(uint32_t mask, T value, int by) { return shuffle(mask, value, threadIdx.x % 32 ^ by); }
inline uint32_t largest(uint32_t, uint32_t value) {
  return exchanged(int(value), [](const int* values) { return *std::max_element((const uint32_t*)values, (const uint32_t*)values + 32); });
}
inline uint32_t least(uint32_t, uint32_t value) {
  return exchanged(int(value), [](const int* values) { return *std::min_element((const uint32_t*)values, (const uint32_t*)values + 32); });
}

// One CTA.
template <class Kernel> void launch(int threads, Kernel kernel) {
  all = std::vector<Warp>(threads / 32);
  pthread_barrier_init(&cta, nullptr, threads);
  for (Warp& warp : all) pthread_barrier_init(&warp.barrier, nullptr, 32);
  std::vector<std::thread> running;
  for (int i = 0; i < threads; i++)
    running.emplace_back([=] {
      threadIdx = {i}, blockIdx = {0}, blockDim = {threads};
      kernel();
    });
  for (std::thread& thread : running) thread.join();
}
}  // namespace warps

#define __syncthreads warps::meet_cta
#define __syncwarp warps::meet_warp
#define __match_any_sync warps::match
#define __shfl_sync warps::shuffle
#define __shfl_up_sync warps::shuffle_up
#define __shfl_xor_sync warps::shuffle_xor
#define __reduce_max_sync warps::largest
#define __reduce_min_sync warps::least
#define __popc __builtin_popcount
#define __launch_bounds__(...)
