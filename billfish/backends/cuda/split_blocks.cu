// Blocks of q8_0 or q8_1, [m, k / 32], to what gemm_bytes.cu wants of x that is GIVEN: bytes [m, stride] in the order of bytes.cuh, then
// float32 scales [bricks, m, 4], one for each 32 k. One CTA a row.
//
// Compiled with BLOCK_BYTES, and CODES_AT: where in a block its codes begin. A float16 scale is at its beginning.
#include "device.cuh"

extern "C" __global__ void marlin_split_blocks(const u8* __restrict__ blocks, u8* __restrict__ bytes, int k, int stride) {
  const int count = k / 32, m = gridDim.x, row = blockIdx.x;
  float* scales = (float*)(bytes + (size_t)m * stride);
  let_next_start();
  wait_for_previous();
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const u8* block = blocks + ((size_t)row * count + i) * BLOCK_BYTES;
    u8* to = bytes + (size_t)row * stride + i * 32;
    scales[((size_t)(i / 4) * m + row) * 4 + i % 4] = F16::to_float((u16)(block[0] | block[1] << 8));
    for (int j = 0; j < 32; j++) {
      const int c = j % 16 / 4, of_lane = j % 4;  // of each 16: 2c, 2c + 8, 2c + 1, 2c + 9
      to[j] = block[CODES_AT + j / 16 * 16 + 2 * c + of_lane % 2 * 8 + of_lane / 2];
    }
  }
}
