// The chunkwise form of a recurrence, what depends on states: a CTA takes WIDE columns of a head's state S through the chunks of a sequence.
//
// With G, u, w and `attention` of chunk_products.cu, behind a state S a chunk of tokens i has
//   d = u - w S (Mamba-2: step x),  out_i = exp(G_i) q_i S + attention_i d (Mamba-2: + skip x_i),  S = exp(G_last) S + sum_i k_i (exp(G_last - G_i) d_i)^T.
// S stays in registers, in float32. Products are TF32's: S, d and attention are rounded to 11 bits, as k, q and w are. Warp i has the tokens from 16 i on
// where rows are tokens, and some sixteens of S's rows otherwise.
//
// Compiled with KEYS, VALUES, WIDE, STAGES (chunks in shared memory), DELTA and TILED.
#include "chunks.cuh"

constexpr int WARPS = 4, EIGHTS = WIDE / 8, TILES = (KEYS / 16 + WARPS - 1) / WARPS;
constexpr int STRIDE = WIDE + 4, ATTENTION_STRIDE = CHUNK + 8;  // numbers: the lanes that read at once are in different banks
constexpr int ROWS_BYTES = CHUNK * ROW_BYTES, STAGE_BYTES = (DELTA ? 3 : 2) * ROWS_BYTES + CHUNK * ATTENTION_STRIDE * 4;
static_assert(WIDE % 8 == 0 && VALUES % WIDE == 0, "operands have 8 columns");

// A lane's numbers of S: rows g and g + 8 of a warp's sixteens, columns 2 c and 2 c + 1 of eight.
typedef float States[TILES][EIGHTS][4];
template <class Use> DEVICE void each_pair(States& s, Use use) {
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, c = threadIdx.x & 3;
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int n = 0; n < EIGHTS; n++)
#pragma unroll
      for (int e = 0; e < 4; e += 2)
        if (const int row = (t * WARPS + warp) * 16 + g + 4 * e; row < KEYS) use(row, n * 8 + 2 * c, s[t][n][e], s[t][n][e + 1]);
}

