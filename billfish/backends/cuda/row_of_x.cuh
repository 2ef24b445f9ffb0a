// What gemm_bytes.cu has to know of a row of x that quantize_rows.cu rounded, beside its bytes.
#pragma once
#include "device.cuh"

constexpr int PART = 512;  // of K, which one warp of quantize_rows.cu rounds at a time

// steep: which parts of the row have so large numbers that the tensor core must not keep their sum, since it would cut off the terms behind
// them. A part's numbers are taken by the largest of each 16: their mean is twice that of the row, the row's largest left aside. So it is with
// one number that is 60 times the others. Rows whose largest is not STEEP_ROW times that mean have none. Part p has bit p % 32.
struct __align__(8) RowOfX {
  float scale;
  u32 steep;
};
constexpr float STEEP_PART = 2, STEEP_ROW = 16;
