// Few rows of x and nibbles, for one ISA level; compiled as level.cpp is.
#include "layout/problem.h"
#include BILLFISH_SIMD
#include "gemm/stream8.h"

namespace BILLFISH_ISA {

FewKernel few_kernel_of_nibbles(Scales scales, Reach reach) {
  switch (scales) {
    case Scales::f16: return few_kernel_of_groups<Nibbles, Scales::f16>(reach);
    case Scales::f16_minimum: return few_kernel_of_groups<Nibbles, Scales::f16_minimum>(reach);
    case Scales::f16_zero8: return few_kernel_of_groups<Nibbles, Scales::f16_zero8>(reach);
    case Scales::f16_zero16: return few_kernel_of_groups<Nibbles, Scales::f16_zero16>(reach);
    case Scales::sub_minimum: return few_kernel<Nibbles, Scales::sub_minimum>(reach);
    default: return nullptr;
  }
}

}  // namespace BILLFISH_ISA
