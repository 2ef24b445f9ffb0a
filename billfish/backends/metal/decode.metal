// Packed codes to numbers: the only place that knows how many bits a code has and what they mean.
//
// A run is 32 k of one column, in four parts. Part i has the pairs of k = 8t + 2i and 8t + 2i + 1, t = 0..3: the pairs that
// the lanes of a simdgroup hold of 8x8 matrices of weights, four to a row. The first code of a pair is in the low half of a
// word and the second in the high half, so that one mask takes both.
//
// pair() gives numbers that unit(t) is missing from: a code masked in the fraction of a half is a subnormal number, q * 2^-24 or
// more, and needs neither a shift nor a conversion. FLUSHED is for GPUs that make zeros of subnormal numbers: there every
// number is an ordinary one, for a few operations more.
namespace billfish {

// ---- how the bits of a code are stored

struct Part {
  uint words[2];
  uint high;
};

// Nibbles, t = 0..3 from the lowest; HIGH more bits of each are in a plane of their own.
template <int HIGH>
struct Nibbles {
  static constexpr constant int run_words = 4;
  static constexpr constant int high_words = HIGH;
  static constexpr constant int places = 2;
  static METAL_FUNC int place(int t) { return t % 2; }
  static METAL_FUNC int shift(int t) { return 4 * (t % 2); }  // where pair t stands

  template <typename Words>
  static METAL_FUNC Part part(Words words, Words high, int i) {
    Part p = {{words[i], 0}, 0};
    if (HIGH == 1) p.high = i < 2 ? high[0] << (4 - 2 * i) : high[0] >> (2 * i);
    if (HIGH == 2) p.high = i % 2 == 0 ? high[i / 2] << 4 : high[i / 2] >> 4;
    return p;
  }
  static METAL_FUNC uint lanes(Part p, int t) {
    const uint nibbles = (t < 2 ? p.words[0] : p.words[0] >> 8) & 0x000F000Fu << shift(t);
    if (HIGH == 0) return nibbles;
    return nibbles | ((t < 2 ? p.high : p.high >> HIGH) & (HIGH == 1 ? 0x00100010u : 0x00300030u) << shift(t));
  }
};

// Two bits, t = 0..3 from the lowest, two parts in a word; HIGH more bits, none or one, in a plane of their own.
template <int HIGH>
struct Crumbs {
  static constexpr constant int run_words = 2;
  static constexpr constant int high_words = HIGH;
  static constexpr constant int places = 4;
  static METAL_FUNC int place(int t) { return t; }
  static METAL_FUNC int shift(int t) { return 2 * t; }

  template <typename Words>
  static METAL_FUNC Part part(Words words, Words high, int i) {
    Part p = {{words[i / 2] >> (i % 2 * 8), 0}, 0};
    if (HIGH == 1) p.high = i < 2 ? high[0] << (2 - i) : high[0] >> (4 + i);
    return p;
  }
  static METAL_FUNC uint lanes(Part p, int t) {
    const uint crumbs = p.words[0] & 0x00030003u << shift(t);
    return HIGH == 0 ? crumbs : crumbs | (p.high & 0x00040004u << shift(t));
  }
};

// Bytes: two words to a part, t = 0, 1 in the first.
struct Bytes {
  static constexpr constant int run_words = 8;
  static constexpr constant int high_words = 0;
  static constexpr constant int places = 1;
  static METAL_FUNC int place(int) { return 0; }
  static METAL_FUNC int shift(int) { return 0; }

