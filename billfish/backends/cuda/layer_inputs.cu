// What each layer takes beside the residual stream, for models with an embedding per layer: out [layers, rows, SIZE] =
// (RMSNorm(projection_scale * projected) * norm + scale * the token's row of the embedding) / sqrt(2). A warp has one row of one layer.
//
// Compiled with ELEMENT, SCALE, OFFSET, GROUPS (of the embedding), NUMBER (the type of `projected` and out) and SIZE.
#define TYPE F16  // every code of every element is exact in it
#include "decode.cuh"
#include "values.cuh"

extern "C" __global__ void marlin_layer_inputs(const u8* __restrict__ weights, const float* __restrict__ row_scale, const int* __restrict__ tokens, const int* __restrict__ chosen, const u16* __restrict__ projected,
                                               const float* __restrict__ norm, u16* __restrict__ out, int n, int k, int rows, float epsilon, float scale, float projection_scale) {
  __shared__ float values[16][128 + 4];
  let_next_start();
  wait_for_previous();
  const int lane = threadIdx.x, along = (k + 127) / 128, layer = blockIdx.x, row = blockIdx.y, token = token_of(tokens[row], chosen), first = layer * SIZE;
  const u16* from = projected + (size_t)row * k + first;
  float sum = 0;
  for (int i = lane; i < SIZE; i += 32) {
    const float v = NUMBER::to_float(from[i]) * projection_scale;
    sum += v * v;
  }
  for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, d);
  const float factor = rsqrtf(sum / SIZE + epsilon) * projection_scale;
  for (int brick = first / 128; brick * 128 < first + SIZE; brick++) {
    __syncwarp();
    decode_brick<false>(weights, row_scale, token / 16, brick, n, along, lane, values);
    __syncwarp();
    for (int column = max(first, brick * 128) + lane; column < min(first + SIZE, brick * 128 + 128); column += 32) {
      const int i = column - first;
      const float own = NUMBER::to_float(from[i]) * factor * norm[i];
      out[((size_t)layer * rows + row) * SIZE + i] = (u16)NUMBER::pack_finite((own + scale * values[token % 16][column % 128]) * 0.70710678f, 0);
    }
  }
}
