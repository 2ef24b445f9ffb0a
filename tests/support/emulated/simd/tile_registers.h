// The tile registers of AMX and what simd/tile_registers.h does with them, to run the level amx on any machine, slowly.
#pragma once
#include <cstdint>
#include <cstring>

namespace BILLFISH_ISA {

struct TileShapes {
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

inline TileShapes tile_shapes_now;
inline uint8_t tile_registers_now[8][16][64];

struct TileRegisters {
  explicit TileRegisters(const TileShapes& shapes) {
    tile_shapes_now = shapes;
    std::memset(tile_registers_now, 0, sizeof tile_registers_now);
  }
};

template <int TILE> inline void clear_tile() { std::memset(tile_registers_now[TILE], 0, sizeof tile_registers_now[TILE]); }
template <int TILE> inline void load_tile(const void* p, int64_t stride) {
  clear_tile<TILE>();
  for (int row = 0; row < tile_shapes_now.rows[TILE]; row++)
    std::memcpy(tile_registers_now[TILE][row], static_cast<const uint8_t*>(p) + row * stride, tile_shapes_now.row_bytes[TILE]);
}
template <int TILE> inline void store_tile(int32_t (&to)[16][16]) { std::memcpy(to, tile_registers_now[TILE], sizeof to); }
template <int SUMS, int A, int B> inline void multiply_tiles() {
  const int k = tile_shapes_now.row_bytes[A];
  for (int row = 0; row < 16; row++)
    for (int column = 0; column < 16; column++) {
      int32_t sum;
      std::memcpy(&sum, tile_registers_now[SUMS][row] + column * 4, 4);
      for (int i = 0; i < k; i++) sum += int8_t(tile_registers_now[A][row][i]) * int8_t(tile_registers_now[B][i / 4][column * 4 + i % 4]);
      std::memcpy(tile_registers_now[SUMS][row] + column * 4, &sum, 4);
    }
}

}  // namespace BILLFISH_ISA
