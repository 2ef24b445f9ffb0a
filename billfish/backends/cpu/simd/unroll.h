// Loops that are gone when the compiler is through, because each step needs its own instructions or registers.
#pragma once
#include <type_traits>
#include <utility>

namespace BILLFISH_ISA {

// For the lambdas of kernels: gcc sometimes leaves one out of line, and with it all the sums that should be in registers.
#define INLINED __attribute__((always_inline))

template <class F, int... I> inline __attribute__((always_inline)) void unroll_over(F&& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
// f(0), f(1), ... f(N - 1), with the index as a compile-time constant.
template <int N, class F> inline __attribute__((always_inline)) void unroll(F&& f) {
  unroll_over(f, std::make_integer_sequence<int, N>{});
}

}  // namespace BILLFISH_ISA
