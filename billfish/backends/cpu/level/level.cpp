// One ISA level. CMake compiles this file once for each, with its flags, BILLFISH_ISA (a namespace and the level's name)
// and BILLFISH_SIMD (its header).
#include "layout/problem.h"
#include BILLFISH_SIMD
#include "activations/quantize.h"
#include "dequantize/dequantize.h"
#include "gemm/gates.h"
#include "gemm/gemm8.h"
#include "gemm/gemm_exact.h"
#include "gemm/gemm_float_codes.h"
#include "gemm/gemm_plain.h"
#include "level/machine.h"

#define TEXT(x) #x
#define NAME_OF(x) TEXT(x)

namespace BILLFISH_ISA {

inline void multiply_floats(const Weights& w, const ActivationsExact& x, const float* bias, float* y, int64_t first, int64_t last) {
  (is_plain(w) ? multiply_plain : multiply_float_codes)(w, x, bias, y, first, last);
}

extern const billfish::Level level;
const billfish::Level level = {
    NAME_OF(BILLFISH_ISA), TILE_ROWS, VECTOR_BYTES, LANES, HIGH_FLIP, SIGNED_BIAS, SMALL_TABLES, quantize_row, lanes_of_x, start_stride, fill_starts, exact_in_digits, lay_out_row,
    multiply8, multiply_exact, multiply_floats, open_gate, dequantize_rows, dequantize_words, read_codes, read_all, dot_rounds, fma_rounds, DOT_OPERATIONS, FMA_OPERATIONS,
};

}  // namespace BILLFISH_ISA
