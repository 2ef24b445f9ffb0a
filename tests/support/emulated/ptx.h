// The words of CUDA and the instructions of PTX that decode.cuh, dequantize.cu, pack.cu and unpack.cu use, on a CPU: to run these files
// anywhere.
// tests/support/cuda_on_cpu.py turns `asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c))` into ptx::fma_rn_f16x2(r, a, b, c).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __device__
#define __forceinline__ inline
#define __global__ static
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Index { int x, y, z; };
static thread_local Index threadIdx, blockIdx, blockDim;

inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float __uint_as_float(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, int shift) { return high << shift | low >> (32 - shift); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, int shift) { return low >> shift | high << (32 - shift); }
template <class T> T __ldg(const T* p) { return *p; }
using std::min;
inline void __syncwarp() {}

// All threads of all CTAs, one after the other. A thread that needs what others of its CTA put into shared memory finds it there
// when it runs again: so each CTA runs once more than it has barriers. These kernels put the same there every time.
template <class Kernel> void launch(int ctas, int threads, int barriers, Kernel kernel) {
  blockDim = {threads};
  for (blockIdx.x = 0; blockIdx.x < ctas; blockIdx.x++)
    for (int turn = 0; turn <= barriers; turn++)
      for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) kernel();
}

// Addresses in shared memory are 32 bits: how far they are from here.
static uint4 shared_origin;
inline uint64_t __cvta_generic_to_shared(const void* p) { return (const char*)p - (const char*)&shared_origin; }

// Kernels are made of hundreds of these: as calls, or they take long to compile.
#define EMULATED __attribute__((noinline)) inline

namespace ptx {
[[noreturn]] inline void not_emulated() { std::abort(); }

// ---- bits

EMULATED void lop3_b32(uint32_t& d, uint32_t a, uint32_t b, uint32_t c, int table) {
  d = 0;
  for (int i = 0; i < 32; i++) d |= uint32_t(table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i;
}
EMULATED void prmt_b32(uint32_t& d, uint32_t a, uint32_t b, uint32_t select) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  d = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t choice = select >> (4 * i) & 15, byte = bytes >> (8 * (choice & 7)) & 255;
    d |= (choice < 8 ? byte : byte & 128 ? 255 : 0) << (8 * i);  // bit 3: the sign of that byte, eight times
  }
}
EMULATED void max_u16x2(uint32_t& d, uint32_t a, uint32_t b) {
  d = std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
}
EMULATED void brev_b32(uint32_t& d, uint32_t a) {
  d = 0;
  for (int i = 0; i < 32; i++) d |= (a >> i & 1) << (31 - i);
}
EMULATED void vabsdiff4_u32_u32_u32(uint32_t& d, uint32_t a, uint32_t b, uint32_t) {
  d = 0;
  for (int i = 0; i < 32; i += 8) d |= uint32_t(std::abs(int(a >> i & 255) - int(b >> i & 255))) << i;
}
EMULATED void pack_b32(uint32_t& d, uint16_t low, uint16_t high) { d = uint32_t(high) << 16 | low; }
EMULATED void unpack_b32(uint16_t& low, uint16_t& high, uint32_t a) { low = a, high = a >> 16; }

// ---- numbers of 16 bits, MANTISSA of them the mantissa: 10 is float16, 7 bfloat16. Each is a double, and so is a product of two.

