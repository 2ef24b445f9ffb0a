// One ISA level. CMake compiles this file and those beside it once for each, with its flags, BILLFISH_ISA (a namespace and the level's name)
// and BILLFISH_SIMD (its header). A level that differs from another in integer products alone takes the rest of that one, BILLFISH_REST.
#include "layout/problem.h"
#include BILLFISH_SIMD
#include "activations/quantize.h"
#include "gemm/gemm8.h"
#include "level/machine.h"

#ifndef BILLFISH_REST
#define BILLFISH_REST BILLFISH_ISA
#endif
#define TEXT(x) #x
#define NAME_OF(x) TEXT(x)

namespace BILLFISH_REST {

void multiply_floats(const billfish::Weights&, const billfish::ActivationsExact&, const float* bias, float* y, int64_t first, int64_t last);
void open_gate(const float* gate, const float* up, billfish::Gate, int64_t count, float* out);
void dequantize_rows(const billfish::Storage&, void* out, int type, int64_t first, int64_t last);
void dequantize_words(const billfish::Storage&, void* out, int type, int64_t first, int64_t last);
void read_codes(const billfish::Storage&, int64_t row, int64_t first, int64_t count, uint8_t* codes);
extern const billfish::DecoderKernels decoder_kernels;
extern const billfish::SearchKernels search_kernels;

}  // namespace BILLFISH_REST

namespace BILLFISH_ISA {

void multiply_exact(const Weights&, const billfish::ActivationsExact&, const float* bias, float* y, int64_t first, int64_t last);

// Constants, without code that runs when the module is loaded: the machine may have none of this level's instructions.
extern const billfish::Level level;
constexpr billfish::Level level = {
    NAME_OF(BILLFISH_ISA), TILE_ROWS, VECTOR_BYTES, LANES, HIGH_FLIP, SIGNED_BIAS, SMALL_TABLES, quantize_row, lanes_of_x, start_stride, fill_starts, exact_in_digits, lay_out_row,
    multiply8, multiply_exact, BILLFISH_REST::multiply_floats, BILLFISH_REST::open_gate, BILLFISH_REST::dequantize_rows, BILLFISH_REST::dequantize_words, BILLFISH_REST::read_codes,
    read_all, dot_rounds, fma_rounds, DOT_OPERATIONS, FMA_OPERATIONS, &BILLFISH_REST::decoder_kernels, &BILLFISH_REST::search_kernels,
};

}  // namespace BILLFISH_ISA
