// Codes as files hold them, sixteen at a time.
#pragma once
#include <algorithm>
#include <array>

#include "layout/problem.h"
#include "simd/sixteen.h"

namespace BILLFISH_ISA {

using billfish::Storage;

// Fields as billfish.core.formats.ggml.unfold has them: of each run of WIDTH bytes, all lowest fields first, then the next ones.
// `get<V>` are fields 16 V to 16 V + 15, `moved<V, AT>` the same from bit AT of each byte on, with other bits around them.
template <int WIDTH, int BITS> struct BitField {
  static constexpr int bits = BITS;
  static constexpr int from(int v) { return v / (WIDTH / 16) % (8 / bits) * bits; }
  template <int V, int AT> static Sixteen moved(const uint8_t* p) {
    constexpr int parts = WIDTH / 16, run = V / (parts * 8 / bits), part = V % parts, by = AT - from(V);
    const Sixteen v = load_sixteen(p + run * WIDTH + part * 16);
    return by < 0 ? v >> uint8_t(std::max(-by, 0)) : v << uint8_t(std::max(by, 0));
  }
  template <int V> static Sixteen get(const uint8_t* p) {
    const Sixteen v = moved<V, 0>(p);
    return from(V) + bits == 8 ? v : v & uint8_t((1 << bits) - 1);  // the topmost are alone after the shift
  }
};

// Whole bytes.
template <> struct BitField<1, 8> : BitField<16, 8> {};

// Two nibbles of a byte are neighbours.
template <> struct BitField<1, 4> {
  static constexpr int bits = 4;
  template <int V> static Sixteen get(const uint8_t* p) {
    const Sixteen v = load_sixteen(p + V / 2 * 16);
    return interleave<uint8_t, V % 2 == 1>(v & uint8_t(15), v >> uint8_t(4));
  }
};

// Eight low nibbles, eight high ones.
template <> struct BitField<8, 4> {
  static constexpr int bits = 4;
  template <int V> static Sixteen get(const uint8_t* p) {
    const Sixteen v = two_eights(load_eight(p + V * 8), load_eight(p + V * 8));
    return (v >> Sixteen{0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4}) & uint8_t(15);
  }
};

// Eight neighbours in a byte, from a table of what each byte becomes.
template <int AT> constexpr std::array<uint64_t, 256> spread_bits() {
  std::array<uint64_t, 256> table{};
  for (uint64_t byte = 0; byte < 256; byte++)
    for (int i = 0; i < 8; i++) table[byte] |= (byte >> i & 1) << (8 * i + AT);
  return table;
}
template <int AT> constexpr std::array<uint64_t, 256> SPREAD_BITS = spread_bits<AT>();

template <> struct BitField<1, 1> {
  static constexpr int bits = 1;
  template <int V, int AT> static Sixteen moved(const uint8_t* p) {
    return two_eights(SPREAD_BITS<AT>[p[2 * V]], SPREAD_BITS<AT>[p[2 * V + 1]]);
  }
};

struct NoBits {
  static constexpr int bits = 0;
};

// Whether a layout comes with minimums.
enum class Minimums { never, always, perhaps };

// COUNT codes, low bits in one field, high bits perhaps in another. GROUP of them have a scale in common, where the layout says
// so, otherwise 0.
template <int COUNT, int GROUP, Minimums MINIMUMS, class Low, class High = NoBits> struct FileCodes {
  static constexpr int count = COUNT, group = GROUP, bits = Low::bits + High::bits;
  static constexpr Minimums minimums = MINIMUMS;
  // Codes 16 V to 16 V + 15 of a block, given where its fields begin.
  template <int V> static Sixteen get(const uint8_t* low, const uint8_t* high) {
    const Sixteen codes = Low::template get<V>(low);
    if constexpr (High::bits == 0) return codes;
    else return insert<((1 << High::bits) - 1) << Low::bits>(codes, High::template moved<V, Low::bits>(high));
  }
  // The same times 2^room: where it costs nothing, codes that are to be subnormals are moved to the top of their bytes.
  template <int V> static Sixteen get_large(const uint8_t* low, const uint8_t* high) {
    if constexpr (room(Low::bits, High::bits) == 0) return get<V>(low, high);
    const Sixteen codes = Low::template moved<V, room(Low::bits, High::bits)>(low);
    return Low::from(V) == 0 ? codes : codes & uint8_t(256 - (256 >> bits));
  }
};

using RowBytes = FileCodes<32, 0, Minimums::perhaps, BitField<1, 8>>;
using RowNibbles = FileCodes<32, 0, Minimums::perhaps, BitField<1, 4>>;

constexpr int layout_of(int width, int bits, int high_width = 0, int high_bits = 0) {
  return ((width * 16 + bits) * 64 + high_width) * 16 + high_bits;
}

// Calls f with the type of this storage's codes. Rows of whole bytes or nibbles have no blocks: 32 at a time.
template <class F> inline void with_codes(const Storage& s, F&& f) {
  const auto &low = s.code_field[0], &high = s.code_field[1];
  switch (layout_of(low.width, low.bits, high.width, high.bits)) {
    case layout_of(1, 4): return f(RowNibbles());
    case layout_of(1, 8): return f(RowBytes());
    case layout_of(16, 4):
      if (s.block == 256) return f(FileCodes<256, 32, Minimums::never, BitField<16, 4>>());
      return f(FileCodes<32, 32, Minimums::perhaps, BitField<16, 4>>());
    case layout_of(16, 4, 1, 1): return f(FileCodes<32, 32, Minimums::perhaps, BitField<16, 4>, BitField<1, 1>>());
    case layout_of(8, 4): return f(FileCodes<64, 16, Minimums::never, BitField<8, 4>>());
    case layout_of(32, 2): return f(FileCodes<256, 16, Minimums::always, BitField<32, 2>>());
    case layout_of(32, 2, 32, 1): return f(FileCodes<256, 16, Minimums::never, BitField<32, 2>, BitField<32, 1>>());
    case layout_of(32, 4): return f(FileCodes<256, 32, Minimums::always, BitField<32, 4>>());
    case layout_of(32, 4, 32, 1): return f(FileCodes<256, 32, Minimums::always, BitField<32, 4>, BitField<32, 1>>());
    case layout_of(64, 4, 32, 2): return f(FileCodes<256, 16, Minimums::never, BitField<64, 4>, BitField<32, 2>>());
  }
}

}  // namespace BILLFISH_ISA
