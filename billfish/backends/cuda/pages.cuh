// The memory of keys and values: pages of 64 positions. A layer's part of a page is [keys, values][kv_heads][64][WIDE] of 16-bit numbers, from
// `offset` bytes on.
//
// WIDE is HEAD, the numbers of a head, rounded up to a multiple of 64. The 16 bytes j of position p are at j ^ (p % 8). So a copy of
// 64 positions as they lie is a tile in shared memory of which eight rows lie in different banks.
#pragma once
#include "device.cuh"

constexpr int PAGE = 64, WIDE = (HEAD + 63) / 64 * 64, ROW_BYTES = WIDE * 2, TILE_BYTES = PAGE * ROW_BYTES;

// Where number i of row p is in a tile.
DEVICE u32 in_tile(int p, int i) { return p * ROW_BYTES + ((i >> 3 ^ p & 7) << 4) + (i & 7) * 2; }
// The tile of one head, of keys (0) or values (1), in a page.
DEVICE u64 tile_at(u64 page, int offset, int values, int kv_heads, int head) { return page + offset + (size_t)(values * kv_heads + head) * TILE_BYTES; }
