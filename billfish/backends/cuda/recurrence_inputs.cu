// What a recurrence takes of each row: SiLU(convolution), and the gates of its heads.
//
// A CTA has a head of some rows, a thread one number of it. The first CTAs have key heads: k and q, DELTA of length 1 and q / sqrt(KEYS); for Mamba-2
// a group's b and c as they are. The others have value heads: v, or x, and the gates: the logarithm of the decay, and beta, or the step.
//
// FEW: what is behind each row goes to its own place in `states`, of which the first is where the sequence begins.
//
// Compiled with TYPE, TAPS, KEYS, VALUES, THREADS, DELTA, FEW and HALF (k and q in float16, for the tensor cores).
#include "convolution.cuh"
#include "lanes.cuh"

constexpr int WARPS = THREADS / 32;
constexpr float LENGTH_EPSILON = 1e-6f;

DEVICE float silu(float v) { return v / (1.0f + expf(-v)); }
DEVICE u16 to_half(float v) { return (u16)F16::pack_finite(v, 0); }

constexpr int EACH = FEW ? 1 : PART;  // rows of a CTA

// in [rows, `stride` apart]: channels of k from k_at on, and so on. Of a state the convolution's inputs begin at tail_at. kq [rows][key_heads][2][KEYS],
// overlap [rows][key_heads] = k q, v [rows][heads][VALUES], gates [rows][heads].
extern "C" __global__ void __launch_bounds__(THREADS)
marlin_recurrence_inputs(const u16* in, const u16* betas, const u16* alphas, const float* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ decay,
                         const float* __restrict__ step, const u64* states, const int4* chunks, void* kq, float* overlap, float* v, float2* gates, int stride, int beta_stride,
                         int alpha_stride, int channels, int k_at, int q_at, int v_at, int tail_at, int key_heads, int heads) {
  __shared__ float sums[3][EACH][WARPS];
  __shared__ float2 scales[EACH];
  const bool is_key = blockIdx.x < key_heads;
  const int head = is_key ? blockIdx.x : blockIdx.x - key_heads, size = is_key ? KEYS : VALUES, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const bool any = threadIdx.x < size;
  const int i = any ? threadIdx.x : 0;
  let_next_start();
  const Rows all = rows_of(chunks, blockIdx.y);
  wait_for_previous();
  if (all.count <= 0) return;
  const float* tails = (const float*)states[all.text] + tail_at;
  // FEW: row by row, the last one first, since what is behind the first one goes to where all of them begin.
  for (int left = FEW ? all.count : 1; left > 0; left--) {
    const Rows rows = FEW ? Rows{all.first + left - 1, 1, all.text, all.start} : all;
    // SiLU(convolution) of a channel, for these rows.
    const auto convolve = [&](int channel, float (&out)[EACH]) {
      const float* tail = tails + channel;
      const auto input = [&](int row) { return TYPE::to_float(in[(size_t)row * stride + channel]); };
      float taps[TAPS];
      Window window;
#pragma unroll
      for (int r = 0; r < EACH; r++) out[r] = input(rows.first + min(r, rows.count - 1));  // all are on their way before the first is used
      window.load(rows.first, rows.start, tail, channels, input);
      load_taps(taps, weight, channel, channels);
      const float added = bias ? __ldg(bias + channel) : 0;
#pragma unroll
      for (int r = 0; r < EACH; r++) {
        window.push(out[r]);
        out[r] = silu(window.sum(taps, added));
      }
      if (FEW && any) window.store((float*)states[rows.first] + tail_at + channel, channels);
    };
    if (!is_key) {
      float values[EACH];
      convolve(v_at + head * VALUES + i, values);
#pragma unroll
      for (int r = 0; r < EACH; r++)
        if (any && r < rows.count) v[((size_t)(rows.first + r) * heads + head) * VALUES + i] = values[r];
      if (threadIdx.x < rows.count) {
        const int row = rows.first + threadIdx.x;
        const float x = TYPE::to_float(alphas[(size_t)row * alpha_stride + head]) + step[head], t = x > 20 ? x : log1pf(expf(x));
        const float other = DELTA ? 1.0f / (1.0f + expf(-TYPE::to_float(betas[(size_t)row * beta_stride + head]))) : t;
        gates[(size_t)row * heads + head] = make_float2(decay[head] * t, other);
      }
      continue;
    }
    float k[EACH], q[EACH];
    convolve(k_at + head * KEYS + i, k), convolve(q_at + head * KEYS + i, q);
    const auto sum_up = [&](const float (&a)[EACH], const float (&b)[EACH], int which) {
      float products[EACH];
#pragma unroll
      for (int r = 0; r < EACH; r++) products[r] = any ? a[r] * b[r] : 0;
      const float sum = sum_of_one<1>(products, lane);
      if (lane % (32 / EACH) == 0) sums[which][lane / (32 / EACH)][warp] = sum;
    };
    sum_up(k, k, 0), sum_up(q, q, 1), sum_up(k, q, 2);
    __syncthreads();
    if (threadIdx.x < EACH) {
      float of[3] = {};
      for (int which = 0; which < 3; which++)
        for (int w = 0; w < WARPS; w++) of[which] += sums[which][threadIdx.x][w];
      const float k_scale = DELTA ? rsqrtf(of[0] + LENGTH_EPSILON) : 1, q_scale = DELTA ? rsqrtf(of[1] + LENGTH_EPSILON) * rsqrtf(KEYS) : 1;
      scales[threadIdx.x] = make_float2(k_scale, q_scale);
      if (threadIdx.x < rows.count) overlap[(size_t)(rows.first + threadIdx.x) * key_heads + head] = of[2] * k_scale * q_scale;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < EACH; r++) {
      if (r >= rows.count || !any) continue;
      const size_t at = ((size_t)(rows.first + r) * key_heads + head) * 2 * KEYS + i;
      const float scaled_k = k[r] * scales[r].x, scaled_q = q[r] * scales[r].y;
      if (HALF) ((u16*)kq)[at] = to_half(scaled_k), ((u16*)kq)[at + KEYS] = to_half(scaled_q);
      else ((float*)kq)[at] = scaled_k, ((float*)kq)[at + KEYS] = scaled_q;
    }
  }
}
