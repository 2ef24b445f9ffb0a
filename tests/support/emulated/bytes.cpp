// bytes.cuh for every kind of bytes, and quantize_rows.cu, on the CPU: tests/backends/cuda/test_bytes.py. Threads of quantize_rows.cu run as threads
// that meet.
#include "ptx.h"

#include <numeric>

inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
using std::max;

#define OFFSET NONE
#define TYPE F16
// All words of all bricks to bytes: 32 k at a time, four registers of each lane.
#define EXPORT(NAME)                                                                                              \
  extern "C" void NAME(const uint8_t* bricks, uint32_t (*a)[4], int count) {                                      \
    using namespace NAME##_kind;                                                                                  \
    alignas(16) static uint8_t brick[4096];                                                                       \
    for (int i = 0; i < count; i++) {                                                                             \
      std::memcpy(brick, bricks + i * Brick::bytes, Brick::bytes);                                                \
      const u32 at = shared_address(brick);                                                                       \
      for (int lane = 0; lane < 32; lane++)                                                                       \
        for (int step = 0; step < 4; step++) {                                                                    \
          Load load;                                                                                              \
          load.fetch(at + lane * 16, at + (lane >> 2) * 4 * Brick::group_words, step / 2);                        \
          load.decode(step % 2, a[(i * 32 + lane) * 4 + step]);                                                   \
        }                                                                                                         \
    }                                                                                                             \
  }                                                                                                               \
  extern "C" float NAME##_reduced() { return NAME##_kind::REDUCED; }

#define ELEMENT Int4
#define SCALE ScaleF16
#define GROUPS 1
#define BYTES FP8
namespace int4_fp8_kind {
#include "bytes.cuh"
}
EXPORT(int4_fp8)
#undef BYTES
#define BYTES INT8
namespace int4_int8_kind {
#include "bytes.cuh"
}
EXPORT(int4_int8)
#undef BYTES
#undef ELEMENT
#define ELEMENT E2M1
#define BYTES FP8
namespace e2m1_fp8_kind {
#include "bytes.cuh"
}
EXPORT(e2m1_fp8)
#undef SCALE
#undef GROUPS
#define SCALE ScaleE5M2
#define GROUPS 4
namespace e2m1_folded_kind {
#include "bytes.cuh"
}
EXPORT(e2m1_folded)

static Index gridDim;
inline int __float2int_rn(float v) { return int(std::nearbyint(v)); }
#include "warps.h"
inline uint32_t largest_of_warp(uint32_t, uint32_t value) {
  return warps::exchanged(int(value), [](const int* values) { return uint32_t(*std::max_element(values, values + 32)); });
}
inline int sum_of_warp(uint32_t, int value) {
  return warps::exchanged(value, [](const int* values) { return std::accumulate(values, values + 32, 0); });
}
inline float shuffle_xor(uint32_t, float value, int by) {
  int bits;
  std::memcpy(&bits, &value, 4);
  return __uint_as_float(warps::exchanged(bits, [=](const int* values) { return values[threadIdx.x % 32 ^ by]; }));
}
#define __reduce_max_sync largest_of_warp
#define __reduce_add_sync sum_of_warp
#define __shfl_xor_sync shuffle_xor
#define __int_as_float __uint_as_float
inline uint32_t atomicOr(uint32_t* to, uint32_t bits) { return __atomic_fetch_or(to, bits, __ATOMIC_SEQ_CST); }
#define THREADS 64
#define HELD 2
#define STEEPNESS 1
#define INTEGERS 0
namespace fp8 {
#include "quantize_rows.cu"
}
#undef INTEGERS
#undef STEEPNESS
#define INTEGERS 1
#define STEEPNESS 0
namespace int8 {
#include "quantize_rows.cu"
}
#undef TYPE
#define TYPE BF16
namespace int8_of_bfloat16 {
#include "quantize_rows.cu"
}

// One CTA a row.
#define EXPORT_ROWS(NAME)                                                                                         \
  extern "C" void quantize_##NAME(const uint16_t* x, uint8_t* bytes, int m, int k, int x_stride, int stride) {    \
    gridDim = {m};                                                                                                \
    for (int row = 0; row < m; row++)                                                                             \
      warps::launch(THREADS, [=] {                                                                                \
        blockIdx = {row};                                                                                         \
        NAME::marlin_quantize_rows(x, bytes, k, x_stride, stride);                                                \
      });                                                                                                         \
  }
EXPORT_ROWS(fp8)
EXPORT_ROWS(int8)
EXPORT_ROWS(int8_of_bfloat16)
