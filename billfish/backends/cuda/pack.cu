// Codes [n, k], a byte each, to bricks: what layout.py's pack() does, on the GPU. One CTA for each brick.
//
// Compiled with ELEMENT, SCALE, OFFSET, GROUPS.
#define TYPE F16
#include "decode.cuh"

extern "C" __global__ void marlin_pack(const u8* __restrict__ codes, const u8* __restrict__ groups, u8* __restrict__ bricks, int n, int k) {
  const int brick = blockIdx.x, tile = blockIdx.y;
  u8* to = bricks + Brick::at(tile, brick, gridDim.y, gridDim.x);
  auto code = [&](int row, int column) -> u32 {
    row += tile * 16, column += brick * 128;
    return row < n && column < k ? codes[(size_t)row * k + column] : 0;
  };
  for (int i = threadIdx.x; i < Brick::code_bytes / 4; i += blockDim.x) {
    const int chunk = i / 128, lane = i / 4 % 32, word = i % 4, g = lane >> 2, c = lane & 3;
    u32 q = 0;
    for (int pair = word % Element::words * 2; pair < 4 / Element::words * (word % Element::words + 1); pair++)
      for (int odd = 0; odd < 2; odd++) {
        const int step = (chunk * 4 + word) / Element::words;
        const u32 placed = Element::place(code(g + pair % 2 * 8, step * 16 + pair / 2 * 8 + 2 * c + odd), pair);
        q |= odd ? __funnelshift_l(placed, placed, 16 / Element::words) : placed;
      }
    ((u32*)to)[i] = q;
  }
  constexpr int rest = Brick::bytes - Brick::code_bytes;
  for (int i = threadIdx.x; i < rest; i += blockDim.x) to[Brick::code_bytes + i] = groups[((size_t)tile * gridDim.x + brick) * rest + i];
}
