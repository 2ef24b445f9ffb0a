// The gated delta rule, or the scan of Mamba-2, token by token: states S [KEYS][VALUES] of heads, each in registers while it goes through its tokens.
//
// In memory a state is [VALUES / 8][KEYS][8]. A warp has eight columns: a lane has a half of them in every 16th row, so that a warp's load is 512 bytes in a
// row. Memory moves each state once in a launch. With S' = decay S, the delta rule writes what k does not recall yet,
//   d = beta (v - S'^T k),  S = S' + k d^T,  out = S^T q = S'^T q + (k q) d,
// so S^T k and S^T q are summed together. Mamba-2 has d = step x, and out = S^T c + skip x.
//
// Compiled with TYPE, KEYS, VALUES, WARPS, DELTA, TILED (value head i goes with key head i % key_heads; else neighbours share one) and FEW: a decode step, where
// a row is the next token of a sequence, or a drafted one behind it. A CTA takes all rows of a sequence; what is behind each goes to its own place in `states`, of which
// the first is where the sequence begins. FEW and DELTA: a CTA has all columns of a head, and y = norm(out) * SiLU(z) instead of `out`.
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
// Of a sequence's memory this layer's states begin at state_at. out [rows][heads][VALUES]. chunks, ranges, saves: as in keep_inputs.cu; with FEW
// chunks is as in convolution.cuh.
extern "C" __global__ void __launch_bounds__(WARPS * 32, FEW && WARPS <= 16 ? 2 : 1)
marlin_recurrence(const float* kq, const float* overlaps, const float* v, const float2* gates, const float* __restrict__ skips, const u64* states, const int4* chunks,
                  const int2* ranges, const u64* saves, float* out, const u16* z, const float* __restrict__ norm, u16* y, float epsilon, int z_stride, int state_at,
                  int key_heads, int heads) {
  __shared__ float sums[WARPS];
  const int head = blockIdx.y, text = blockIdx.z, key_head = TILED ? head % key_heads : head / (heads / key_heads);
  constexpr int OWN = DELTA ? 2 : 3;  // the bit from which on a lane's number says which column's output it gets
  // With several rows, FEW has no register left for what a thread's number gives: it is worked out again for each.
  const auto thread = [] { return FEW ? opaque(threadIdx.x) : threadIdx.x; };
  const auto eight_of = [&](int t) { return int(blockIdx.x * WARPS + (t >> 5)); };
  let_next_start();
  float4 s[EACH];
  const auto state_in = [&](u64 place) {
    const int t = thread();
    return (float*)place + (size_t)state_at + ((size_t)head * VALUES / 8 + eight_of(t)) * KEYS * 8 + (t & 31) * 4;
  };
  const auto load_state = [&] {
    const float* from = state_in(states[text]);
#pragma unroll
    for (int i = 0; i < EACH; i++) s[i] = *(const float4*)(from + i * 128);
  };
  const auto store_state = [&](u64 place) {
    float* to = state_in(place);
#pragma unroll
    for (int i = 0; i < EACH; i++) *(float4*)(to + i * 128) = s[i];
  };
  const int2 range = FEW ? make_int2(0, ((const int*)chunks)[text]) : ranges[text];
  if (FEW && range.y == 0) return wait_for_previous();  // a drafted row: the CTA of its sequence takes it
  if (FEW) load_state();  // the step before wrote it, and that has ended
  wait_for_previous();
  if (range.y == 0) return;
  if (!FEW) load_state();
  const int4 last = FEW ? make_int4(text, range.y, text, text) : chunks[range.x + range.y - 1];
  const int end = last.x + last.y;
  const float skip = DELTA ? 0 : skips[head];
  const auto fetch = [&](int row) {
    const int t = thread(), lane = t & 31, column = eight_of(t) * 8 + (lane & 1) * 4;
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
  Token next;
  if (!FEW) next = fetch(last.w);
  for (int i = range.x; i < (FEW ? 1 : range.x + range.y); i++) {
    const int4 chunk = FEW ? last : chunks[i];
    for (int row = chunk.x; row < chunk.x + chunk.y; row++) {
      const Token token = FEW ? fetch(row) : next;
      if (!FEW && row + 1 < end) next = fetch(row + 1);
      const int id = thread(), lane = id & 31, own = lane >> OWN & 3, column = eight_of(id) * 8 + (lane & 1) * 4;
      const bool gives = DELTA ? (lane & 18) == 16 : (lane & 6) == 0;
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
      if (FEW) store_state(states[row]);
      if constexpr (NORMED) {
        float sum = gives ? given * given : 0;
#pragma unroll
        for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, d);
        if (row > text) __syncthreads();  // the sums of the row before are read
        if (lane == 0) sums[id >> 5] = sum;
        __syncthreads();
        sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += sums[w];
        if (gives) {
          const float gate = activated<SILU>(TYPE::to_float(z[(size_t)row * z_stride + head * VALUES + column + own]));
          y[((size_t)row * heads + head) * VALUES + column + own] = (u16)TYPE::pack_finite(given * rsqrtf(sum / VALUES + epsilon) * norm[column + own] * gate, 0);
        }
      }
    }
    if (!FEW)
      if (const u64 save = saves[i]; save) store_state(save);
  }
  if (!FEW) store_state(states[text]);
}
