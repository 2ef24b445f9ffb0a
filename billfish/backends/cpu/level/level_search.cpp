// The search for scales, for one ISA level; compiled as level.cpp is.
#include <type_traits>

#include "search/search.h"

namespace BILLFISH_ISA {

extern const billfish::SearchKernels search_kernels;
const billfish::SearchKernels search_kernels = {
    search_scales, encode_rows, error_of_rows, extremes_of_rows, signed_extreme_of_rows, dot_of_rows,
};

}  // namespace BILLFISH_ISA
