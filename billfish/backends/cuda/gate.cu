// SwiGLU and its like, out = activation(gate) * up, where gate and up were two GEMMs: weights of two kinds cannot be rows of one matrix.
// Rows of `columns` numbers are `stride` apart in out. A CTA has 256 columns of a row, then loops over further rows.
//
// Compiled with TYPE and GATE.
#include "device.cuh"

extern "C" __global__ void __launch_bounds__(256) marlin_gate(const u16* __restrict__ gates, const u16* __restrict__ numbers, u16* __restrict__ out, int rows, int columns,
                                                           int stride) {
  let_next_start();
  wait_for_previous();
  const int parts = (columns + 255) / 256, column = blockIdx.x % parts * 256 + threadIdx.x;
  for (int row = blockIdx.x / parts; row < rows && column < columns; row += gridDim.x / parts) {
    const size_t i = (size_t)row * columns + column;
    out[(size_t)row * stride + column] = (u16)TYPE::pack_finite(pass_gate(TYPE::to_float(gates[i]), TYPE::to_float(numbers[i])), 0);
  }
}
