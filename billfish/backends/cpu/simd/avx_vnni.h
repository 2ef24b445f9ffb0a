// AVX-VNNI: AVX2 and a dot product.
#pragma once
#include "simd/wide_sums.h"
#include "simd/ymm.h"

namespace BILLFISH_ISA {

// vpdpbusd takes the weights as unsigned bytes, so signed ones come with 128 added.
template <int L, billfish::Operand> Ints dot(Ints sum, Bytes w, Activations x) { return {_mm256_dpbusd_avx_epi32(sum.v, w, splat_quad<L>(x))}; }
// What bytes of signed weights have more than their values when dot() gets them.
constexpr int SIGNED_BIAS = 128;
// Whether dot() takes any byte, two nibbles at once for example.
constexpr bool WHOLE_BYTES_FIT = true;

}  // namespace BILLFISH_ISA
