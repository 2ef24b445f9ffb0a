// out = gate(a) * b, where gate and numbers were two products: weights of two kinds cannot be rows of one matrix. Rows of `columns` numbers
// are `stride` apart in out.
//
// Compiled with TYPE and GATE.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(256) marlin_gate(const u16* __restrict__ gates, const u16* __restrict__ numbers, u16* __restrict__ out, int count, int columns,
                                                           int stride) {
  let_next_start();
  wait_for_previous();
  for (int i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256)
    out[(size_t)(i / columns) * stride + i % columns] = (u16)TYPE::pack(pass_gate(TYPE::to_float(gates[i]), TYPE::to_float(numbers[i])), 0);
}
