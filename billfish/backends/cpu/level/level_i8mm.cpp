// The level neon_i8mm: that of neon_dotprod, with matrix products of int8 for many rows of x. Nothing else is compiled again.
#include "layout/problem.h"
#include BILLFISH_SIMD
#include "gemm/gemm_i8mm.h"

namespace neon_dotprod {
extern const billfish::Level level;
}  // namespace neon_dotprod

namespace BILLFISH_ISA {

inline void finish_x(const Weights& w, const Activations8& x, int64_t first, int64_t last, int64_t begin, int64_t end) {
  if (in_pairs(x)) pair_rows(x, first, last, begin, end);
  else neon_dotprod::level.finish_x(w, x, first, last, begin, end);
}

inline void multiply8(const Weights& w, const Activations8& x, const float* bias, float* y, int64_t first, int64_t last) {
  (in_pairs(x) ? multiply_pairs : neon_dotprod::level.multiply8)(w, x, bias, y, first, last);
}

// Matrix products want rows by four.
inline int32_t lanes(const Weights& w, int64_t m, int32_t digits, int32_t span) {
  return digits == 1 && m >= MANY_ROWS ? X_ROWS : neon_dotprod::level.lanes(w, m, digits, span);
}

// Those of neon_dotprod are constants, and so are there before anything is copied, which any machine can do.
extern const billfish::Level level;
const billfish::Level level = [] {
  billfish::Level own = neon_dotprod::level;
  own.name = "neon_i8mm", own.lanes = lanes, own.finish_x = finish_x, own.multiply8 = multiply8;
  own.dot_rounds = matrix_rounds, own.dot_operations = MATRIX_OPERATIONS;
  return own;
}();

}  // namespace BILLFISH_ISA
