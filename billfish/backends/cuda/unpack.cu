// Bricks to codes [n, k], a byte each: the way back from pack.cu. Bricks hold codes plus `shift`, modulo 256.
//
// Compiled with ELEMENT, SCALE, OFFSET, GROUPS.
#define TYPE F16
#include "decode.cuh"

extern "C" __global__ void marlin_unpack(const u8* __restrict__ bricks, u8* __restrict__ codes, int n, int k, int shift) {
  const int along = (k + 127) / 128, brick = blockIdx.x % along, course = blockIdx.x / along;
  const u32* from = (const u32*)(bricks + Brick::at(course, brick, (n + 15) / 16, along));
  for (int i = threadIdx.x; i < Brick::code_bytes / 4; i += blockDim.x) {
    const u32 q = from[i];
    for_each_code(i, [&](int row, int column, int pair, bool odd) {
      row += course * 16, column += brick * 128;
      const u32 code = Element::take(odd ? __funnelshift_r(q, q, SECOND) : q, pair);
      if (row < n && column < k) codes[(size_t)row * k + column] = (u8)(code - shift);
    });
  }
}
