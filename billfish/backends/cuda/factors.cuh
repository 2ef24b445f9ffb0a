// gemm_large's way from a brick in shared memory to fragments that are multiplied by their scales already, or to sums that will be.
//
// Compiled with TALL and WIDTH, besides what decode.cuh takes.
#pragma once
#include "decode.cuh"

// Scales multiply decoded weights as pairs of TYPE: with the decoding, where that can be done; else after it, and then they
// make up for Element::raw: they are below 2, so 2^14 times that is still a half. Those of one byte do as they are. Sums are REDUCED
// by what is left until the end.
//
// The decoding, one fma, can add a minimum instead of the center. A zero point would have to be multiplied by the scale first, and
// rounded, by up to half a last place of 15 steps, for all codes of the group alike. So the fma makes (code - zero) of them: SHIFTED.
// Scales multiply that, or, where x has few rows, the sums of each brick: SCALED_LATER.
constexpr bool FREE_CENTER = TYPE::is_half && MIDDLE == Element::center;  // nothing of it is left to be added
constexpr bool FUSABLE = Element::fused != 0 && SCALE::bytes == 2;
constexpr bool SHIFTED = FUSABLE && OFFSET == ZERO && FREE_CENTER;
constexpr bool SCALED_LATER = SHIFTED && GROUPS == 1 && WIDTH <= 32 && WIDTH * TALL <= 64;
constexpr bool FUSED = FUSABLE && (OFFSET == NONE || (OFFSET == MINIMUM && FREE_CENTER) || SHIFTED), SCALED_NEXT = SHIFTED && !SCALED_LATER;
constexpr bool AS_IS = TYPE::is_half && SCALE::bytes == 1;
constexpr bool TINY = Element::raw < 0x1p-100f;  // a scale that made up for all of that could be too large
constexpr float REDUCED = FUSED && !SCALED_NEXT ? Element::fused : AS_IS ? Element::raw * SCALE::raw : TINY ? 0x1p-9f : 1;

// What a lane gets by one load of 16 bytes of codes, FRAGMENTS of a brick's 8 fragments, and the scales of the groups that begin in it.
constexpr int FRAGMENTS = 4 / Element::words, LOADS = 8 / FRAGMENTS, LOAD_GROUPS = GROUPS > LOADS ? GROUPS / LOADS : 1;
static __device__ constexpr bool begins_group(int load) { return load * GROUPS % LOADS == 0; }
struct Load {
  u32 words[4];
  uint2 scale[LOAD_GROUPS], offset[LOAD_GROUPS];

  // Of a brick, as the lane 0 finds it at `codes` and at `scales`.
  __device__ __forceinline__ void fetch(u32 codes, u32 scales, int load) {
    const uint4 v = Brick::codes(codes, load, 0);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    if (begins_group(load))
#pragma unroll
      for (int i = 0; i < LOAD_GROUPS; i++) {
        scale[i] = Brick::stored_scale(scales, 0, load * GROUPS / LOADS + i);
        if constexpr (OFFSET != NONE) offset[i] = Brick::stored_offset(scales, 0, load * GROUPS / LOADS + i);
      }
  }
};

// The scales of a load, ready to multiply: what Element::factors gives, or scale and offset, as pairs for the rows g and g + 8. Where
// codes are SHIFTED, the fourth is the scale.
template <class Element, class Scale> struct FactorsOf {
  static constexpr bool HALVES = TYPE::is_half && Scale::halves;  // they are float16 already
  u32 of[LOAD_GROUPS][4];

  __device__ __forceinline__ void take(const Load& load) {
#pragma unroll
    for (int i = 0; i < LOAD_GROUPS; i++) {
      u32 scale, offset = 0;
      if constexpr (HALVES) {
        scale = load.scale[i].x;
        if constexpr (OFFSET == ZERO && !FUSED) offset = TYPE::fma2(negated2(load.offset[i].x), scale, TYPE::mul2(scale, both(MIDDLE)));
        if constexpr (OFFSET == MINIMUM && !FUSED) offset = TYPE::fma2(scale, both(MIDDLE), load.offset[i].x);
        if constexpr (!FUSED && !AS_IS && Element::unraw != TYPE::ones) scale = TYPE::mul2(scale, Element::unraw);
      } else {
        const float2 s = Scale::decode(load.scale[i].x, load.scale[i].y);
        const float up = FUSED ? 1 : REDUCED / (Element::raw * Scale::raw);  // here, where they may be too small for a half before
        scale = TYPE::pack(s.x * up, s.y * up);
        if constexpr (OFFSET != NONE) {
          const float2 o = Brick::offset(load.offset[i], s);
          offset = TYPE::pack(o.x * REDUCED, o.y * REDUCED);
        }
      }
      if constexpr (FUSED) {
        Element::factors(SHIFTED ? TYPE::ones : scale, of[i]);
        if constexpr (OFFSET != NONE) of[i][2] = TYPE::mul2(load.offset[i].x, both(SHIFTED ? -Element::fused : Element::fused));
        if constexpr (SCALED_NEXT) of[i][3] = TYPE::mul2(scale, both(1 / Element::fused));
      } else of[i][0] = scale, of[i][1] = offset;
    }
  }
  static __device__ __forceinline__ u32 both(float v) { return TYPE::pack(v, v); }
  __device__ __forceinline__ void decode(const Load& load, int fragment, u32 (&a)[4]) const {
    const auto& f = of[fragment * LOAD_GROUPS / FRAGMENTS];
    u32 words[Element::words];  // not known before, so that nothing is decoded into registers that wgmma still reads
#pragma unroll
    for (int i = 0; i < Element::words; i++) words[i] = opaque(load.words[fragment * Element::words + i]);
    if constexpr (FUSED) {
      Element::decode_scaled(words, f, a);
#pragma unroll
      for (int p = 0; p < 4 && SCALED_NEXT; p++) a[p] = TYPE::mul2(a[p], twice(f[3], p & 1));
    } else {
      Element::decode(words, a);
#pragma unroll
      for (int p = 0; p < 4; p++) {
        const u32 scale = twice(f[0], p & 1);
        a[p] = OFFSET != NONE ? TYPE::fma2(a[p], scale, twice(f[1], p & 1)) : TYPE::mul2(a[p], scale);
      }
    }
  }
};

using Factors = FactorsOf<Element, SCALE>;

// SCALED_LATER: the sums of the bricks so far, and the scales of this one.
struct ScaledSums {
  float sums[TALL][WIDTH / 2] = {};
  float2 scale[TALL];

  __device__ __forceinline__ void begin(const Load (&loads)[TALL]) {
#pragma unroll
    for (int r = 0; r < TALL; r++) scale[r] = SCALE::decode(loads[r].scale[0].x, loads[r].scale[0].y);
  }
  __device__ __forceinline__ void end(const float (&d)[TALL][WIDTH / 2]) {
#pragma unroll
    for (int r = 0; r < TALL; r++)
#pragma unroll
      for (int i = 0; i < WIDTH / 2; i++) sums[r][i] += d[r][i] * (i & 2 ? scale[r].y : scale[r].x);
  }
  __device__ __forceinline__ void give(float (&d)[TALL][WIDTH / 2]) const {
#pragma unroll
    for (int r = 0; r < TALL; r++)
#pragma unroll
      for (int i = 0; i < WIDTH / 2; i++) d[r][i] = sums[r][i];
  }
};
