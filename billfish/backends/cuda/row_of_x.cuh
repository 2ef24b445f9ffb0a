// What gemm_bytes.cu has to know of a row of x that quantize_rows.cu rounded, beside its bytes.
#pragma once
#include "device.cuh"

constexpr int PART = 512;  // of K, which one warp of quantize_rows.cu rounds at a time

// steep: which parts of the row have so large numbers that the tensor core must not keep their sum, since it would cut off the terms behind
// them. A part's numbers are taken by the largest of each 16. Their mean is then STEEP times that of the row, the row's largest left aside:
// as one number does that is 60 times the others. Part p has bit p / 4 % 8 of byte p % 4.
struct __align__(8) RowOfX {
  float scale;
  u8 steep[4];
};
constexpr float STEEP = 2;
