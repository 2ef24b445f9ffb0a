// GEMM with unrounded x and integer codes, for one ISA level; compiled as level.cpp is.
#include "layout/problem.h"
#include BILLFISH_SIMD
#include "gemm/gemm_exact.h"

namespace BILLFISH_ISA {

void multiply_exact(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  if (const CodesKernel few = codes_kernel(w, x.bundles())) multiply_codes(w, x, bias, y, first, last, few);
  else multiply_decoded(w, x, bias, y, first, last);
}

}  // namespace BILLFISH_ISA
