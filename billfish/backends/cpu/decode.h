// Packed codes to one byte each: the only place that knows how many bits a code has.
//
// A *block* is TILE_ROWS rows by 32 k. Unpacked it is VECTORS byte vectors; vector v holds the k-quad v / ROW_VECTORS of
// LANES rows, byte 4*lane + j being k = 4*quad + j of that row, which is the order in which dot() wants them.
// Packed, every plane of bits keeps the lanes and stacks several vectors in one: nibbles of vectors 2i and 2i+1 share
// a byte vector, 2-bit fields of 4i..4i+3, single bits of 8i..8i+7. Decoding is then shifts and masks, no shuffles.
#pragma once
#include <type_traits>
#include <utility>

namespace BILLFISH_ISA {

constexpr int VECTOR_BYTES = 4 * LANES;
constexpr int ROW_VECTORS = TILE_ROWS / LANES;
constexpr int VECTORS = 8 * ROW_VECTORS;

template <class F, int... I> inline __attribute__((always_inline)) void unroll_over(F&& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
// f(0), f(1), ... f(N - 1), with the index as a compile-time constant.
template <int N, class F> inline __attribute__((always_inline)) void unroll(F&& f) {
  unroll_over(f, std::make_integer_sequence<int, N>{});
}

// Field v % (8 / BITS) of the packed vector that holds vector v, alone in the low bits. The topmost is so after the shift.
template <int BITS, int V> inline Bytes field(const uint8_t* plane) {
  constexpr int per_byte = 8 / BITS, shift = BITS * (V % per_byte);
  const Bytes bits = shift_right<shift>(load_bytes(plane + V / per_byte * VECTOR_BYTES));
  if constexpr (shift + BITS == 8) return bits;
  else return bit_and(bits, splat_byte((1 << BITS) - 1));
}

// Codes of LOW bits, with HIGH more bits in a second plane behind the first.
template <int LOW, int HIGH = 0> struct Packed {
  static constexpr int block_bytes = VECTORS * VECTOR_BYTES * (LOW + HIGH) / 8;
  static constexpr bool is_signed = false;
  template <int V> static Bytes vector(const uint8_t* block, const uint8_t*) {
    const Bytes low = field<LOW, V>(block);
    if constexpr (HIGH == 0) return low;
    else return bit_or(low, shift_left<LOW>(field<HIGH, V>(block + VECTORS * VECTOR_BYTES * LOW / 8)));
  }
};

// Nibbles that are indices into a table of 16 signed bytes.
struct Looked {
  static constexpr int block_bytes = VECTORS * VECTOR_BYTES / 2;
  static constexpr bool is_signed = true;
  template <int V> static Bytes vector(const uint8_t* block, const uint8_t* table) {
    return lookup(table, Packed<4>::vector<V>(block, table));
  }
};

// Signed bytes, as they are.
struct Whole {
  static constexpr int block_bytes = VECTORS * VECTOR_BYTES;
  static constexpr bool is_signed = true;
  template <int V> static Bytes vector(const uint8_t* block, const uint8_t*) { return load_bytes(block + V * VECTOR_BYTES); }
};

}  // namespace BILLFISH_ISA
