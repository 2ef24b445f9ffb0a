// A brick to numbers, bit for bit as the reference has them: ((code - zero) * scale) + minimum, each operation rounded once to
// float32. One warp does it. TYPE is F16.
#pragma once
#include "decode.cuh"

// A token as the host sends it: itself, or ~slot for the one that was chosen last in that slot.
DEVICE int token_of(int sent, const int* chosen) { return sent < 0 ? chosen[~sent] : sent; }

template <bool POSITIVE_ZERO> DEVICE void decode_brick(const u8* weights, const float* row_scale, int course, int brick, int n, int along, int lane, float (*values)[128 + 4]) {
  __shared__ __align__(16) u8 copy[Brick::bytes];
  const int g = lane >> 2, c = lane & 3;
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
      if constexpr (POSITIVE_ZERO) v = __fadd_rn(v, 0.0f);  // and is to lose it here
      if constexpr (OFFSET == ZERO) v = __fsub_rn(v, offset[upper]);
      v = __fmul_rn(v, scale[upper]);
      if constexpr (OFFSET == MINIMUM) v = __fadd_rn(v, __fmul_rn(offset[upper], of_row[upper]));
      values[g + upper * 8][kt * 16 + i / 4 * 8 + 2 * c + i % 2] = v;
    }
  }
  __syncwarp();
}
