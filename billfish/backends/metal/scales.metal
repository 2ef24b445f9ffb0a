// Stored scales to float, and weights as kernels see them: panels of 16 columns.
namespace billfish {

constexpr constant int PANEL = 16;
constexpr constant int RUN = 32;

struct Group {
  float scale, zero, minimum;
};

enum class Offset { none, zero, minimum };

// COLUMNS numbers side by side. Planes are our own, so that they are aligned.
template <int COLUMNS, typename S>
METAL_FUNC void load_columns(const device S* from, thread S* to) {
  if (COLUMNS == 1) {
    to[0] = from[0];
  } else {
    using Vector = vec<S, COLUMNS == 1 ? 2 : COLUMNS>;
    const Vector all = *(const device Vector*)from;
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) to[c] = all[c];
  }
}

// Four numbers at once, wherever they begin: x may be a slice at any offset.
template <typename T>
struct alignas(sizeof(T)) Four {
  T v[4];
};

// ---- how the scale of a group is stored

struct Plain {
  template <typename S>
  static METAL_FUNC float decode(S scale, float) { return float(scale); }
};

// A bare exponent: 2^(e - 127). 0 would be a zero instead of 2^-127, and 255 is NaN.
struct E8M0 {
  static METAL_FUNC float decode(uchar e, float) {
    return as_type<float>(e == 255 ? 0x7FC00000u : max(uint(e) << 23, 0x00400000u));
  }
};

// sign : 4 exponent : 3 mantissa, times one factor of the tensor. The bits are those of a half, with 8 less in the exponent;
// FLUSHED as in decode.metal, in float: 120 is added to the exponent, and 2v - 2^-6 is right where it was 0.
struct E4M3 {
  static METAL_FUNC float magnitude(uchar code) {
    if (!FLUSHED) return float(as_type<half>(ushort((code & 0x7Fu) << 7))) * 256.0f;
    const float v = as_type<float>(((code & 0x7Fu) << 20) + (120u << 23));
    return min(v, v * 2.0f - 0.015625f);
  }
  static METAL_FUNC float decode(uchar code, float factor) {
    const float v = (code & 0x7F) == 0x7F ? as_type<float>(0x7FC00000u) : magnitude(code);
    return (code < 0x80 ? v : -v) * factor;
  }
};

// ggml's readings of the same bytes, halved because its elements are doubled: 255 is 2^127 here, and 0 is 2^-128.
struct E8M0Half {
  static METAL_FUNC float decode(uchar e, float) {
    return as_type<float>(e < 2 ? 0x00200000u << e : uint(e - 1) << 23);
  }
};

// Without a sign; 0x7F is zero, and 0xFF is 240.
struct UE4M3Half {
  static METAL_FUNC float decode(uchar code, float factor) {
    return (code == 0x7F ? 0.0f : E4M3::magnitude(code) * 0.5f) * factor;
  }
};

// ---- the groups of a run in COLUMNS columns of a panel: one for 32 k, or two for 16 each, the first of all columns first

// One number for a group, and perhaps a zero point or a minimum: planes [panels][groups][16].
template <typename Decode, Offset OFFSET>
struct OneLevel {
  static constexpr constant Offset offset = OFFSET;

  template <int GROUP>
  static METAL_FUNC int scales_of_panel(int runs) {
    constexpr int group_runs = GROUP > RUN ? GROUP / RUN : 1;
    return PANEL * (GROUP == 0 ? 1 : GROUP == 16 ? 2 * runs : (runs + group_runs - 1) / group_runs);
  }
  template <int GROUP>
  static METAL_FUNC int offsets_of_panel(int runs) { return scales_of_panel<GROUP>(runs); }

  template <int COLUMNS, int GROUP, typename S, typename O>
  static METAL_FUNC void groups(const device S* scales, const device O* offsets, float factor, int run, int column,
                                thread Group* out) {
    #pragma unroll
    for (int h = 0; h < (GROUP == 16 ? 2 : 1); h++) {
      const int group = GROUP == 0 ? 0 : GROUP == 16 ? 2 * run + h : run / (GROUP < RUN ? 1 : GROUP / RUN);
      const int at = group * PANEL + column;
      S scale[COLUMNS];
      O other[COLUMNS];
      load_columns<COLUMNS>(scales + at, scale);
      if (OFFSET != Offset::none) load_columns<COLUMNS>(offsets + at, other);
      #pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        out[h * COLUMNS + c] = {Decode::decode(scale[c], factor), 0.0f, 0.0f};
        if (OFFSET == Offset::zero) out[h * COLUMNS + c].zero = float(other[c]);
        if (OFFSET == Offset::minimum) out[h * COLUMNS + c].minimum = float(other[c]);
      }
    }
  }
};

