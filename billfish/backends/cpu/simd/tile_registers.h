// AMX: the tile registers of x86, 16 rows of up to 64 bytes each, and their products of int8.
//
// Instructions are written out because gcc's intrinsics do not say that they read memory.
#pragma once
#include <cstdint>

namespace BILLFISH_ISA {

// The shape of each tile register, as LDTILECFG reads it.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// A thread's tile registers, from here on to the end of the object's life. Then they have the shapes from before, which another library of the
// process, such as llama.cpp, may have set once for all of its calls.
class TileRegisters {
 public:
  explicit TileRegisters(const TileShapes& shapes) {
    asm volatile("sttilecfg %0" : "=m"(before));
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  ~TileRegisters() { asm volatile("ldtilecfg %0" : : "m"(before)); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

 private:
  TileShapes before;
};

template <int TILE> inline void clear_tile() { asm volatile("tilezero %%tmm%c0" : : "i"(TILE)); }
template <int TILE> inline void load_tile(const void* p, int64_t stride) {
#if defined(__clang__)  // has no operand for memory of any size
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(TILE) : "memory");
#else
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(TILE), "m"(*static_cast<const uint8_t(*)[]>(p)));
#endif
}
template <int TILE> inline void store_tile(int32_t (&to)[16][16]) {
  asm volatile("tilestored %%tmm%c3, (%1,%2,1)" : "=m"(to) : "r"(&to), "r"(int64_t(64)), "i"(TILE));
}
// SUMS [16][16] += A [16][k] times B [k / 4][16][4].
template <int SUMS, int A, int B> inline void multiply_tiles() { asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(A), "i"(B)); }

}  // namespace BILLFISH_ISA
