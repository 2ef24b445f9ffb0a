// For levels whose dot() adds to 32 bits at once; simd/avx2.h has the other way.
#pragma once
#include "layout/problem.h"

namespace BILLFISH_ISA {

// How many k-quads dot() adds up in 16 bits at most, before widen() makes 32 bits of them.
constexpr int narrow_quads(billfish::Operand) { return 0; }
// Whether tables of values from -16 to 15 become unsigned.
constexpr bool SMALL_TABLES = false;

}  // namespace BILLFISH_ISA
