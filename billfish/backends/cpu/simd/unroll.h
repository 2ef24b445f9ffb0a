// Loops that are gone when the compiler is through, because each step needs its own instructions or registers.
#pragma once
#include <type_traits>
#include <utility>

namespace BILLFISH_ISA {

// For the lambdas of kernels: gcc sometimes leaves one out of line, and with it all the sums that should be in registers.
#define INLINED __attribute__((always_inline))

template <class F, int... I> INLINED inline void unroll_rest(F&& f, std::integer_sequence<int, I...>) { (f(std::integral_constant<int, I + 8>{}), ...); }

// f(0), f(1), ... f(N - 1), with the index as a type, so that templates can have it. The compiler takes each step, and each step of what is nested in
// it, for a function of its own, which costs most of its time: repeat() has one for all steps. The first steps are written out because one
// function more for each loop costs a tenth.
template <int N, class F> INLINED inline void unroll(F&& f) {
  if constexpr (N > 0) f(std::integral_constant<int, 0>{});
  if constexpr (N > 1) f(std::integral_constant<int, 1>{});
  if constexpr (N > 2) f(std::integral_constant<int, 2>{});
  if constexpr (N > 3) f(std::integral_constant<int, 3>{});
  if constexpr (N > 4) f(std::integral_constant<int, 4>{});
  if constexpr (N > 5) f(std::integral_constant<int, 5>{});
  if constexpr (N > 6) f(std::integral_constant<int, 6>{});
  if constexpr (N > 7) f(std::integral_constant<int, 7>{});
  if constexpr (N > 8) unroll_rest(f, std::make_integer_sequence<int, N - 8>{});
}

// The same with an index that is a constant once f has been inlined.
template <int N, class F> INLINED inline void repeat(F&& f) {
  if constexpr (N > 0) f(0);
  if constexpr (N > 1) f(1);
  if constexpr (N > 2) f(2);
  if constexpr (N > 3) f(3);
  if constexpr (N > 4) f(4);
  if constexpr (N > 5) f(5);
  if constexpr (N > 6) f(6);
  if constexpr (N > 7) f(7);
  if constexpr (N > 8) repeat<N - 8>([&](int i) INLINED { f(i + 8); });
}

}  // namespace BILLFISH_ISA
