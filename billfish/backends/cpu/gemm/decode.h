// Packed codes to one byte each: the only place that knows how many bits a code has.
//
// A *block* of a tile is TILE_ROWS rows by 32 k. Unpacked it is VECTORS byte vectors; vector v holds the k-quad v / ROW_VECTORS of
// LANES rows, byte 4*lane + j being k = 4*quad + j of that row, which is the order in which dot() wants them.
// Packed, several vectors share the bytes of one, lane by lane: nibbles of 2i and 2i+1, 2-bit fields of 4i..4i+3, and codes of
// 3, 5 and 6 bits as below, so that most come by a mask alone. Decoding is shifts and masks, no shuffles.
#pragma once
#include <algorithm>

#include "layout/problem.h"
#include "simd/unroll.h"

namespace BILLFISH_ISA {

using billfish::Operand;

constexpr int VECTOR_BYTES = 4 * LANES;
constexpr int ROW_VECTORS = TILE_ROWS / LANES;
constexpr int VECTORS = 8 * ROW_VECTORS;

// Field v % (8 / BITS) of the packed vector that holds vector v, alone in the low bits. The topmost is so after the shift.
template <int BITS, int V> inline Bytes field(const uint8_t* bytes) {
  constexpr int per_byte = 8 / BITS, shift = BITS * (V % per_byte);
  const Bytes bits = shift_right<shift>(load_bytes(bytes + V / per_byte * VECTOR_BYTES));
  if constexpr (shift + BITS == 8) return bits;
  else return bit_and(bits, splat_byte((1 << BITS) - 1));
}

// The same field, moved to bit TO of each byte, with other bits around it: for merge().
template <int BITS, int V, int TO> inline Bytes field_at(const uint8_t* bytes) {
  constexpr int per_byte = 8 / BITS, from = BITS * (V % per_byte);
  const Bytes bits = load_bytes(bytes + V / per_byte * VECTOR_BYTES);
  if constexpr (from >= TO) return shift_right<from - TO>(bits);
  else return shift_left<TO - from>(bits);
}

// Values plus SIGNED_BIAS to values plus 128.
inline Bytes unsigned_bytes(Bytes v) {
  if constexpr (SIGNED_BIAS == 128) return v;
  else return bit_xor(v, splat_byte(0x80));
}

// A decoder has three views of a vector. `dotted` is what dot() takes: cheap, and perhaps with something in it that the
// sums make up for (fill_starts, gemm8.h). `byte` is the value of each weight plus SIGNED_BIAS, as Whole keeps it; CENTRED says that the
// bias is 8. `code` is unsigned, the value plus code_bias(w.bias).
//
// A decoder that has `dotted`, an unsigned code, and nothing in it to make up for.
template <class Decoder, int BITS, Operand BELOW> struct Unsigned {
  static constexpr int block_bytes = VECTORS * VECTOR_BYTES * BITS / 8;
  static constexpr Operand operand = BELOW;
  static constexpr bool in_place = false;
  template <int V, bool CENTRED> static Bytes byte(const uint8_t* block, const uint8_t* table, int bias) {
    return subtract(Decoder::template dotted<V>(block, table), splat_byte(uint8_t(bias - SIGNED_BIAS)));
  }
  template <int V> static Bytes code(const uint8_t* block, const uint8_t* table) { return Decoder::template dotted<V>(block, table); }
  static constexpr int code_bias(int bias) { return bias; }
};

// Two bits: fields of a byte, four vectors in one.
struct Twos : Unsigned<Twos, 2, Operand::below_16> {
  template <int V> static Bytes dotted(const uint8_t* block, const uint8_t*) { return field<2, V>(block); }
};

// Five bits: vector 2i at the bottom of a byte, and above it the low three bits of 2i+1. Its other two bits are fields of bytes behind.
struct Fives : Unsigned<Fives, 5, Operand::below_32> {
  template <int V> static Bytes dotted(const uint8_t* block, const uint8_t*) {
    const Bytes both = load_bytes(block + V / 2 * VECTOR_BYTES);
    if constexpr (V % 2 == 0) return bit_and(both, splat_byte(31));
    else return merge(shift_right<5>(both), field_at<2, V / 2, 3>(block + VECTORS * VECTOR_BYTES / 2), 3 << 3);
  }
};

// Six bits: vectors 4i, 4i+1 and 4i+2 at the bottom of three bytes, and above them 4i+3, its upper bits first.
struct Sixes : Unsigned<Sixes, 6, Operand::below_64> {
  template <int V> static Bytes dotted(const uint8_t* block, const uint8_t*) {
    if constexpr (V % 4 < 3) return bit_and(load_bytes(block + (V / 4 * 3 + V % 4) * VECTOR_BYTES), splat_byte(63));
    else return shift_right<2>(tops<V / 4>(block));
  }
  // The topmost two bits of three bytes, side by side, and something in the last two bits.
  template <int I> static Bytes tops(const uint8_t* block) {
    const uint8_t* three = block + I * 3 * VECTOR_BYTES;
    return insert_right<2>(load_bytes(three), insert_right<2>(load_bytes(three + VECTOR_BYTES), load_bytes(three + 2 * VECTOR_BYTES)));
  }
};

// Three bits: vectors 2i and 2i+1 are the low and the high half of six.
struct Threes : Unsigned<Threes, 3, Operand::below_16> {
  template <int V> static Bytes dotted(const uint8_t* block, const uint8_t*) {
    if constexpr (V / 2 % 4 < 3) {
      const Bytes six = load_bytes(block + (V / 8 * 3 + V / 2 % 4) * VECTOR_BYTES);
      return bit_and(shift_right<V % 2 * 3>(six), splat_byte(7));
    } else {
      const Bytes six = Sixes::tops<V / 8>(block);
      if constexpr (V % 2) return shift_right<5>(six);
      else return bit_and(shift_right<2>(six), splat_byte(7));
    }
  }
};

// Nibbles. Vectors 2i and 2i+1 are two sets of rows at the same k, so they are multiplied with the same x: the dot product of the byte as
// it is, 16 * high + low, less that of its low nibble, which is needed anyway, is 16 times that of the high one. One
// mask for two vectors instead of a mask and a shift. Where bytes are signed, prepack stores the high code less 8.
struct Nibbles {
  static constexpr int block_bytes = VECTORS * VECTOR_BYTES / 2;
  static constexpr Operand operand = Operand::below_16;
  static constexpr bool in_place = WHOLE_BYTES_FIT;
  template <int V> static Bytes dotted(const uint8_t* block, const uint8_t*) {
    if constexpr (V % 2 && in_place) return load_bytes(block + V / 2 * VECTOR_BYTES);
    else return field<4, V>(block);
  }
  template <int V, bool CENTRED> static Bytes byte(const uint8_t* block, const uint8_t*, int bias) {
    const int more = bias - SIGNED_BIAS;
    if constexpr (V % 2 && CENTRED && HIGH_FLIP == 8 && SIGNED_BIAS == 0) return high_nibbles(load_bytes(block + V / 2 * VECTOR_BYTES));
    else if constexpr (V % 2) return subtract(high_nibbles(load_bytes(block + V / 2 * VECTOR_BYTES)), splat_byte(uint8_t(more - HIGH_FLIP)));
    else return subtract(field<4, V>(block), splat_byte(uint8_t(more)));
  }
  template <int V> static Bytes code(const uint8_t* block, const uint8_t*) {
    if constexpr (V % 2 && HIGH_FLIP != 0) return bit_xor(field<4, V>(block), splat_byte(HIGH_FLIP));
    else return field<4, V>(block);
  }
  static constexpr int code_bias(int bias) { return bias; }
};

// Nibbles that are indices into a table of 16 bytes, which has values plus SIGNED_BIAS.
struct Looked {
  static constexpr int block_bytes = VECTORS * VECTOR_BYTES / 2;
  static constexpr Operand operand = Operand::values;
  static constexpr bool in_place = false;
  template <int V> static Bytes dotted(const uint8_t* block, const uint8_t* table) { return lookup(table, field<4, V>(block)); }
  template <int V, bool> static Bytes byte(const uint8_t* block, const uint8_t* table, int) { return dotted<V>(block, table); }
  template <int V> static Bytes code(const uint8_t* block, const uint8_t* table) { return unsigned_bytes(dotted<V>(block, table)); }
  static constexpr int code_bias(int) { return 128; }
};

// The same of a small table, which has values plus the bias: see take_table of layout/problem.h.
struct SmallLooked : Unsigned<SmallLooked, 4, Operand::below_32> {
  template <int V> static Bytes dotted(const uint8_t* block, const uint8_t* table) { return lookup(table, field<4, V>(block)); }
};

// A byte each: values plus SIGNED_BIAS, or unsigned codes.
template <Operand KIND> struct Unpacked {
  static constexpr int block_bytes = VECTORS * VECTOR_BYTES;
  static constexpr Operand operand = KIND;
  static constexpr bool in_place = false;
  template <int V> static Bytes dotted(const uint8_t* block, const uint8_t*) { return load_operand(block + V * VECTOR_BYTES); }
  template <int V, bool> static Bytes byte(const uint8_t* block, const uint8_t* table, int) { return dotted<V>(block, table); }
  template <int V> static Bytes code(const uint8_t* block, const uint8_t* table) { return unsigned_bytes(dotted<V>(block, table)); }
  static constexpr int code_bias(int) { return 128; }
};

using Whole = Unpacked<Operand::bytes>;

// A copy of the table: for all the compiler knows, what is written between two looks at the weights' own is a part of it.
struct Table {
  explicit Table(const billfish::Weights& w) { std::copy_n(w.table, 16, values); }
  alignas(16) uint8_t values[16];
};

// Calls f with the decoder for these codes. Weights that want floats have none: see gemm_float_codes.h and gemm_plain.h.
template <class F> inline void with_decoder(billfish::Codes codes, F&& f) {
  switch (codes) {
    case billfish::Codes::u2: return f(Twos{});
    case billfish::Codes::u3: return f(Threes{});
    case billfish::Codes::u4: return f(Nibbles{});
    case billfish::Codes::u5: return f(Fives{});
    case billfish::Codes::u6: return f(Sixes{});
    case billfish::Codes::s8: return f(Whole{});
    case billfish::Codes::table: return f(Looked{});
    case billfish::Codes::small_table:
      if constexpr (SMALL_TABLES) f(SmallLooked{});
      return;
    case billfish::Codes::e4m3: case billfish::Codes::floats: case billfish::Codes::f32: case billfish::Codes::f16: case billfish::Codes::bf16: return;
  }
}

}  // namespace BILLFISH_ISA
