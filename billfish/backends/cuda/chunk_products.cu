// The chunkwise form of a recurrence, what does not depend on states: a CTA has a head of a chunk of up to 64 tokens.
//
// With G the sums of a chunk's logarithms of decay, up to each token:
//   attention[i][j] = exp(G_i - G_j) q_i k_j for j <= i
// and for the delta rule (DELTA) with A[i][j] = beta_i exp(G_i - G_j) k_i k_j for j < i
//   u = (I + A)^-1 (beta v),  w = (I + A)^-1 (beta exp(G) k),
// such that a chunk behind a state S writes d = u - w S. Both are found by forward substitution, sixteen rows at a time: what is left of the right side, times
// the inverse of sixteen rows of I + A. These products have nearly float32's bits (multiply_split); those of k and q are float16's. G is where the logarithms
// were, u where v was.
//
// Compiled with KEYS, VALUES, DELTA and TILED.
#include "chunks.cuh"

constexpr int THREADS = 256, COLUMNS = KEYS + VALUES, AT_ONCE = THREADS / 32 * 16;             // columns of u and w: a warp has sixteen
constexpr int A_STRIDE = CHUNK + 8, INVERSE_STRIDE = 24, SOLVED_STRIDE = AT_ONCE + 4;  // numbers: the lanes that read at once are in different banks

