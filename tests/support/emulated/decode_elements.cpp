// decode.cuh's elements and scales for both types of x, to call from Python: tests/backends/cuda/test_decode.py. Arrays of words go in, with
// as many words for each tile as the element takes; four pairs for each tile come out.
#include "ptx.h"

#define TYPE F16  // what only the kernels use: any will do
#define ELEMENT Int4
#define SCALE ScaleF16
#define OFFSET NONE
#define GROUPS 1
#include "decode.cuh"

typedef u32 Pairs[4];

template <class E> void constants(float* to) { to[0] = E::raw, to[1] = E::fused, to[2] = E::unit_low, to[3] = E::unit_high, to[4] = E::center; }

template <class E> void decode(const u32* words, Pairs* a, int count) {
  for (int i = 0; i < count; i++) E::decode(words + i * E::words, a[i]);
}
template <class E> void decode_plain(const u32* words, Pairs* a, int count) {
  for (int i = 0; i < count; i++) E::decode_plain(words + i * E::words, a[i]);
}
// With a pair of scales for each tile, and a pair of what is added in place of the center, or none.
template <class E> void decode_scaled(const u32* words, const u32* scales, const u32* added, Pairs* a, int count) {
  for (int i = 0; i < count; i++) {
    u32 factors[4];
    E::factors(scales[i], factors);
    if (added) factors[2] = added[i];
    E::decode_scaled(words + i * E::words, factors, a[i]);
  }
}
// As gemm_small multiplies by scales of one byte, of which `stored` is a word.
template <class E, class S, class T> void decode_prescaled(const u32* words, const u32* stored, int group, Pairs* a, int count) {
  for (int i = 0; i < count; i++) {
    u32 pair = S::of_group(stored[i], group);
    if (!T::is_half) {
      const float2 s = S::decode(pair, 0);
      pair = T::mul2(T::pack(s.x, s.y), 0x76807680);  // 2^110
    }
    E::decode(words + i * E::words, a[i]);
    for (int p = 0; p < 4; p++) a[i][p] = T::mul2(a[i][p], twice(pair, p & 1));
  }
}

#define EXPORT(E, T)                                                                                                      \
  extern "C" void constants_##E##_##T(float* to) { constants<E<T>>(to); }                                                 \
  extern "C" void decode_##E##_##T(const u32* words, Pairs* a, int count) { decode<E<T>>(words, a, count); }              \
  extern "C" void decode_plain_##E##_##T(const u32* words, Pairs* a, int count) { decode_plain<E<T>>(words, a, count); }
#define EXPORT_SCALED(E, T)                                                                                               \
  extern "C" void decode_scaled_##E##_##T(const u32* words, const u32* scales, const u32* added, Pairs* a, int count) {   \
    decode_scaled<E<T>>(words, scales, added, a, count);                                                                  \
  }
#define EXPORT_PRESCALED(S, T)                                                                                            \
  extern "C" void decode_prescaled_##S##_##T(const u32* words, const u32* stored, int group, Pairs* a, int count) {       \
    decode_prescaled<E2M1<T>, S, T>(words, stored, group, a, count);                                                      \
  }
#define EXPORT_TYPE(T)                                                                                                    \
  EXPORT(Int4, T) EXPORT(Int8, T) EXPORT(E2M1, T) EXPORT(E4M3, T) EXPORT(Table4, T)                                       \
  EXPORT_SCALED(Int4, T) EXPORT_SCALED(Int8, T) EXPORT_PRESCALED(ScaleE5M2, T) EXPORT_PRESCALED(ScaleE5M3, T)
EXPORT_TYPE(F16)
EXPORT_TYPE(BF16)
