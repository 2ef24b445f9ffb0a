// The gated delta rule, or the scan of Mamba-2, token by token: states S [KEYS][VALUES] of heads, each in registers while it goes through its tokens.
//
// In memory a state is [VALUES / 8][KEYS][8]. A warp has eight columns: a lane has a half of them in every 16th row, so that a warp's load is 512 bytes in a
// row. Memory moves each state once in a launch. With S' = decay S, the delta rule writes what k does not recall yet,
//   d = beta (v - S'^T k),  S = S' + k d^T,  out = S^T q = S'^T q + (k q) d,
// so S^T k and S^T q are summed together. Mamba-2 has d = step x, and out = S^T c + skip x.
//
// Compiled with TYPE, KEYS, VALUES, WARPS, DELTA, TILED (value head i goes with key head i % key_heads; else neighbours share one) and FEW: a decode step, where
// row i is the next token of sequence i. FEW and DELTA: a CTA has all columns of a head, and y = norm(out) * SiLU(z) instead of `out`.
#include "lanes.cuh"

constexpr int EACH = KEYS / 16;  // rows of a lane: 16 apart
constexpr bool NORMED = FEW && DELTA;
static_assert(KEYS % 16 == 0 && VALUES % 8 == 0 && (!NORMED || WARPS * 8 == VALUES), "sixteen groups of rows, eights of columns");

// What a token brings to a lane.
struct Token {
  float k[EACH], q[EACH], v[4], overlap;
  float2 gate;
};

// kq [rows][key_heads][2][KEYS], overlap [rows][key_heads], v [rows][heads][VALUES], gates [rows][heads]: the logarithm of the decay, and beta or the step.
// Of a sequence's memory this layer's states begin at state_at. out [rows][heads][VALUES]. chunks, ranges, saves: as in keep_inputs.cu.
extern "C" __global__ void __launch_bounds__(WARPS * 32, FEW && WARPS <= 16 ? 2 : 1)
marlin_recurrence(const float* kq, const float* overlaps, const float* v, const float2* gates, const float* __restrict__ skips, const u64* states, const int4* chunks,
                  const int2* ranges, const u64* saves, float* out, const u16* z, const float* __restrict__ norm, u16* y, float epsilon, int z_stride, int state_at,
                  int key_heads, int heads) {
  __shared__ float sums[WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.y, text = blockIdx.z;
  const int key_head = TILED ? head % key_heads : head / (heads / key_heads), eight = blockIdx.x * WARPS + warp, column = eight * 8 + (lane & 1) * 4;
  constexpr int OWN = DELTA ? 2 : 3;  // the bit from which on a lane's number says which column's output it gets
  const int own = lane >> OWN & 3;
  const bool gives = DELTA ? (lane & 18) == 16 : (lane & 6) == 0;
  let_next_start();
  const size_t at = (size_t)state_at + ((size_t)head * VALUES / 8 + eight) * KEYS * 8 + lane * 4;
  float4 s[EACH];
  const auto load_state = [&] {
    const float* from = (const float*)states[text] + at;
#pragma unroll
    for (int i = 0; i < EACH; i++) s[i] = *(const float4*)(from + i * 128);
  };
  const auto store_state = [&](u64 place) {
    float* to = (float*)place + at;
#pragma unroll
    for (int i = 0; i < EACH; i++) *(float4*)(to + i * 128) = s[i];
  };
  if (FEW) load_state();  // the step before wrote it, and that has ended
  wait_for_previous();
  const int2 range = FEW ? make_int2(0, 1) : ranges[text];
  if (range.y == 0) return;
  if (!FEW) load_state();
  const int4 last = FEW ? make_int4(text, 1, text, text) : chunks[range.x + range.y - 1];
  const int end = last.x + last.y;
  const float skip = DELTA ? 0 : skips[head];
  const auto fetch = [&](int row) {
    Token token;
    const float* from = kq + ((size_t)row * key_heads + key_head) * 2 * KEYS + (lane >> 1);
#pragma unroll
    for (int i = 0; i < EACH; i++) token.k[i] = from[i * 16], token.q[i] = from[KEYS + i * 16];
    const float4 values = *(const float4*)(v + ((size_t)row * heads + head) * VALUES + column);
    token.v[0] = values.x, token.v[1] = values.y, token.v[2] = values.z, token.v[3] = values.w;
    token.gate = gates[(size_t)row * heads + head], token.overlap = overlaps[(size_t)row * key_heads + key_head];
    return token;
  };
  float given = 0;
  Token next = fetch(last.w);
  for (int i = range.x; i < range.x + range.y; i++) {
    const int4 chunk = FEW ? last : chunks[i];
    for (int row = chunk.x; row < chunk.x + chunk.y; row++) {
      const Token token = next;
      if (!FEW && row + 1 < end) next = fetch(row + 1);
      const float decay = expf(token.gate.x);
      float t[DELTA ? 8 : 4] = {};
#pragma unroll
      for (int r = 0; r < EACH; r++) {
        float* sums_of_q = t + (DELTA ? 4 : 0);
        sums_of_q[0] += s[r].x * token.q[r], sums_of_q[1] += s[r].y * token.q[r], sums_of_q[2] += s[r].z * token.q[r], sums_of_q[3] += s[r].w * token.q[r];
        if (DELTA) t[0] += s[r].x * token.k[r], t[1] += s[r].y * token.k[r], t[2] += s[r].z * token.k[r], t[3] += s[r].w * token.k[r];
      }
      const float sum = sum_of_one<2>(t, lane);  // over lanes with the same half of the columns
      float written[4];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float recalled = DELTA ? __shfl_sync(0xffffffff, sum, c << 2 | (lane & 1)) : 0;
        written[c] = token.gate.y * (token.v[c] - decay * recalled);
      }
      const float own_written = own & 2 ? own & 1 ? written[3] : written[2] : own & 1 ? written[1] : written[0];
      const float own_v = own & 2 ? own & 1 ? token.v[3] : token.v[2] : own & 1 ? token.v[1] : token.v[0];
      given = decay * sum + token.overlap * own_written + skip * own_v;
      if (!NORMED && gives) out[((size_t)row * heads + head) * VALUES + column + own] = given;
#pragma unroll
      for (int r = 0; r < EACH; r++) {
        s[r].x = decay * s[r].x + token.k[r] * written[0], s[r].y = decay * s[r].y + token.k[r] * written[1];
        s[r].z = decay * s[r].z + token.k[r] * written[2], s[r].w = decay * s[r].w + token.k[r] * written[3];
      }
    }
    if (!FEW)
      if (const u64 save = saves[i]; save) store_state(save);
  }
  store_state(states[text]);
  if constexpr (NORMED) {
    float sum = gives ? given * given : 0;
#pragma unroll
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, d);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += sums[w];
    if (gives) {
      const float gate = activated<SILU>(TYPE::to_float(z[(size_t)text * z_stride + head * VALUES + column + own]));
      y[((size_t)text * heads + head) * VALUES + column + own] = (u16)TYPE::pack_finite(given * rsqrtf(sum / VALUES + epsilon) * norm[column + own] * gate, 0);
    }
  }
}
