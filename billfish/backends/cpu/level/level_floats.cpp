// GEMM with unquantized weights and float codes, for one ISA level; compiled as level.cpp is.
#include "layout/problem.h"
#include BILLFISH_SIMD
#include "gemm/gemm_float_codes.h"
#include "gemm/gemm_plain.h"

namespace BILLFISH_ISA {

void multiply_floats(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  (is_plain(w) ? multiply_plain : multiply_float_codes)(w, x, bias, y, first, last);
}

}  // namespace BILLFISH_ISA
