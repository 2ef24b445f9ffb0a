// The decoder's own kernels for one ISA level; compiled as level.cpp is.
#include "layout/problem.h"
#include BILLFISH_SIMD
#include "decoder/attention.h"
#include "decoder/kernels.h"
#include "decoder/outer.h"

namespace BILLFISH_ISA {

extern const billfish::DecoderKernels decoder_kernels;
const billfish::DecoderKernels decoder_kernels = {normalize, add_scaled, scale, rotate, store, attend, see_slice, gather, soften, add_outer};

}  // namespace BILLFISH_ISA
