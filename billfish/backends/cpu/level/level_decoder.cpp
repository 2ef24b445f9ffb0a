// The decoder's own kernels for one ISA level; compiled as level.cpp is.
#include "layout/problem.h"
#include BILLFISH_SIMD
#include "decoder/attention.h"
#include "decoder/kernels.h"
#include "decoder/outer.h"
#include "decoder/recurrent.h"

namespace BILLFISH_ISA {

extern const billfish::DecoderKernels decoder_kernels;
const billfish::DecoderKernels decoder_kernels = {
    normalize, normalize_centered, add_scaled, scale, rotate, store, attend, see_slice, gather, soften, add_outer,
    convolve, normalize_length, dot, multiply, multiply_sigmoid, delta_rule, mamba_scan};

}  // namespace BILLFISH_ISA
