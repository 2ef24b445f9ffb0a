// x [m, k] to bytes with a float32 scale for each row, for gemm_bytes.cu: its largest magnitude is 448 in E4M3, or 127 in int8. bytes
// [m, stride], then a RowOfX for each row. Each 16 k lie in the order of bytes.cuh; k beyond the last are 0. One CTA a row. A row that has NaN
// or an infinity gets a scale of NaN, and so all of its y.
//
// Compiled with TYPE, INTEGERS, THREADS, STEEPNESS (whether `steep` is wanted), and HELD: blocks of 16 k that a thread keeps in registers. Further
// ones are read twice. A warp has 32 blocks at a time, a part.
#include "row_of_x.cuh"

constexpr float LARGEST = INTEGERS ? 127 : 448;
constexpr int WARPS = THREADS / 32;

// The larger one of both numbers in both halves of a register.
DEVICE u32 largest_of_pairs(u32 a, u32 b) { u32 r; asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }

struct Sixteen {
  u32 pairs[8];

  __device__ __forceinline__ void load(const u16* x, int from, int k) {
    if (from + 16 <= k) {
      const uint4 low = *(const uint4*)(x + from), high = *(const uint4*)(x + from + 8);
      pairs[0] = low.x, pairs[1] = low.y, pairs[2] = low.z, pairs[3] = low.w;
      pairs[4] = high.x, pairs[5] = high.y, pairs[6] = high.z, pairs[7] = high.w;
    } else {
#pragma unroll
      for (int p = 0; p < 8; p++) {
        const int i = from + p * 2;
        pairs[p] = (i < k ? x[i] : 0) | (u32)(i + 1 < k ? x[i + 1] : 0) << 16;
      }
    }
  }
  // Bits of the largest magnitude, which are in the order of magnitudes, infinity and NaN last.
  __device__ __forceinline__ u32 largest() const {
    u32 most = 0;
#pragma unroll
    for (int p = 0; p < 8; p++) most = largest_of_pairs(most, pairs[p] & 0x7fff7fff);
    return max(most & 0xffff, most >> 16);
  }
  __device__ __forceinline__ void store(u8* to, float by) const {
    u32 words[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const u32 first = pairs[c], later = pairs[c + 4];
      words[c] = bytes(number(first) * by, number(later) * by) | bytes(number(first >> 16) * by, number(later >> 16) * by) << 16;
    }
    *(uint4*)to = make_uint4(words[0], words[1], words[2], words[3]);
  }
  static __device__ __forceinline__ float number(u32 bits) { return TYPE::to_float((u16)bits); }
  static __device__ __forceinline__ u32 bytes(float low, float high) {
    if constexpr (INTEGERS) return (__float2int_rn(low) & 255) | (__float2int_rn(high) & 255) << 8;
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS) marlin_quantize_rows(const u16* __restrict__ x, u8* __restrict__ bytes, int k, int x_stride, int stride) {
  __shared__ u32 largest[WARPS];
  __shared__ float sums[WARPS];
  const int blocks = stride / 16, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u16* from = x + (size_t)blockIdx.x * x_stride;
  u8* to = bytes + (size_t)blockIdx.x * stride;
  RowOfX& row = ((RowOfX*)(bytes + (size_t)gridDim.x * stride))[blockIdx.x];
  let_next_start();  // its weights do not depend on x
  wait_for_previous();
  Sixteen held[HELD], other;
  u32 peaks[HELD], most = 0;
  float sum = 0;  // of peaks
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const int block = threadIdx.x + i * THREADS;
    peaks[i] = 0;
    if (block < blocks) held[i].load(from, block * 16, k), peaks[i] = held[i].largest();
    most = max(most, peaks[i]), sum += TYPE::to_float((u16)peaks[i]);
  }
  for (int block = threadIdx.x + HELD * THREADS; block < blocks; block += THREADS) {
    other.load(from, block * 16, k);
    const u32 peak = other.largest();
    most = max(most, peak), sum += TYPE::to_float((u16)peak);
  }
  most = __reduce_max_sync(0xffffffff, most);
  if constexpr (STEEPNESS)
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffff, sum, by);
  if (lane == 0) largest[warp] = most, sums[warp] = sum;
  if (threadIdx.x == 0) row.steep = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < WARPS; i++) most = max(most, largest[i]);
  const float top = TYPE::to_float((u16)most);
  const bool finite = top < INFINITE;
  if (threadIdx.x == 0) row.scale = finite ? top / LARGEST : __int_as_float(0x7fffffff);
  const float inverse = LARGEST / top, by = finite && inverse < INFINITE ? inverse : 0;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const int block = threadIdx.x + i * THREADS;
    if (block < blocks) held[i].store(to + block * 16, by);
  }
  for (int block = threadIdx.x + HELD * THREADS; block < blocks; block += THREADS) other.load(from, block * 16, k), other.store(to + block * 16, by);
  if constexpr (!STEEPNESS) return;
  sum = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) sum += sums[i];
  const float mean = (sum * by - LARGEST) / blocks;
  if (by == 0 || LARGEST < STEEP_ROW * mean) return;
  auto note = [&](int part, u32 peak) {
    const int peaks = __reduce_add_sync(0xffffffff, __float2int_rn(TYPE::to_float((u16)peak) * by * 16));
    if (lane == 0 && peaks > (int)(STEEP_PART * 32 * 16 * mean)) atomicOr(&row.steep, 1u << part % 32);
  };
#pragma unroll
  for (int i = 0; i < HELD; i++) note(warp + i * WARPS, peaks[i]);
  for (int part = warp + HELD * WARPS; part * 32 < blocks; part += WARPS) {
    const int block = part * 32 + lane;
    if (block < blocks) other.load(from, block * 16, k);
    note(part, block < blocks ? other.largest() : 0);
  }
}
