// Codes to bricks: layout.py's pack() on the GPU. One CTA for each brick, those of a row of bricks side by side; gridDim.x holds them
// all, as gridDim.y would end at 65,535.
//
// Compiled with ELEMENT, SCALE, OFFSET, GROUPS, and where codes are: [n, k], of CODE bytes or 16-bit numbers; or, as a file has them, with
// SHIFT to be added, in words of WORD_BITS for each code, [k * WORD_BITS / 32, n], or in rows of blocks: BLOCK codes in BLOCK_BYTES.
// Each of a block's FIELDS has some bits of all its codes: the first bits of `run` codes in as many bytes, the next bits of which are
// the next `run` codes', and so on.
#define TYPE F16
#include "decode.cuh"
#ifndef CODE
#define CODE u8
#endif

#if defined(BLOCK)
struct Field {
  int offset, run, bits;
};
DEVICE u32 read_code(const CODE* codes, int row, int column, int n, int k) {
  constexpr Field fields[] = {FIELDS};
  const u8* block = codes + ((size_t)row * (k / BLOCK) + column / BLOCK) * BLOCK_BYTES;
  u32 code = 0;
  int bits = 0, i = column % BLOCK;
#pragma unroll
  for (int f = 0; f < sizeof(fields) / sizeof(Field); f++) {
    const Field field = fields[f];
    const int together = field.run * (8 / field.bits);  // codes in `run` bytes
    const u32 byte = block[field.offset + i / together * field.run + i % field.run];
    code |= (byte >> i % together / field.run * field.bits & (1 << field.bits) - 1) << bits;
    bits += field.bits;
  }
  return code + SHIFT & 255;
}
#elif defined(WORD_BITS)
DEVICE u32 read_code(const CODE* codes, int row, int column, int n, int k) {
  constexpr int IN_WORD = 32 / WORD_BITS;
  const u32 word = ((const u32*)codes)[(size_t)(column / IN_WORD) * n + row];
  return (word >> column % IN_WORD * WORD_BITS & (1 << WORD_BITS) - 1) + SHIFT & 255;
}
#else
DEVICE u32 read_code(const CODE* codes, int row, int column, int n, int k) { return codes[(size_t)row * k + column]; }
#endif

extern "C" __global__ void marlin_pack(const CODE* __restrict__ codes, const u8* __restrict__ groups, u8* __restrict__ bricks, int n, int k) {
  const int along = (k + 127) / 128, brick = blockIdx.x % along, course = blockIdx.x / along;
  u8* to = bricks + Brick::at(course, brick, (n + 15) / 16, along);
  auto code = [&](int row, int column) -> u32 {
    row += course * 16, column += brick * 128;
    return row < n && column < k ? read_code(codes, row, column, n, k) : 0;
  };
  for (int i = threadIdx.x; i < Brick::code_bytes / 4; i += blockDim.x) {
    u32 q = 0;
    for_each_code(i, [&](int row, int column, int pair, bool odd) {
      const u32 placed = Element::place(code(row, column), pair);
      q |= odd ? __funnelshift_l(placed, placed, SECOND) : placed;
    });
    ((u32*)to)[i] = q;
  }
  constexpr int rest = Brick::bytes - Brick::code_bytes;
  for (int i = threadIdx.x; i < rest; i += blockDim.x) to[Brick::code_bytes + i] = groups[(size_t)blockIdx.x * rest + i];
}