extern "C" __global__ void __launch_bounds__(THREADS)
marlin_chunk_products(const u16* kq, float* v, float2* gates, const int4* chunks, float* attention, u16* w, int key_heads, int heads) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ float sums[CHUNK], betas[CHUNK];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3, head = blockIdx.x;
  const u32 k_at = shared_address(shared), q_at = k_at + CHUNK * ROW_BYTES;
  float* a = (float*)(shared + 2 * CHUNK * ROW_BYTES);                                      // A
  float *inverses = a + CHUNK * A_STRIDE, *solved = inverses + CHUNK * INVERSE_STRIDE;  // of sixteens of I + A; u or w
  let_next_start();
  wait_for_previous();
  const int4 chunk = chunks[blockIdx.y];
  if (chunk.y <= 0) return;
  const int first = chunk.x, count = chunk.y;
  const u16* own_kq = kq + ((size_t)first * key_heads + key_head_of(head, key_heads, heads)) * 2 * KEYS;
  copy_rows<THREADS, KEYS, 2, ROW_BYTES>(k_at, own_kq, 2 * KEYS * key_heads, count);
  copy_rows<THREADS, KEYS, 2, ROW_BYTES>(q_at, own_kq + KEYS, 2 * KEYS * key_heads, count);
  copy_commit();
  if (warp == 0) {  // tokens 2 lane and 2 lane + 1
    float2 of[2];
#pragma unroll
    for (int i = 0; i < 2; i++) of[i] = 2 * lane + i < count ? gates[(size_t)(first + 2 * lane + i) * heads + head] : make_float2(0, 0);
    float sum = of[0].x + of[1].x;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float before = __shfl_up_sync(0xffffffff, sum, d);
      if (lane >= d) sum += before;
    }
    const float before = __shfl_up_sync(0xffffffff, sum, 1), low = (lane ? before : 0) + of[0].x, high = low + of[1].x;
    sums[2 * lane] = low, sums[2 * lane + 1] = high, betas[2 * lane] = of[0].y, betas[2 * lane + 1] = of[1].y;
    if (2 * lane < count) gates[(size_t)(first + 2 * lane) * heads + head].x = low;
    if (2 * lane + 1 < count) gates[(size_t)(first + 2 * lane + 1) * heads + head].x = high;
  }
  copy_wait<0>();
  __syncthreads();
  // Warps 0 to 3: rows of k k, sixteen each; warps 4 to 7: of q k.
  const int tile = warp & 3;
  const bool of_q = warp >= 4;
  if (DELTA || of_q) {
    float sum[CHUNK / 8][4] = {};
    const u32 rows = (of_q ? q_at : k_at) + tile * 16 * ROW_BYTES;
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) {
      u32 left[4];
      load_matrices(left, rows + left_offset(lane, step));
#pragma unroll
      for (int n = 0; n < CHUNK / 16; n++) {
        u32 right[4];
        load_matrices(right, k_at + n * 16 * ROW_BYTES + right_offset(lane, step));
        F16::mma(sum[2 * n], left, right[0], right[1]);
        F16::mma(sum[2 * n + 1], left, right[2], right[3]);
      }
    }
    float* to = attention + ((size_t)first * heads + head) * CHUNK;
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int i = tile * 16 + g + 4 * e, j = n * 8 + 2 * c;
        float2 both = make_float2(0, 0);
        if (j < i || (of_q && j == i)) both.x = sum[n][e] * expf(sums[i] - sums[j]) * (of_q ? 1 : betas[i]);
        if (j + 1 < i || (of_q && j + 1 == i)) both.y = sum[n][e + 1] * expf(sums[i] - sums[j + 1]) * (of_q ? 1 : betas[i]);
        if (of_q && i < count) *(float2*)(to + (size_t)i * heads * CHUNK + j) = make_float2(rounded(both.x), rounded(both.y));
        if (!of_q) *(float2*)(a + i * A_STRIDE + j) = both;
      }
  }
  if constexpr (DELTA) {
    __syncthreads();
    if (threadIdx.x < CHUNK) {  // a column of the inverse of sixteen rows
      const int block = threadIdx.x & ~15, column = threadIdx.x & 15;
      float x[16];
#pragma unroll
      for (int i = 0; i < 16; i++) {
        x[i] = i == column;
#pragma unroll
        for (int j = 0; j < i; j++) x[i] -= a[(block + i) * A_STRIDE + block + j] * x[j];
        inverses[(block + i) * INVERSE_STRIDE + column] = x[i];
      }
    }
    __syncthreads();
    for (int column = warp * 16; column < COLUMNS; column += AT_ONCE) {
      const bool of_v = column < VALUES;
      float* own = solved + warp * 16;  // of this warp alone
      float right_side[CHUNK / 16][2][4];  // all are on their way before the first is used
#pragma unroll
      for (int i = 0; i < CHUNK / 8; i++) {
        const int token = i * 8 + g;
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const int at = column + n * 8 + 2 * c;
          float2 both = make_float2(0, 0);
          if (!of_v) both = make_float2(half_at(shared, token, at - VALUES), half_at(shared, token, at - VALUES + 1));
          else if (token < count) both = *(const float2*)(v + ((size_t)(first + token) * heads + head) * VALUES + at);
          right_side[i / 2][n][i % 2 * 2] = both.x, right_side[i / 2][n][i % 2 * 2 + 1] = both.y;
        }
      }
#pragma unroll
      for (int block = 0; block < CHUNK; block += 16) {
        float(&x)[2][4] = right_side[block / 16];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int token = block + g + 8 * h;
          const float factor = betas[token] * (of_v ? 1 : expf(sums[token]));
#pragma unroll
          for (int n = 0; n < 2; n++) x[n][2 * h] *= factor, x[n][2 * h + 1] *= factor;
        }
        // x += left [16][8] own [8][16], from row `row` of `own` on.
        const auto add = [&](float (&to)[2][4], const float* left, int stride, float sign, int row) {
          float high[4], low[4];
          load_split(high, low, left + g * stride + 2 * c, stride);
#pragma unroll
          for (int n = 0; n < 2; n++) {
            const float* right = own + (row + 2 * c) * SOLVED_STRIDE + n * 8 + g;
            multiply_split(to[n], high, low, sign * right[0], sign * right[SOLVED_STRIDE]);
          }
        };
        const auto put = [&](const float (&from)[2][4]) {
          __syncwarp();
#pragma unroll
          for (int n = 0; n < 2; n++)
#pragma unroll
            for (int h = 0; h < 2; h++)
              *(float2*)(own + (block + g + 8 * h) * SOLVED_STRIDE + n * 8 + 2 * c) = make_float2(from[n][2 * h], from[n][2 * h + 1]);
          __syncwarp();
        };
#pragma unroll
        for (int j = 0; j < block; j += 8) add(x, a + block * A_STRIDE + j, A_STRIDE, -1, j);
        put(x);
        float y[2][4] = {};
        add(y, inverses + block * INVERSE_STRIDE, INVERSE_STRIDE, 1, block), add(y, inverses + block * INVERSE_STRIDE + 8, INVERSE_STRIDE, 1, block + 8);
        put(y);
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int token = block + g + 8 * h, at = column + n * 8 + 2 * c;
            if (token >= count) continue;
            const size_t row = (size_t)(first + token) * heads + head;
            if (of_v) *(float2*)(v + row * VALUES + at) = make_float2(y[n][2 * h], y[n][2 * h + 1]);
            else *(u32*)(w + row * KEYS + at - VALUES) = F16::pack(y[n][2 * h], y[n][2 * h + 1]);
          }
      }
    }
  }
}