  template <typename Words>
  static METAL_FUNC Part part(Words words, Words, int i) { return {{words[2 * i], words[2 * i + 1]}, 0}; }
  static METAL_FUNC uint lanes(Part p, int t) { return p.words[t / 2] >> (8 * (t % 2)) & 0x00FF00FFu; }
};

// ---- what they mean

// q - BIAS; whoever calls pair() takes BIAS away. Codes may have ten bits, as a half's fraction has. FLUSHED: 0x6400 is the half
// 1024, whose last bit is worth 1, so a code put there makes it 1024 + q.
template <int BIAS>
struct Integer {
  static constexpr constant int bias = BIAS;
  static constexpr constant bool one_unit = false;
  template <typename Bits>
  static METAL_FUNC half2 pair(Part p, int t) {
    const uint lanes = Bits::lanes(p, t);
    return FLUSHED ? as_type<half2>(lanes | 0x64006400u) - half2(half(1024)) : as_type<half2>(lanes);
  }
  template <typename Bits>
  static METAL_FUNC float unit(int t) { return FLUSHED ? 1.0f / (1 << Bits::shift(t)) : float(1 << (24 - Bits::shift(t))); }
};

// One unit for all: the bits are those of a half with another bias of the exponent.
template <int SCALE>
struct Floating {
  static constexpr constant int bias = 0;
  static constexpr constant bool one_unit = true;
  template <typename Bits>
  static METAL_FUNC float unit(int) { return float(SCALE); }
};

// sign : 2 exponent : 1 mantissa, times FACTOR. A half has 14 more in the bias of its exponent. Its sign stands at bit 15 and
// the other three at 9..11, where the mask takes them. Codes are stored so that t = 0 is there, t = 1 after one shift, and
// the sign and the rest of t = 2 and 3 come there from two places by one multiplication: signs of t at bits 15, 12, 13, 14,
// the rest from 9 - 3t on.
//
// FLUSHED: adding 14 to the exponent is right but for exponent 0, which has no hidden one: magnitudes 0 and 1 come out as 0.5
// and 0.75 instead of 0 and 0.5. 2v - 1 is right for those two, equal for the next, and larger for all others, so the
// smaller of both is right for all.
template <int FACTOR>
struct E2M1 : Floating<FACTOR * (FLUSHED ? 1 : 1 << 14)> {
  static METAL_FUNC uint bits(uint word, int t) {
    if (t == 0) return word & 0x8E008E00u;
    if (t == 1) return word << 3 & 0x8E008E00u;
    if (t == 2) return (word & 0x20382038u) * ((1u << 6) + (1u << 2)) & 0x8E008E00u;
    return (word & 0x40074007u) * ((1u << 9) + (1u << 1)) & 0x8E008E00u;
  }
  template <typename Bits>
  static METAL_FUNC half2 pair(Part p, int t) {
    const uint raw = bits(p.words[0], t);
    if (!FLUSHED) return as_type<half2>(raw);
    const half2 v = as_type<half2>((raw & 0x0E000E00u) + 0x38003800u);
    const half2 magnitude = min(v, fma(v, half2(half(2)), half2(half(-1))));
    return as_type<half2>(as_type<uint>(magnitude) | (raw & 0x80008000u));
  }
};

// sign : 4 exponent : 3 mantissa, the same way, 8 less in the exponent; 2v - 2^-6 is right where it is 0. The largest magnitude,
// 480, stands for NaN.
struct Float8 : Floating<FLUSHED ? 1 : 1 << 8> {
  template <typename Bits>
  static METAL_FUNC half2 pair(Part p, int t) {
    const uint codes = Bits::lanes(p, t);
    const uint rest = (codes & 0x007F007Fu) << 7, sign = (codes & 0x00800080u) << 8;
    half2 magnitude = as_type<half2>(FLUSHED ? rest + 0x20002000u : rest);
    if (FLUSHED) magnitude = min(magnitude, fma(magnitude, half2(half(2)), half2(half(-0.015625))));
    const half none = half(FLUSHED ? 480 : 1.875);
    if (magnitude.x == none) magnitude.x = as_type<half>(ushort(0x7E00));
    if (magnitude.y == none) magnitude.y = as_type<half>(ushort(0x7E00));
    return as_type<half2>(as_type<uint>(magnitude) | sign);
  }
};

constant half IQ4NL_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// An index into 16 levels that follow no rule.
struct Looked : Floating<1> {
  template <typename Bits>
  static METAL_FUNC half2 pair(Part p, int t) {
    const uint codes = Bits::lanes(p, t) >> Bits::shift(t);
    return half2(IQ4NL_LEVELS[codes & 15], IQ4NL_LEVELS[codes >> 16]);
  }
};

// ---- both together: what kernels see

template <typename Bits, typename Value>
struct Element {
  static constexpr constant int run_words = Bits::run_words;
  static constexpr constant int high_words = Bits::high_words;
  static constexpr constant int bias = Value::bias;
  static constexpr constant int places = Value::one_unit ? 1 : Bits::places;  // pairs of one place have the same unit

  static METAL_FUNC int place(int t) { return Value::one_unit ? 0 : Bits::place(t); }

  // From words of a run in any address space.
  template <typename Words>
  static METAL_FUNC Part part(Words words, Words high, int i) { return Bits::part(words, high, i); }

  // The codes at k = 8t + 2i and 8t + 2i + 1, to be multiplied by unit(t).
  static METAL_FUNC half2 pair(Part p, int t) { return Value::template pair<Bits>(p, t); }
  static METAL_FUNC float unit(int t) { return Value::template unit<Bits>(t); }
};

}  // namespace billfish