// kq [rows][key_heads][2][KEYS] and w [rows][heads][KEYS] in float16; u, or x [rows][heads][VALUES]; attention [rows][heads][64]; gates [rows][heads]:
// G, and the step. The rest is as in recurrence.cu.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
marlin_chunk_scan(const u16* kq, const u16* w, const float* u, const float* attention, const float2* gates, const float* __restrict__ skips, const u64* states, const int4* chunks,
                  const int2* ranges, const u64* saves, float* out, int state_at, int key_heads, int heads) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ float2 all_gates[STAGES][CHUNK];
  float* state = (float*)(shared + STAGES * STAGE_BYTES);   // [KEYS][STRIDE]
  float *written = state + KEYS * STRIDE, *kept = written + CHUNK * STRIDE;  // [64][STRIDE]: d, and d times what of it is left at the chunk's end
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3, column = blockIdx.x * WIDE, head = blockIdx.y, text = blockIdx.z;
  const int key_head = key_head_of(head, key_heads, heads);
  let_next_start();
  wait_for_previous();
  const int2 range = ranges[text];
  if (range.y == 0) return;
  const float skip = DELTA ? 0 : skips[head];
  const int end = range.x + range.y;
  // What is read of memory in one turn is used in the next one.
  const auto chunk_at = [&](int i) { return chunks[min(i, end - 1)]; };
  const auto gate_of = [&](int4 chunk) { return gates[(size_t)(chunk.x + min((int)threadIdx.x % CHUNK, chunk.y - 1)) * heads + head]; };
  const auto fetch = [&](int i, int4 chunk, float2 gate) {
    if (i < end) {
      const int stage = (i - range.x) % STAGES;
      const u32 to = shared_address(shared) + stage * STAGE_BYTES, scores = to + (DELTA ? 3 : 2) * ROWS_BYTES;
      const u16* own_kq = kq + ((size_t)chunk.x * key_heads + key_head) * 2 * KEYS;
      const size_t row = (size_t)chunk.x * heads + head;
      copy_rows<WARPS * 32, KEYS, 2, ROW_BYTES>(to, own_kq, 2 * KEYS * key_heads, chunk.y);
      copy_rows<WARPS * 32, KEYS, 2, ROW_BYTES>(to + ROWS_BYTES, own_kq + KEYS, 2 * KEYS * key_heads, chunk.y);
      if (DELTA) copy_rows<WARPS * 32, KEYS, 2, ROW_BYTES>(to + 2 * ROWS_BYTES, w + row * KEYS, KEYS * heads, chunk.y);
      copy_rows<WARPS * 32, CHUNK, 4, ATTENTION_STRIDE * 4>(scores, attention + row * CHUNK, CHUNK * heads, chunk.y);
      if (threadIdx.x < CHUNK) all_gates[stage][threadIdx.x] = gate;
    }
    copy_commit();
  };
  int4 chunk = chunk_at(range.x), next = chunk_at(range.x + 1), later = chunk_at(range.x + 2);
  fetch(range.x, chunk, gate_of(chunk));
  if (STAGES > 1) fetch(range.x + 1, next, gate_of(next));
  States s;
  const size_t at = (size_t)state_at + ((size_t)head * VALUES + column) * KEYS;  // [WIDE / 8][KEYS][8]
  const auto store_state = [&](u64 place) {
    float* to = (float*)place + at;
    each_pair(s, [&](int row, int col, float low, float high) { *(float2*)(to + (col / 8 * KEYS + row) * 8 + col % 8) = make_float2(low, high); });
  };
  const float* own = (const float*)states[text] + at;
  each_pair(s, [&](int row, int col, float& low, float& high) {
    const float2 both = *(const float2*)(own + (col / 8 * KEYS + row) * 8 + col % 8);
    low = both.x, high = both.y;
  });
  for (int i = range.x; i < end; i++) {
    const int4 coming = STAGES > 1 ? later : next, last = chunk_at(i + 3);
    const float2 gate_coming = gate_of(coming);
    const u64 save = saves[i];
    const int first = chunk.x, count = chunk.y, stage = (i - range.x) % STAGES;
    const u32 k_at = shared_address(shared) + stage * STAGE_BYTES, q_at = k_at + ROWS_BYTES, w_at = q_at + ROWS_BYTES;
    const float* scores = (const float*)(shared + stage * STAGE_BYTES + (DELTA ? 3 : 2) * ROWS_BYTES);
    float2 fresh[EIGHTS][2];  // u or x
#pragma unroll
    for (int n = 0; n < EIGHTS; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int token = warp * 16 + g + 8 * h;
        fresh[n][h] = token < count ? *(const float2*)(u + ((size_t)(first + token) * heads + head) * VALUES + column + n * 8 + 2 * c) : make_float2(0, 0);
      }
    each_pair(s, [&](int row, int col, float low, float high) { *(float2*)(state + row * STRIDE + col) = make_float2(rounded(low), rounded(high)); });
    copy_wait<STAGES - 1>();
    __syncthreads();
    const float2* of_gates = all_gates[stage];
    const float total = of_gates[CHUNK - 1].x;
    float recalled[EIGHTS][4] = {}, answers[EIGHTS][4] = {};  // w S, q S
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) {
      u32 half[4];
      float q[2][4], of_w[2][4];
      load_matrices(half, q_at + warp * 16 * ROW_BYTES + left_offset(lane, step));
      widen(q[0], q[1], half);
      if (DELTA) {
        load_matrices(half, w_at + warp * 16 * ROW_BYTES + left_offset(lane, step));
        widen(of_w[0], of_w[1], half);
      }
#pragma unroll
      for (int n = 0; n < EIGHTS; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float* right = state + (step * 16 + h * 8 + 2 * c) * STRIDE + n * 8 + g;
          multiply_tf32(answers[n], q[h], right[0], right[STRIDE]);
          if (DELTA) multiply_tf32(recalled[n], of_w[h], right[0], right[STRIDE]);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int token = warp * 16 + g + 8 * h;
      const float2 gate = of_gates[token];
      const float grown = expf(gate.x), left = expf(total - gate.x);
#pragma unroll
      for (int n = 0; n < EIGHTS; n++) {
        const float low = DELTA ? fresh[n][h].x - recalled[n][2 * h] : gate.y * fresh[n][h].x, high = DELTA ? fresh[n][h].y - recalled[n][2 * h + 1] : gate.y * fresh[n][h].y;
        const int to = token * STRIDE + n * 8 + 2 * c;
        *(float2*)(written + to) = make_float2(rounded(low), rounded(high));
        *(float2*)(kept + to) = make_float2(rounded(left * low), rounded(left * high));
        answers[n][2 * h] = answers[n][2 * h] * grown + skip * fresh[n][h].x, answers[n][2 * h + 1] = answers[n][2 * h + 1] * grown + skip * fresh[n][h].y;
      }
    }
    __syncthreads();
    for (int step = 0; step <= warp; step++) {  // sixteen tokens, up to the warp's own
      const float* left = scores + (warp * 16 + g) * ATTENTION_STRIDE + step * 16 + 2 * c;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float2 upper = *(const float2*)(left + h * 8), lower = *(const float2*)(left + 8 * ATTENTION_STRIDE + h * 8);
        const float a[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
        for (int n = 0; n < EIGHTS; n++) {
          const float* right = written + (step * 16 + h * 8 + 2 * c) * STRIDE + n * 8 + g;
          multiply_tf32(answers[n], a, right[0], right[STRIDE]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < EIGHTS; n++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (const int token = warp * 16 + g + 8 * h; token < count)
          *(float2*)(out + ((size_t)(first + token) * heads + head) * VALUES + column + n * 8 + 2 * c) = make_float2(answers[n][2 * h], answers[n][2 * h + 1]);
    const float remains = expf(total);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      if ((t * WARPS + warp) * 16 >= KEYS) continue;
#pragma unroll
      for (int n = 0; n < EIGHTS; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[t][n][e] *= remains;
#pragma unroll
      for (int step = 0; step < CHUNK / 16; step++) {
        u32 half[4];
        float a[2][4];
        load_matrices_transposed(half, k_at + transposed_offset(lane, step * 16, t * WARPS + warp));
        widen(a[0], a[1], half);
#pragma unroll
        for (int n = 0; n < EIGHTS; n++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const float* right = kept + (step * 16 + h * 8 + 2 * c) * STRIDE + n * 8 + g;
            multiply_tf32(s[t][n], a[h], right[0], right[STRIDE]);
          }
      }
    }
    if (save) store_state(save);
    __syncthreads();
    fetch(i + STAGES, coming, gate_coming);
    chunk = next, next = later, later = last;
  }
  store_state(states[text]);
}
