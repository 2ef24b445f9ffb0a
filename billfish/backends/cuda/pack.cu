// Codes [n, k], a byte each, to bricks: layout.py's pack() on the GPU. One CTA for each brick, those of a row of bricks
// side by side; gridDim.x holds them all, as gridDim.y would end at 65,535.
//
// Compiled with ELEMENT, SCALE, OFFSET, GROUPS.
#define TYPE F16
#include "decode.cuh"

extern "C" __global__ void marlin_pack(const u8* __restrict__ codes, const u8* __restrict__ groups, u8* __restrict__ bricks, int n, int k) {
  const int along = (k + 127) / 128, brick = blockIdx.x % along, course = blockIdx.x / along;
  u8* to = bricks + Brick::at(course, brick, (n + 15) / 16, along);
  auto code = [&](int row, int column) -> u32 {
    row += course * 16, column += brick * 128;
    return row < n && column < k ? codes[(size_t)row * k + column] : 0;
  };
  for (int i = threadIdx.x; i < Brick::code_bytes / 4; i += blockDim.x) {
    u32 q = 0;
    for_each_code(i, [&](int row, int column, int pair, bool odd) {
      const u32 placed = Element::place(code(row, column), pair);
      q |= odd ? __funnelshift_l(placed, placed, 16 / Element::words) : placed;
    });
    ((u32*)to)[i] = q;
  }
  constexpr int rest = Brick::bytes - Brick::code_bytes;
  for (int i = threadIdx.x; i < rest; i += blockDim.x) to[Brick::code_bytes + i] = groups[(size_t)blockIdx.x * rest + i];
}
