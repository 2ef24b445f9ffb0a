// What the machine can do at most, measured with the same instructions as the kernels: the yardstick of `python -m benchmarks.products`.
#pragma once
#include "gemm/decode.h"

namespace BILLFISH_ISA {

// Reads all bytes once; the result depends on each of them, so that no load can be left out.
inline uint8_t read_all(const uint8_t* p, int64_t vectors) {
  Bytes a = splat_byte(0), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 4 <= vectors; i += 4, p += 4 * VECTOR_BYTES) {
    __builtin_prefetch(p + 1024);
    a = bit_or(a, load_bytes(p)), b = bit_or(b, load_bytes(p + VECTOR_BYTES));
    c = bit_or(c, load_bytes(p + 2 * VECTOR_BYTES)), d = bit_or(d, load_bytes(p + 3 * VECTOR_BYTES));
  }
  for (; i < vectors; i++, p += VECTOR_BYTES) a = bit_or(a, load_bytes(p));
  uint8_t all[VECTOR_BYTES], result = 0;
  store_bytes(all, bit_or(bit_or(a, b), bit_or(c, d)));
  for (uint8_t x : all) result |= x;
  return result;
}

// Independent sums, with four dot products each per round: enough to fill two pipes for 5 cycles, few enough for 16 registers.
constexpr int RATE_SUMS = 12;

inline float dot_rounds(int64_t rounds) {
  alignas(64) uint8_t w_bytes[VECTOR_BYTES] = {3, 1, 2};
  alignas(64) int8_t x_bytes[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  Ints sum[RATE_SUMS];
  unroll<RATE_SUMS>([&](auto i) { sum[i] = splat_int(i); });
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : : "r"(w_bytes), "r"(x_bytes) : "memory");  // they might have changed: nothing may leave the loop
    const Bytes w = load_bytes(w_bytes);
    const Activations x = load_activations(x_bytes);
    unroll<4>([&](auto q) {
      unroll<RATE_SUMS>([&](auto i) { sum[i] = dot<decltype(q)::value, Operand::below_16>(sum[i], w, x); });
    });
  }
  Floats total = splat(0);
  unroll<RATE_SUMS>([&](auto i) { total = add(total, to_floats(sum[i])); });
  float out[LANES];
  store_floats(out, total);
  return out[0];
}
constexpr double DOT_OPERATIONS = 4.0 * RATE_SUMS * 2 * VECTOR_BYTES;  // in each round

inline float fma_rounds(int64_t rounds) {
  alignas(64) float w_floats[LANES] = {1e-30f}, x_floats[4] = {1.0f, 0.5f, 0.25f, 0.125f};
  Floats sum[RATE_SUMS];
  unroll<RATE_SUMS>([&](auto i) { sum[i] = splat(float(int(i))); });
  for (int64_t r = 0; r < rounds; r++) {
    asm volatile("" : : "r"(w_floats), "r"(x_floats) : "memory");
    const Floats w = load_floats(w_floats);
    const FloatActivations x = load_x(x_floats);
    unroll<4>([&](auto q) {
      unroll<RATE_SUMS>([&](auto i) { sum[i] = multiply_add_x<decltype(q)::value>(sum[i], w, x); });
    });
  }
  Floats total = splat(0);
  unroll<RATE_SUMS>([&](auto i) { total = add(total, sum[i]); });
  float out[LANES];
  store_floats(out, total);
  return out[0];
}
constexpr double FMA_OPERATIONS = 4.0 * RATE_SUMS * 2 * LANES;  // in each round

}  // namespace BILLFISH_ISA
