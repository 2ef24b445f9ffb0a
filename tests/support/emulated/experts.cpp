// The kernels around products with experts, for the CPU: route.cu in threads that meet, the others one thread after the other.
#include "ptx.h"

struct int4 { int x, y, z, w; };
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static Index gridDim;

#define __launch_bounds__(...)
#define TYPE F16
#define ID int
namespace gathering {
#include "gather.cu"
}
#define WEIGHT Float
namespace mixing {
#include "mix.cu"
}
#define GATE SILU
namespace opening {
#include "gate.cu"
}
#undef GATE
#undef __launch_bounds__
#undef __shared__
#define __shared__
#include "warps.h"
#define WARPS 4
namespace routing {
int counts[1 << 16];
#include "route.cu"
}
#undef ID
#define ID long long
namespace routing_wide {
int counts[1 << 16];
#include "route.cu"
}

inline float __int_as_float(int bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline uint32_t __float_as_uint(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }
using std::max, std::min;
namespace choosing {
#include "choose_experts.cuh"
}

// Rows of logits [rows, experts], by one warp after the other. Experts of a lane: 1, or 16.
template <bool BY_SIGMOID, bool TO_ONE, int OWN>
void chosen_by(const float* logits, const choosing::Choosing& how, int rows, int* ids, float* weights) {
  for (int row = 0; row < rows; row++)
    warps::launch(32, [=] {
      float own[OWN];
      const int lane = threadIdx.x;
      for (int i = 0; i < OWN; i++) own[i] = i * 32 + lane < how.experts ? logits[row * how.experts + i * 32 + lane] : -INFINITY;
      choosing::choose_experts<BY_SIGMOID, TO_ONE>(own, how, lane, ids + row * how.chosen, weights + row * how.chosen);
    });
}
extern "C" void choose_experts(const float* logits, const float* selection_bias, const float* expert_scale, int* ids, float* weights, int rows, int experts, int chosen, int groups,
                               int groups_used, float scale, int sigmoid, int renormalized) {
  const choosing::Choosing how{experts, chosen, groups, groups_used, scale, selection_bias, expert_scale};
  const auto run = experts <= 32 ? (sigmoid ? renormalized ? chosen_by<true, true, 1> : chosen_by<true, false, 1> : renormalized ? chosen_by<false, true, 1> : chosen_by<false, false, 1>)
                                 : (sigmoid ? renormalized ? chosen_by<true, true, 16> : chosen_by<true, false, 16> : renormalized ? chosen_by<false, true, 16> : chosen_by<false, false, 16>);
  run(logits, how, rows, ids, weights);
}
extern "C" void route(const int* ids, int4* table, int* order, int visits, int experts, int width) {
  warps::launch(WARPS * 32, [=] { routing::marlin_route(ids, table, order, visits, experts, width); });
}
extern "C" void route_wide(const long long* ids, int4* table, int* order, int visits, int experts, int width) {
  warps::launch(WARPS * 32, [=] { routing_wide::marlin_route(ids, table, order, visits, experts, width); });
}
extern "C" void gather(int ctas, const uint16_t* x, const int4* table, const int* order, uint16_t* out, uint16_t* y, int visits, int k, int x_stride, int out_stride, int together, int n) {
  gridDim = {ctas};
  launch(ctas, 256, 0, [=] { gathering::marlin_gather(x, table, order, out, y, visits, k, x_stride, out_stride, together, n); });
}
extern "C" void gate(int ctas, const uint16_t* gates, const uint16_t* numbers, uint16_t* out, int rows, int columns, int stride) {
  gridDim = {ctas};
  launch(ctas, 256, 0, [=] { opening::marlin_gate(gates, numbers, out, rows, columns, stride); });
}
extern "C" void mix(const uint16_t* x, const int* ids, const float* weights, const uint16_t* shared, uint16_t* y, int tokens, int experts, int chosen, int apart, int n) {
  launch(tokens * ((n + 255) / 256), 32, 0, [=] { mixing::marlin_mix(x, ids, weights, shared, y, experts, chosen, apart, n); });
}
