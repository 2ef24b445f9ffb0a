// Few rows of x and all codes but nibbles, for one ISA level; compiled as level.cpp is.
#include "layout/problem.h"
#include BILLFISH_SIMD
#include "gemm/stream8.h"

namespace BILLFISH_ISA {

FewKernel few_kernel_of_others(Codes codes, Scales scales, Reach reach) {
  switch (codes) {
    case Codes::u2: return scales == Scales::sub_nibbles ? few_kernel_of_halves<Twos, Scales::sub_nibbles>(reach) : nullptr;
    case Codes::u3: return scales == Scales::sub ? few_kernel_of_halves<Threes, Scales::sub>(reach) : nullptr;
    case Codes::u5:
      switch (scales) {
        case Scales::f16: return few_kernel<Fives, Scales::f16>(reach);
        case Scales::f16_minimum: return few_kernel<Fives, Scales::f16_minimum>(reach);
        case Scales::sub_minimum: return few_kernel<Fives, Scales::sub_minimum>(reach);
        default: return nullptr;
      }
    case Codes::u6: return scales == Scales::sub ? few_kernel_of_halves<Sixes, Scales::sub>(reach) : nullptr;
    case Codes::s8: return scales == Scales::f16 ? few_kernel_of_groups<Whole, Scales::f16>(reach) : nullptr;
    case Codes::table: return few_kernel_of_tables<Looked>(scales, reach);
    case Codes::small_table:
      if constexpr (SMALL_TABLES) return few_kernel_of_tables<SmallLooked>(scales, reach);
      else return nullptr;
    default: return nullptr;
  }
}

}  // namespace BILLFISH_ISA
