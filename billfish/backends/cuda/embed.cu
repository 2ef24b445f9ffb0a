// A token's row of the embedding, in float32, and cosines and sines at its position, of the pairs of all RoPE tables.
//
// One warp for each row of x and 128 k decodes the brick that has the token's row. The first warps of a row compute the angles, in
// float64, because positions are large and the last bit counts.
//
// Compiled with ELEMENT, SCALE, OFFSET, GROUPS.
#define TYPE F16  // every code of every element is exact in it
#include "decode.cuh"
#include "values.cuh"

extern "C" __global__ void marlin_embed(const u8* __restrict__ weights, const float* __restrict__ row_scale, const int* __restrict__ tokens, const int* __restrict__ chosen,
                                        const int* __restrict__ positions, const double* __restrict__ frequencies, const double* __restrict__ magnitudes,
                                        float* __restrict__ x, float2* __restrict__ angles, int n, int k, int pairs, float scale) {
  __shared__ float values[16][128 + 4];
  let_next_start();
  wait_for_previous();
  const int lane = threadIdx.x, along = (k + 127) / 128, brick = blockIdx.x, row = blockIdx.y, token = token_of(tokens[row], chosen);
  for (int i = brick * 32 + lane; i < pairs; i += 32 * gridDim.x) {
    double sine, cosine;
    sincos(positions[row] * frequencies[i], &sine, &cosine);
    angles[(size_t)row * pairs + i] = make_float2((float)(cosine * magnitudes[i]), (float)(sine * magnitudes[i]));
  }
  decode_brick<false>(weights, row_scale, token / 16, brick, n, along, lane, values);
  for (int i = lane; i < 128 && brick * 128 + i < k; i += 32) x[(size_t)row * k + brick * 128 + i] = values[token % 16][i] * scale;
}
