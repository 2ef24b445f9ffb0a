// Packed codes to numbers: the only place that knows how many bits a code has and what they mean.
//
// A word is 32 bits of one column: the codes of word_k consecutive k, lowest first. They are decoded two at a time in the
// two 16-bit lanes of a word. lanes(word, j) puts code j in the low lane and code j + word_k / 2 in the high one, and pair()
// makes a half2 of such lanes. Every value of every element is exact in half.
namespace billfish {

// ---- how the bits of a code are stored

// Nibbles; of five-bit codes, the fifth bits are in a plane of their own: bit i of `high` belongs to code i.
template <int HIGH>
struct Packed {
  static constexpr constant int word_k = 8;
  static constexpr constant bool has_high = HIGH != 0;
  static METAL_FUNC uint lanes(uint word, uint high, int j) {
    const uint nibbles = (word >> (4 * j)) & 0x000F000Fu;
    if (!has_high) return nibbles;
    const uint spread = (high & 0xFu) | (high & 0xF0u) << 12;  // bit i of each half stands in its lane
    return nibbles | ((spread >> j) & 0x00010001u) << 4;
  }
};

// Bytes.
struct Whole {
  static constexpr constant int word_k = 4;
  static constexpr constant bool has_high = false;
  static METAL_FUNC uint lanes(uint word, uint, int j) { return (word >> (8 * j)) & 0x00FF00FFu; }
};

// ---- what they mean

// q - BIAS. 0x6400 is the half 1024, whose last mantissa bit is worth 1: a code put there makes it 1024 + q, with no
// conversion. Codes may have ten bits; taking 1024 + BIAS away is exact.
template <int BIAS>
struct Integer {
  static METAL_FUNC half2 pair(uint codes) {
    return as_type<half2>(codes | 0x64006400u) - half2(half(1024 + BIAS));
  }
};

// sign : 2 exponent : 1 mantissa. Moved to a half's fields, the code's exponent has 14 less than a half's bias asks for.
// Adding 14 to the field is right but for exponent 0, which has no hidden one: magnitudes 0 and 1 come out as 0.5 and
// 0.75 instead of 0 and 0.5. 2v - 1 is right for those two, equal for the next, and larger for all others, so the smaller
// of both is right for all. Multiplying by 2^14 instead would go through a subnormal half, which a GPU may flush to zero.
struct E2M1 {
  static METAL_FUNC half2 pair(uint codes) {
    const half2 v = as_type<half2>(((codes & 0x00070007u) << 9) + 0x38003800u);
    const half2 magnitude = min(v, v * half(2) - half(1));
    return as_type<half2>(as_type<uint>(magnitude) | (codes & 0x00080008u) << 12);
  }
};

// E2M1 doubled, with one zero only, as ggml has it: adding 0 makes +0 of -0.
struct E2M1X2 {
  static METAL_FUNC half2 pair(uint codes) { return E2M1::pair(codes) * half(2) + half(0); }
};

constant half IQ4NL_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// An index into 16 levels that follow no rule.
struct Looked {
  static METAL_FUNC half2 pair(uint codes) { return half2(IQ4NL_LEVELS[codes & 15], IQ4NL_LEVELS[codes >> 16]); }
};

// ---- both together: what kernels see

template <typename Bits, typename Value>
struct Element {
  static constexpr constant int word_k = Bits::word_k;
  static constexpr constant bool has_high = Bits::has_high;
  static constexpr constant int pairs = word_k / 2;

  // Codes j and j + pairs of a word.
  static METAL_FUNC half2 pair(uint word, uint high, int j) { return Value::pair(Bits::lanes(word, high, j)); }

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
