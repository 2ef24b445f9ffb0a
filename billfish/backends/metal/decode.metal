// Packed codes to numbers: the only place that knows how many bits a code has and what they mean.
//
// A word is 32 bits of one column: the codes of word_k consecutive k, lowest first. They are decoded two at a time in the
// two 16-bit lanes of a word: raw(word, j) has code j in the low bits of the low lane and code j + word_k / 2 in those of the
// high one, with other codes above them; lanes(word, high, j) has nothing else. pair() makes a half2 of them. Every value of
// every element is exact in half.
namespace billfish {

// ---- how the bits of a code are stored

// Nibbles; of five-bit codes, the fifth bits are in a plane of their own: bit i of `high` belongs to code i.
template <int HIGH>
struct Packed {
  static constexpr constant int word_k = 8;
  static constexpr constant bool has_high = HIGH != 0;
  static METAL_FUNC uint raw(uint word, int j) { return word >> (4 * j); }
  static METAL_FUNC uint lanes(uint word, uint high, int j) {
    const uint nibbles = raw(word, j) & 0x000F000Fu;
    if (!has_high) return nibbles;
    const uint spread = (high & 0xFu) | (high & 0xF0u) << 12;  // bit i of each half stands in its lane
    return nibbles | ((spread >> j) & 0x00010001u) << 4;
  }
};

// Bytes.
struct Whole {
  static constexpr constant int word_k = 4;
  static constexpr constant bool has_high = false;
  static METAL_FUNC uint raw(uint word, int j) { return word >> (8 * j); }
  static METAL_FUNC uint lanes(uint word, uint, int j) { return raw(word, j) & 0x00FF00FFu; }
};

// ---- what they mean

// q - BIAS. 0x6400 is the half 1024, whose last mantissa bit is worth 1: a code put there makes it 1024 + q, with no
// conversion. Codes may have ten bits; taking 1024 + BIAS away is exact.
template <int BIAS>
struct Integer {
  template <typename Bits>
  static METAL_FUNC half2 pair(uint word, uint high, int j) {
    return as_type<half2>(Bits::lanes(word, high, j) | 0x64006400u) - half2(half(1024 + BIAS));
  }
};

// sign : 2 exponent : 1 mantissa. Moved to a half's fields, the code's exponent has 14 less than a half's bias asks for.
// Adding 14 to the field is right but for exponent 0, which has no hidden one: magnitudes 0 and 1 come out as 0.5 and
// 0.75 instead of 0 and 0.5. 2v - 1 is right for those two, equal for the next, and larger for all others, so the smaller
// of both is right for all. Multiplying by 2^14 instead would go through a subnormal half, which a GPU may flush to zero.
struct E2M1 {
  template <typename Bits>
  static METAL_FUNC half2 pair(uint word, uint, int j) {
    const uint top = Bits::raw(word, j) << 12;  // the sign stands where a half has it
    const half2 v = as_type<half2>(((top & 0x70007000u) >> 3) + 0x38003800u);
    const half2 magnitude = min(v, fma(v, half2(half(2)), half2(half(-1))));
    return as_type<half2>(as_type<uint>(magnitude) | (top & 0x80008000u));
  }
};

// E2M1 doubled, with one zero only, as ggml has it: adding 0 makes +0 of -0.
struct E2M1X2 {
  template <typename Bits>
  static METAL_FUNC half2 pair(uint word, uint high, int j) {
    return E2M1::pair<Bits>(word, high, j) * half(2) + half(0);
  }
};

// sign : 4 exponent : 3 mantissa, the same way: 8 is added to the exponent, and 2v - 2^-6 is right where it is 0. The largest magnitude,
// 480, stands for NaN.
struct Float8 {
  template <typename Bits>
  static METAL_FUNC half2 pair(uint word, uint, int j) {
    const uint top = Bits::raw(word, j) << 8;
    const half2 v = as_type<half2>(((top & 0x7F007F00u) >> 1) + 0x20002000u);
    half2 magnitude = min(v, fma(v, half2(half(2)), half2(half(-0.015625))));
    if (magnitude.x == half(480)) magnitude.x = as_type<half>(ushort(0x7E00));
    if (magnitude.y == half(480)) magnitude.y = as_type<half>(ushort(0x7E00));
    return as_type<half2>(as_type<uint>(magnitude) | (top & 0x80008000u));
  }
};

constant half IQ4NL_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// An index into 16 levels that follow no rule.
struct Looked {
  template <typename Bits>
  static METAL_FUNC half2 pair(uint word, uint high, int j) {
    const uint codes = Bits::lanes(word, high, j);
    return half2(IQ4NL_LEVELS[codes & 15], IQ4NL_LEVELS[codes >> 16]);
  }
};

// ---- both together: what kernels see

template <typename Bits, typename Value>
struct Element {
  static constexpr constant int word_k = Bits::word_k;
  static constexpr constant bool has_high = Bits::has_high;
  static constexpr constant int pairs = word_k / 2;

  // Codes j and j + pairs of a word.
  static METAL_FUNC half2 pair(uint word, uint high, int j) { return Value::template pair<Bits>(word, high, j); }

  // All codes of a word, in order, four to a vector.
  static METAL_FUNC void decode(uint word, uint high, thread half4* values) {
    #pragma unroll
    for (int j = 0; j < pairs; j++) {
      const half2 both = pair(word, high, j);
      values[j / 4][j % 4] = both.x;
      values[(j + pairs) / 4][(j + pairs) % 4] = both.y;
    }
  }
};

}  // namespace billfish
