// Sums of outer products of the rows of x, X^T X: what calibration keeps of the inputs of a matrix.
#pragma once
#include "decoder/kernels.h"
#include "simd/room.h"

namespace BILLFISH_ISA {

constexpr int TOGETHER = 4;  // rows of the sums that are made at a time

// sums [k, k] += x^T x for x [rows, k]: the columns from 16 * sixteen on, and the rows up to the last of these. The products of a call are
// added up in the order of its rows, and then to the sums. columns [k padded to 16, rows padded to 4]: x transposed, zeros behind it.
inline void add_outer(const float* x, const float* columns, int64_t rows, int64_t k, int64_t sixteen, float* sums) {
  const int64_t padded = (rows + 3) / 4 * 4, first = sixteen * COLUMNS, last = std::min(first + COLUMNS, k);
  static thread_local Room room;
  float* side = room.take(padded * COLUMNS);  // these columns, row by row
  std::fill_n(side, padded * COLUMNS, 0.0f);
  for (int64_t row = 0; row < rows; row++) std::copy(x + row * k + first, x + row * k + last, side + row * COLUMNS);
  for (int64_t i = 0; i < last; i += TOGETHER) {
    float tile[TOGETHER * COLUMNS];
    combine<TOGETHER, true>(columns + i * padded, padded, side, padded, tile, COLUMNS);
    for (int64_t t = 0; t < std::min<int64_t>(TOGETHER, k - i); t++)
      for (int64_t j = first; j < last; j++) sums[(i + t) * k + j] += tile[t * COLUMNS + j - first];
  }
  room.keep_at_most(billfish::KEPT_BYTES);
}

}  // namespace BILLFISH_ISA
