// Chunks of up to 64 tokens in shared memory: rows of k, q or w, KEYS numbers of float16 each, as operands of the tensor cores.
//
// A fragment of 16 x 16 float16 numbers becomes two of 16 x 8 TF32 numbers without a move between lanes: where an operand's column c is the chunk's 2 c, and
// c + 4 its 2 c + 1, both halves of a pair are the lane's own. The other operand has its rows in the same order.
#pragma once
#include "device.cuh"

constexpr int CHUNK = 64;
constexpr int ROW_BYTES = KEYS * 2 + 16;  // eight rows of a fragment are in different banks
static_assert(KEYS % 16 == 0 && VALUES % 16 == 0, "operands have 16 columns");

DEVICE int key_head_of(int head, int key_heads, int heads) { return TILED ? head % key_heads : head / (heads / key_heads); }

// Rows of WIDTH numbers of SIZE bytes, `stride` numbers apart, to rows that are TO_BYTES apart; those from `count` to 64 become zero. By all THREADS.
template <int THREADS, int WIDTH, int SIZE, int TO_BYTES> DEVICE void copy_rows(u32 to, const void* from, int stride, int count) {
  constexpr int PIECES = WIDTH * SIZE / 16;  // of a row
#pragma unroll
  for (int i = 0; i < (CHUNK * PIECES + THREADS - 1) / THREADS; i++) {
    const int at = i * THREADS + threadIdx.x, row = at / PIECES, piece = at % PIECES;
    if (CHUNK * PIECES % THREADS && row >= CHUNK) continue;
    copy_async(to + row * TO_BYTES + piece * 16, (const u8*)from + (size_t)(row < count ? row : 0) * stride * SIZE + piece * 16, row < count ? 16 : 0);
  }
}

// Where a lane's row of a 16 x 16 fragment is: of the left operand, of the right one (two of eight columns), and of a left one that is transposed.
DEVICE u32 left_offset(int lane, int step) { return ((lane >> 3 & 1) * 8 + (lane & 7)) * ROW_BYTES + (step * 2 + (lane >> 4)) * 16; }
DEVICE u32 right_offset(int lane, int step) { return ((lane >> 4) * 8 + (lane & 7)) * ROW_BYTES + (step * 2 + (lane >> 3 & 1)) * 16; }
DEVICE u32 transposed_offset(int lane, int token, int tile) { return (token + (lane >> 4) * 8 + (lane & 7)) * ROW_BYTES + (tile * 2 + (lane >> 3 & 1)) * 16; }

DEVICE void load_matrices_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE float half_at(const u8* shared, int row, int column) { return F16::to_float(*(const u16*)(shared + row * ROW_BYTES + column * 2)); }

// The nearest TF32 number.
DEVICE float rounded(float v) { u32 r; asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(v)); return __uint_as_float(r); }
DEVICE void multiply_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
// Two fragments of TF32 of one of float16.
DEVICE void widen(float (&first)[4], float (&second)[4], const u32 (&half)[4]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    first[i] = F16::to_float((u16)half[i]), first[i + 2] = F16::to_float((u16)(half[i] >> 16));
    second[i] = F16::to_float((u16)half[i + 2]), second[i + 2] = F16::to_float((u16)(half[i + 2] >> 16));
  }
}
// 16 x 8 numbers of float32 in shared memory, `stride` apart, at the lane's row g and column 2 c: as above, in two parts, whose sum has 22 bits.
DEVICE void load_split(float (&high)[4], float (&low)[4], const float* at, int stride) {
  const float2 upper = *(const float2*)at, lower = *(const float2*)(at + 8 * stride);
  const float v[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
  for (int i = 0; i < 4; i++) high[i] = rounded(v[i]), low[i] = rounded(v[i] - high[i]);
}
// c += a b nearly as in float32: all products of two parts but the smallest.
DEVICE void multiply_split(float (&c)[4], const float (&a_high)[4], const float (&a_low)[4], float b0, float b1) {
  const float high0 = rounded(b0), high1 = rounded(b1);
  multiply_tf32(c, a_low, high0, high1);
  multiply_tf32(c, a_high, rounded(b0 - high0), rounded(b1 - high1));
  multiply_tf32(c, a_high, high0, high1);
}