// Two integers of six bits for each run, [panels][runs][24 bytes]: 16 bytes with the first integer and two bits of the second,
// and 8 bytes with its other four bits, two columns in each.
template <int COLUMNS>
METAL_FUNC void six_bit_pairs(const device uchar* scales, int run, int column, thread int* first, thread int* second) {
  const device uchar* record = scales + run * 24;
  uchar low[COLUMNS], rest[(COLUMNS + 1) / 2];
  load_columns<COLUMNS>(record + column, low);
  load_columns<(COLUMNS + 1) / 2>(record + PANEL + column / 2, rest);
  #pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    first[c] = low[c] & 63;
    const int nibble = COLUMNS == 1 ? rest[0] >> (column % 2 * 4) : rest[c / 2] >> (c % 2 * 4);
    second[c] = low[c] >> 6 | (nibble & 15) << 2;
  }
}

// The numbers of blocks of 256, [panels][blocks][16]: d, or d and dmin side by side.
template <int COLUMNS, int NUMBERS>
METAL_FUNC void block_numbers(const device half* blocks, int run, int column, thread half* out) {
  const device half* from = blocks + (run / 8 * PANEL + column) * NUMBERS;
  if (COLUMNS * NUMBERS <= 4) {
    load_columns<COLUMNS * NUMBERS <= 4 ? COLUMNS * NUMBERS : 1>(from, out);
  } else {
    load_columns<4>(from, out);
    load_columns<4>(from + 4, out + 4);
  }
}

// q4_k and q5_k: d * scale and -dmin * minimum of 32.
struct SixBitMinimum {
  static constexpr constant Offset offset = Offset::minimum;

  template <int GROUP>
  static METAL_FUNC int scales_of_panel(int runs) { return 24 * runs; }
  template <int GROUP>
  static METAL_FUNC int offsets_of_panel(int runs) { return runs / 8 * 2 * PANEL; }

  template <int COLUMNS, int GROUP>
  static METAL_FUNC void groups(const device uchar* scales, const device half* blocks, float, int run, int column,
                                thread Group* out) {
    int scale[COLUMNS], minimum[COLUMNS];
    half both[2 * COLUMNS];
    six_bit_pairs<COLUMNS>(scales, run, column, scale, minimum);
    block_numbers<COLUMNS, 2>(blocks, run, column, both);
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      out[c] = {float(both[2 * c]) * float(scale[c]), 0.0f, -(float(both[2 * c + 1]) * float(minimum[c]))};
    }
  }
};

// q3_k: d times a scale of six bits, less 32, for each 16.
struct SixBitScale {
  static constexpr constant Offset offset = Offset::none;

  template <int GROUP>
  static METAL_FUNC int scales_of_panel(int runs) { return 24 * runs; }
  template <int GROUP>
  static METAL_FUNC int offsets_of_panel(int runs) { return runs / 8 * PANEL; }

  template <int COLUMNS, int GROUP>
  static METAL_FUNC void groups(const device uchar* scales, const device half* blocks, float, int run, int column,
                                thread Group* out) {
    int first[COLUMNS], second[COLUMNS];
    half d[COLUMNS];
    six_bit_pairs<COLUMNS>(scales, run, column, first, second);
    block_numbers<COLUMNS, 1>(blocks, run, column, d);
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      out[c] = {float(d[c]) * float(first[c] - 32), 0.0f, 0.0f};
      out[COLUMNS + c] = {float(d[c]) * float(second[c] - 32), 0.0f, 0.0f};
    }
  }
};

// q6_k: d times a signed byte for each 16. q2_k: a byte with four bits of a scale and four of a minimum.
template <bool MINIMUM>
struct ByteOfBlock {
  static constexpr constant Offset offset = MINIMUM ? Offset::minimum : Offset::none;

  template <int GROUP>
  static METAL_FUNC int scales_of_panel(int runs) { return 2 * PANEL * runs; }
  template <int GROUP>
  static METAL_FUNC int offsets_of_panel(int runs) { return runs / 8 * (MINIMUM ? 2 : 1) * PANEL; }

