// The level amx: that of avx512_vnni, with products of AMX for many rows of x. Nothing else is compiled again.
#include "layout/problem.h"
#include BILLFISH_SIMD
#include "gemm/gemm_amx.h"

namespace avx512_vnni {

void multiply_exact(const billfish::Weights&, const billfish::ActivationsExact&, const float* bias, float* y, int64_t first, int64_t last);
void multiply_floats(const billfish::Weights&, const billfish::ActivationsExact&, const float* bias, float* y, int64_t first, int64_t last);
void open_gate(const float* gate, const float* up, billfish::Gate, int64_t count, float* out);
void dequantize_rows(const billfish::Storage&, void* out, int type, int64_t first, int64_t last);
void dequantize_words(const billfish::Storage&, void* out, int type, int64_t first, int64_t last);
void read_codes(const billfish::Storage&, int64_t row, int64_t first, int64_t count, uint8_t* codes);
extern const billfish::DecoderKernels decoder_kernels;
extern const billfish::SearchKernels search_kernels;
extern const billfish::Level level;

}  // namespace avx512_vnni

namespace BILLFISH_ISA {

namespace rest = avx512_vnni;

// Decoding a slice, and rows of a tile register that x does not have, cost more than AMX gains below so many rows, or above this share of padding.
constexpr int64_t LEAST_ROWS = 32;
inline bool worth_tiles(int64_t m) {
  const int64_t padded = (m + AMX_LANES - 1) / AMX_LANES * AMX_LANES;
  return m >= LEAST_ROWS && (padded - m) * 5 <= padded;
}

inline int32_t lanes(const Weights& w, int64_t m, int32_t digits, int32_t span) {
  return digits != billfish::EXACT_DIGITS && worth_tiles(m) ? AMX_LANES : rest::level.lanes(w, m, digits, span);
}
// Codes are signed here, so sums begin with 0.
inline int64_t start_stride(const Weights& w, const Activations8& x) { return in_tile_rows(x) ? 0 : rest::level.start_stride(w, x); }
inline void finish_x(const Weights& w, const Activations8& x, int64_t first, int64_t last, int64_t begin, int64_t end) {
  in_tile_rows(x) ? join_blocks(x, first, last, begin, end) : rest::level.finish_x(w, x, first, last, begin, end);
}
inline void multiply8(const Weights& w, const Activations8& x, const float* bias, float* y, int64_t first, int64_t last) {
  (in_tile_rows(x) ? multiply_in_tiles : rest::level.multiply8)(w, x, bias, y, first, last);
}

// What the other level has under no name of its own.
inline void quantize_row(const float* x, int64_t k, const Activations8& out, int64_t row, int64_t first, int64_t last) { rest::level.quantize_row(x, k, out, row, first, last); }
inline bool exact_in_digits(const Weights& w, int64_t m) { return rest::level.exact_in_digits(w, m); }
inline void lay_out_row(const float* x, int64_t k, const billfish::ActivationsExact& out, int64_t row, int64_t first, int64_t last) { rest::level.lay_out_row(x, k, out, row, first, last); }
inline uint8_t read_all(const uint8_t* p, int64_t vectors) { return rest::level.read_all(p, vectors); }
inline float fma_rounds(int64_t rounds) { return rest::level.fma_rounds(rounds); }
constexpr double FMA_OPERATIONS = 4.0 * 12 * 2 * LANES;  // as in level/machine.h

// Constants, as in level.cpp: a copy of the other level would be made when the module is loaded, with AVX-512, on any machine.
extern const billfish::Level level;
constexpr billfish::Level level = {
    "amx", TILE_ROWS, VECTOR_BYTES, LANES, HIGH_FLIP, SIGNED_BIAS, SMALL_TABLES, quantize_row, lanes, start_stride, finish_x, exact_in_digits, lay_out_row,
    multiply8, rest::multiply_exact, rest::multiply_floats, rest::open_gate, rest::dequantize_rows, rest::dequantize_words, rest::read_codes,
    read_all, tile_rounds, fma_rounds, TILE_OPERATIONS, FMA_OPERATIONS, &rest::decoder_kernels, &rest::search_kernels,
};

}  // namespace BILLFISH_ISA
