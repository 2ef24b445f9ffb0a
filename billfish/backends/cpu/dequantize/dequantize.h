// Storage to numbers, bit for bit as billfish.core.format.Format.decode has it: float32 arithmetic, each operation rounded
// once, then one rounding to the type of the output.
#pragma once
#include "layout/problem.h"

namespace BILLFISH_ISA {

// Rows [first, last) of storage whose rows are runs of blocks, or of bytes along K. out [n, k] of type 0 float32, 1 float16,
// 2 bfloat16.
void dequantize_rows(const billfish::Storage& s, void* out, int type, int64_t first, int64_t last);

// Columns [first, last) of words [K / per, N], to rows of the output.
void dequantize_words(const billfish::Storage& s, void* out, int type, int64_t first, int64_t last);

// The codes of `count` blocks of a row from block `first` on, a byte each.
void read_codes(const billfish::Storage& s, int64_t row, int64_t first, int64_t count, uint8_t* codes);

}  // namespace BILLFISH_ISA
