// AVX2 with FMA and F16C.
#pragma once
#include "simd/ymm.h"

namespace BILLFISH_ISA {

using billfish::Operand;

// maddubs multiplies unsigned with signed bytes and adds pairs of products in 16 bits. A pair of codes c with digits of x, which are -128
// at least, is 2 * 128 * c at most, so that 16 bits hold (2^15 - 1) / (256 * c) such pairs added up: 8 where codes are below 16 (30720), 4
// where they are below 32 (31744), and 2 where they are below 64 (32256). 32 bits take over from there.
constexpr int narrow_quads(Operand operand) {
  switch (operand) {
    case Operand::below_16: return 8;
    case Operand::below_32: return 4;
    case Operand::below_64: return 2;
    default: return 0;
  }
}
inline Ints widen(Ints pairs) { return {_mm256_madd_epi16(pairs.v, _mm256_set1_epi16(1))}; }

// gcc would put off all additions to a sum until the end, and spill what is to be added.
inline Ints added_now(__m256i sum) {
  asm("" : "+x"(sum));
  return {sum};
}

// Codes are added in 16 bits. For signed values the sign goes from x to the weight; 128 times 127, twice, is just below 2^15. Any bytes are
// widened instead, even and odd ones apart, so that -128 times -128 is right too.
template <int L, Operand OPERAND> Ints dot(Ints sum, Bytes w, Activations x) {
  const __m256i quad = splat_quad<L>(x);
  if constexpr (narrow_quads(OPERAND) > 0) {
    return added_now(_mm256_add_epi16(sum.v, _mm256_maddubs_epi16(w, quad)));
  } else if constexpr (OPERAND == Operand::values) {
    return added_now(_mm256_add_epi32(sum.v, widen({_mm256_maddubs_epi16(_mm256_abs_epi8(quad), _mm256_sign_epi8(w, quad))}).v));
  } else {
    const auto even = [](__m256i v) { return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8); };
    const auto odd = [](__m256i v) { return _mm256_srai_epi16(v, 8); };
    const __m256i products = _mm256_add_epi32(_mm256_madd_epi16(even(w), even(quad)), _mm256_madd_epi16(odd(w), odd(quad)));
    return added_now(_mm256_add_epi32(sum.v, products));
  }
}
// What bytes of signed weights have more than their values when dot() gets them.
constexpr int SIGNED_BIAS = 0;
// Whether dot() takes any byte, two nibbles at once for example.
constexpr bool WHOLE_BYTES_FIT = false;
// Whether tables of values from -16 to 15 become unsigned: no sign has to go anywhere.
constexpr bool SMALL_TABLES = true;

}  // namespace BILLFISH_ISA
