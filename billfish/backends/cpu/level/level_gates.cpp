// SwiGLU and its like for one ISA level; compiled as level.cpp is.
#include "layout/problem.h"
#include BILLFISH_SIMD
#include "gemm/gates.h"

namespace BILLFISH_ISA {

void open_gate(const float* gate, const float* up, Gate activation, int64_t count, float* out) {
  switch (activation) {
    case Gate::silu: return open_all<Gate::silu>(gate, up, count, out);
    case Gate::gelu: return open_all<Gate::gelu>(gate, up, count, out);
    case Gate::clamped_silu: return open_all<Gate::clamped_silu>(gate, up, count, out);
    case Gate::gelu_erf: return open_all<Gate::gelu_erf>(gate, up, count, out);
  }
}

}  // namespace BILLFISH_ISA