  template <int COLUMNS, int GROUP>
  static METAL_FUNC void groups(const device uchar* scales, const device half* blocks, float, int run, int column,
                                thread Group* out) {
    constexpr int numbers = MINIMUM ? 2 : 1;
    half above[numbers * COLUMNS];
    block_numbers<COLUMNS, numbers>(blocks, run, column, above);
    #pragma unroll
    for (int h = 0; h < 2; h++) {
      uchar bytes[COLUMNS];
      load_columns<COLUMNS>(scales + (2 * run + h) * PANEL + column, bytes);
      #pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        const int scale = MINIMUM ? bytes[c] & 15 : (bytes[c] ^ 0x80) - 0x80;
        out[h * COLUMNS + c] = {float(above[numbers * c]) * float(scale), 0.0f, 0.0f};
        if (MINIMUM) out[h * COLUMNS + c].minimum = -(float(above[numbers * c + numbers - 1]) * float(bytes[c] >> 4));
      }
    }
  }
};

// ---- all planes of a weight [N, K]

// Words from a place on, found with 32 bits, which are cheaper to add than 64.
struct WordsAt {
  const device uint* base;
  int at;

  METAL_FUNC uint operator[](int i) const thread { return base[at + i]; }
};

// codes [panels][runs][16][run_words], columns in the order 0, 4, 8, 12, 1, 5, ..; high [panels][runs][16][high_words];
// scales and offsets as above. What is beyond N or K is zero. GROUP is how many k share a scale; 0 means all of them.
template <typename Codes, typename Scale, int GROUP, typename S, typename O>
struct Weights {
  using Element = Codes;
  static constexpr constant int group_k = GROUP;
  static constexpr constant int halves = GROUP == 16 ? 2 : 1;  // groups of a run
  static constexpr constant bool subtracts = Codes::bias != 0 || Scale::offset == Offset::zero;
  static constexpr constant bool adds = Scale::offset == Offset::minimum;
  // Whether codes become weights by one fma with scale and offset: zero * scale is exact but for zero points and float32 scales.
  static constexpr constant bool scaled = adds || (subtracts && (Scale::offset == Offset::none || sizeof(S) < 4));
  const device uint* codes;
  const device uint* high;
  const device S* scales;
  const device O* offsets;
  float factor;
  int n, k;

  METAL_FUNC int panels() const thread { return (n + PANEL - 1) / PANEL; }
  METAL_FUNC int runs() const thread { return (k + RUN - 1) / RUN; }

  // The same, from a panel on.
  METAL_FUNC Weights from(int panel) const thread {
    const long before = panel;
    return {codes + before * runs() * (PANEL * Codes::run_words), high + before * runs() * (PANEL * Codes::high_words),
            scales + before * Scale::template scales_of_panel<GROUP>(runs()),
            offsets + before * Scale::template offsets_of_panel<GROUP>(runs()), factor, n, k};
  }

  // Of one column of the first panel: the words of a run, and those of its further bits.
  METAL_FUNC WordsAt words(int run, int column) const thread {
    return {codes, (run * PANEL + column % 4 * 4 + column / 4) * Codes::run_words};
  }
  // The same of column + c, where column is a multiple of four and c less than four.
  METAL_FUNC WordsAt words_of_four(int run, int column, int c) const thread {
    return {codes, (run * PANEL + column / 4) * Codes::run_words + 4 * c * Codes::run_words};
  }
  METAL_FUNC WordsAt high_words(int run, int column) const thread {
    return {high, (run * PANEL + column) * Codes::high_words};
  }

  // [halves][COLUMNS]; what is subtracted from codes is in `zero`.
  template <int COLUMNS>
  METAL_FUNC void groups(int run, int column, thread Group* out) const thread {
    Scale::template groups<COLUMNS, GROUP>(scales, offsets, factor, run, column, out);
    if (Codes::bias != 0) {
      #pragma unroll
      for (int i = 0; i < halves * COLUMNS; i++) out[i].zero = Codes::bias;
    }
  }

  // Pair t to weights, in the order of the reference, each step rounded once.
  static METAL_FUNC float2 weights(half2 pair, int t, Group g) {
    float2 v = float2(pair) * Codes::unit(t);
    if (subtracts) v -= g.zero;
    v *= g.scale;
    if (adds) v += g.minimum;
    return v;
  }

  // The same for T. Fewer steps will do where a weight is rounded to half anyway: there a scale that unit(t) makes infinite gives
  // infinite weights in any case.
  template <typename T>
  static METAL_FUNC float2 weights_as(half2 pair, int t, Group g) {
    if (!is_same_v<T, half>) return weights(pair, t, g);
    if (adds) return fma(float2(pair), float2(Codes::unit(t) * g.scale), float2(g.minimum));
    if (subtracts) return fma(float2(pair), float2(Codes::unit(t)), float2(-g.zero)) * g.scale;
    return float2(pair) * (Codes::unit(t) * g.scale);
  }
};

}  // namespace billfish
