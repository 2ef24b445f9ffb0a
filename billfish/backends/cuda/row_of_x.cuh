// What gemm_bytes.cu has to know of a row of x that quantize_rows.cu rounded, beside its bytes.
#pragma once
#include "device.cuh"

constexpr int PART = 512;  // of K, a bit of `steep`: the first 32 parts have one each, and further ones begin again with the first

// steep: which parts of a row have so large numbers that the tensor core must not keep their sum, since it would cut off the terms behind
// them: the magnitudes of such a part are 1.5 times those of 512 numbers, the row's largest one left aside.
struct __align__(8) RowOfX {
  float scale;
  u32 steep;
};
constexpr float STEEP = 1.5f * PART;