template <int MANTISSA> EMULATED double number(uint16_t bits) {
  constexpr int SMALLEST = 2 - (1 << (14 - MANTISSA)), SPECIAL = (1 << (15 - MANTISSA)) - 1;  // exponents
  const int exponent = bits >> MANTISSA & SPECIAL, mantissa = bits & ((1 << MANTISSA) - 1);
  double size = exponent == 0 ? std::ldexp(mantissa, SMALLEST - MANTISSA)
                              : std::ldexp(mantissa + (1 << MANTISSA), exponent - 1 + SMALLEST - MANTISSA);
  if (exponent == SPECIAL) size = mantissa ? NAN : INFINITY;
  return bits >> 15 ? -size : size;
}
template <int MANTISSA> EMULATED uint16_t rounded(double v) {
  constexpr int SMALLEST = 2 - (1 << (14 - MANTISSA)), SPECIAL = (1 << (15 - MANTISSA)) - 1;
  const uint16_t sign = std::signbit(v) << 15, infinity = SPECIAL << MANTISSA;
  if (std::isnan(v)) return infinity | 1;
  if (std::isinf(v)) return sign | infinity;
  const int exponent = std::max(v == 0 ? SMALLEST : std::ilogb(v), SMALLEST);
  const int steps = int(std::nearbyint(std::ldexp(std::fabs(v), MANTISSA - exponent)));  // ties to even
  // The mantissa's first bit, which is not stored, or a carry, adds one to the exponent.
  return sign | uint16_t(std::min(((exponent - SMALLEST) << MANTISSA) + steps, int(infinity)));
}
// a + b, with the last bit set where it was not exact: rounded again, that is as if it had been rounded once.
EMULATED double to_odd(double a, double b) {
  const double sum = a + b, back = sum - a, error = (a - (sum - back)) + (b - back);
  uint64_t bits;
  std::memcpy(&bits, &sum, 8);
  if (!(error == 0) && std::isfinite(error) && bits % 2 == 0) bits += (error > 0) == (sum > 0) ? 1 : -1;
  double odd;
  std::memcpy(&odd, &bits, 8);
  return odd;
}
template <int MANTISSA, class F> void pairs(uint32_t& d, F of_half) {
  d = uint32_t(rounded<MANTISSA>(of_half(16))) << 16 | rounded<MANTISSA>(of_half(0));
}
template <int MANTISSA> EMULATED void fma2(uint32_t& d, uint32_t a, uint32_t b, uint32_t c) {
  const auto of = [](uint32_t pair, int half) { return number<MANTISSA>(pair >> half); };
  pairs<MANTISSA>(d, [&](int half) { return to_odd(of(a, half) * of(b, half), of(c, half)); });
}
EMULATED void fma_rn_f16x2(uint32_t& d, uint32_t a, uint32_t b, uint32_t c) { fma2<10>(d, a, b, c); }
EMULATED void fma_rn_bf16x2(uint32_t& d, uint32_t a, uint32_t b, uint32_t c) { fma2<7>(d, a, b, c); }
EMULATED void mul_rn_f16x2(uint32_t& d, uint32_t a, uint32_t b) { fma2<10>(d, a, b, 0x80008000); }  // -0 changes nothing
EMULATED void add_rn_f16x2(uint32_t& d, uint32_t a, uint32_t b) { fma2<10>(d, a, 0x3c003c00, b); }
EMULATED void cvt_rn_f16x2_f32(uint32_t& d, float high, float low) { pairs<10>(d, [&](int half) { return half ? high : low; }); }
EMULATED void cvt_rn_satfinite_f16x2_f32(uint32_t& d, float high, float low) {
  const auto finite = [](float v) { return v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v; };
  cvt_rn_f16x2_f32(d, finite(high), finite(low));
}
EMULATED void cvt_rn_bf16x2_f32(uint32_t& d, float high, float low) { pairs<7>(d, [&](int half) { return half ? high : low; }); }
// Nearest E4M3, ties to even; what is too large becomes 448.
EMULATED uint8_t to_e4m3(float v) {
  if (std::isnan(v)) return 0x7f;
  const int exponent = std::max(v == 0 ? -6 : std::ilogb(v), -6);
  const int steps = int(std::nearbyint(std::ldexp(std::fabs(v), 3 - std::min(exponent, 9))));
  return (std::signbit(v) << 7) | std::min(((exponent + 6) << 3) + steps, 0x7e);
}
EMULATED void cvt_rn_satfinite_e4m3x2_f32(uint16_t& d, float high, float low) { d = uint16_t(to_e4m3(high) << 8 | to_e4m3(low)); }
EMULATED void cvt_rn_f16x2_e4m3x2(uint32_t& d, uint16_t codes) {
  pairs<10>(d, [&](int half) {
    const int code = codes >> half / 2, exponent = code >> 3 & 15, mantissa = code & 7;
    const double size = (code & 0x7f) == 0x7f ? NAN : exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return code & 0x80 ? -size : size;
  });
}
EMULATED void cvt_f32_f16(float& d, uint16_t a) { d = float(number<10>(a)); }

EMULATED void ex2_approx_ftz_f32(float& d, float v) { d = std::exp2(v); }
EMULATED void rcp_approx_ftz_f32(float& d, float v) { d = 1 / v; }

// ---- shared memory

inline const uint32_t* shared(uint32_t address) { return (const uint32_t*)((const char*)&shared_origin + int32_t(address)); }
EMULATED void ld_shared_u32(uint32_t& x, uint32_t address) { x = *shared(address); }
EMULATED void ld_shared_v2_u32(uint32_t& x, uint32_t& y, uint32_t address) { x = shared(address)[0], y = shared(address)[1]; }
EMULATED void ld_shared_v4_u32(uint32_t& x, uint32_t& y, uint32_t& z, uint32_t& w, uint32_t address) {
  const uint32_t* from = shared(address);
  x = from[0], y = from[1], z = from[2], w = from[3];
}
EMULATED void st_shared_u32(uint32_t address, uint32_t v) { *(uint32_t*)shared(address) = v; }
EMULATED void st_shared_v4_f32(uint32_t address, float x, float y, float z, float w) {
  float* to = (float*)shared(address);
  to[0] = x, to[1] = y, to[2] = z, to[3] = w;
}
}  // namespace ptx
