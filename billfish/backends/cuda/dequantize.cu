// Bricks to numbers [n, k], bit for bit as the reference has them: ((code - zero) * scale) + minimum, each operation
// rounded once to float32, then once to the type asked for. One warp takes a brick and writes it row by row.
//
// Compiled with ELEMENT, SCALE, OFFSET, GROUPS, OUTPUT (float, F16 or BF16) and ONE_ZERO (code 8 of E2M1 is +0).
#define TYPE F16  // every code of every element is exact in it
#include "decode.cuh"
#ifndef ONE_ZERO
#define ONE_ZERO 0
#endif

DEVICE void store(float* to, float v) { *to = v; }
template <class T> struct Stored { u16 bits; };
template <class T> DEVICE void store(Stored<T>* to, float v) { to->bits = (u16)T::pack(v, 0); }

extern "C" __global__ void marlin_dequantize(const u8* __restrict__ weights, const float* __restrict__ row_scale, OUTPUT* __restrict__ out, int n, int k) {
  __shared__ float values[16][128 + 4];
  __shared__ __align__(16) u8 copy[Brick::bytes];
  const int lane = threadIdx.x, g = lane >> 2, c = lane & 3;
  const int along = (k + 127) / 128, brick = blockIdx.x % along, course = blockIdx.x / along;
  const u8* from = weights + Brick::at(course, brick, (n + 15) / 16, along);
  for (int i = lane; i < Brick::bytes / 16; i += 32) ((uint4*)copy)[i] = __ldg((const uint4*)from + i);
  __syncwarp();
  const u32 p = shared_address(copy);
  float of_row[2];
  for (int h = 0; h < 2; h++) of_row[h] = row_scale[min(course * 16 + g + h * 8, n - 1)];
#pragma unroll
  for (int kt = 0; kt < 8; kt++) {
    const int group = kt / Brick::group_fragments;
    const float2 s = Brick::scale(p, g, group);
    const float scale[2] = {__fmul_rn(s.x * (1 / SCALE::raw), of_row[0]), __fmul_rn(s.y * (1 / SCALE::raw), of_row[1])};
    float offset[2] = {};
    if constexpr (OFFSET != NONE) {
      const float2 o = Brick::decode_offset(Brick::stored_offset(p, g, group));
      offset[0] = o.x, offset[1] = o.y;
    }
    const uint4 words = Brick::codes(p, kt * Element::words / 4, lane);
    const u32 codes[4] = {words.x, words.y, words.z, words.w};
    u32 a[4];
    Element::decode(codes + kt * Element::words % 4, a);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int upper = i / 2 % 2;
      float v = F16::to_float((u16)(a[i / 2] >> (i % 2 * 16))) * (1 / Element::raw);
      if constexpr (MIDDLE != 0) v += MIDDLE;  // exact; but adding 0 would lose the sign of -0
      if constexpr (ONE_ZERO) v = __fadd_rn(v, 0.0f);  // and is to lose it here
      if constexpr (OFFSET == ZERO) v = __fsub_rn(v, offset[upper]);
      v = __fmul_rn(v, scale[upper]);
      if constexpr (OFFSET == MINIMUM) v = __fadd_rn(v, __fmul_rn(offset[upper], of_row[upper]));
      values[g + upper * 8][kt * 16 + i / 4 * 8 + 2 * c + i % 2] = v;
    }
  }
  __syncwarp();
  for (int row = 0; row < 16 && course * 16 + row < n; row++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int column = brick * 128 + i * 32 + lane;
      if (column < k) store(out + (size_t)(course * 16 + row) * k + column, values[row][i * 32 + lane]);
    }
}
