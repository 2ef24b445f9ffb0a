// Which rows of x a tile has, which expert's weights multiply them, and where its columns of y are.
//
// EXPERTS: weights are a stack of matrices, one expert after the other, and x has their rows one expert after the other. A *visit* is a
// (token, expert) pair. route.cu sorts the pairs by expert and writes a table: the number of entries, then one entry for each EXPERTS
// rows of an expert, (expert, its first row, its rows, its first entry). `order` says which pair a row is, where y is to
// have them in the order of tokens. Tiles of an expert with the same columns follow each other.
#pragma once
#include "device.cuh"

#ifdef EXPERTS
constexpr bool ROUTED = true;
#else
constexpr bool ROUTED = false;
#endif

// Where the bias of a column is: where columns are GATED, those of all gates come first, then those of all numbers.
DEVICE int bias_at(int column, int n) {
  if constexpr (ROUTED && GATED) return (column & 8 ? n / 2 : 0) + column / 16 * 8 + column % 8;
  else return column;
}

struct Part {
  int expert, row, end, place;  // rows of x up to `end`; `place` counts tiles along the columns of y
};

struct Visits {
  const int4* table;
  const int* order;

  // Tiles, where one row of them has `places`.
  __device__ __forceinline__ int count(int places) const { return table[0].x * places; }
  __device__ __forceinline__ Part part(int i, int places, int width) const {
    const int4 entry = table[1 + i / places];
    const int tiles = (entry.z + width - 1) / width, own = i - entry.w * places, row = own % tiles * width;
    return {entry.x, entry.y + row, entry.y + min(entry.z, row + width), own / tiles};
  }
  __device__ __forceinline__ int out(int row) const { return order ? __ldg(order + row) : row; }
};
