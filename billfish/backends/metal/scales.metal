// Stored scales to float, and weights as kernels see them: planes [rows, N], a column for each output.
namespace billfish {

// ---- how the scale of a group is stored

struct Plain {
  template <typename S>
  static METAL_FUNC float decode(S scale, float) { return float(scale); }
};

// A bare exponent: 2^(e - 127). 0 would be a zero instead of 2^-127, and 255 is NaN.
struct E8M0 {
  static METAL_FUNC float decode(uchar e, float) {
    return as_type<float>(e == 0 ? 0x00400000u : e == 255 ? 0x7FC00000u : uint(e) << 23);
  }
};

// sign : 4 exponent : 3 mantissa, times one factor of the tensor. As in decode.metal, the exponent field gets the
// difference of the biases (120) added, and exponent 0 is mended by a minimum: 2v - 2^-6 is right there and nowhere less.
struct E4M3 {
  static METAL_FUNC float decode(uchar code, float factor) {
    const float v = as_type<float>(((code & 0x7Fu) << 20) + (120u << 23));
    const float magnitude = min(v, v * 2.0f - 0.015625f);
    const uint bits = (code & 0x7F) == 0x7F ? 0x7FC00000u : as_type<uint>(magnitude);
    return as_type<float>(bits | (code & 0x80u) << 24) * factor;
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
    const float v = as_type<float>(((code & 0x7Fu) << 20) + (120u << 23));
    return (code == 0x7F ? 0.0f : min(v, v * 2.0f - 0.015625f) * 0.5f) * factor;
  }
};

// ---- what else a group has

// COLUMNS numbers side by side. N is a multiple of COLUMNS, and the planes are our own, so that they are aligned.
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

enum class Offset { none, zero, minimum };

struct Group {
  float scale, zero, minimum;
};

// All planes of a weight [N, K], K-major: codes [K / word_k, N], high [K / 32, N], scales and offsets [groups, N].
// GROUP is how many k share a scale; 0 means all of them.
template <typename Codes, typename Scale, Offset OFFSET, int GROUP, typename S, typename O>
struct Weights {
  using Element = Codes;
  static constexpr constant int word_k = Codes::word_k;
  static constexpr constant int group_k = GROUP;
  static constexpr constant bool has_offset = OFFSET != Offset::none;
  const device uint* codes;
  const device uint* high;
  const device S* scales;
  const device O* offsets;
  float factor;
  int n, k;

  static METAL_FUNC int group_of(int at) { return GROUP == 0 ? 0 : at / GROUP; }

  // Whether `at`, a multiple of 16, is the first k of its group.
  static METAL_FUNC bool begins_group(int at) { return GROUP == 0 ? at == 0 : at % GROUP == 0; }

  // The values of the group of `at` in COLUMNS columns side by side.
  template <int COLUMNS>
  METAL_FUNC void groups(int column, int at, thread Group* out) const thread {
    const long i = long(group_of(at)) * n + column;
    S scale[COLUMNS];
    O offset[COLUMNS];
    load_columns<COLUMNS>(scales + i, scale);
    if (has_offset) load_columns<COLUMNS>(offsets + i, offset);
    #pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      out[c] = {Scale::decode(scale[c], factor), 0.0f, 0.0f};
      if (OFFSET == Offset::zero) out[c].zero = float(offset[c]);
      if (OFFSET == Offset::minimum) out[c].minimum = float(offset[c]);
    }
  }

  METAL_FUNC Group group(int column, int at) const thread {
    Group one;
    groups<1>(column, at, &one);
    return one;
  }

  METAL_FUNC uint word(int column, int at) const thread { return codes[long(at / word_k) * n + column]; }

  // The fifth bits from `at` on, the first in bit 0.
  METAL_FUNC uint high_bits(int column, int at) const thread {
    return Codes::has_high ? high[long(at / 32) * n + column] >> (at % 32) : 0;
  }

  // Decoded codes (float2 or float4) to weights, in the order of the reference, each step rounded once.
  template <typename V>
  static METAL_FUNC V apply(V v, Group g) {
    if (OFFSET == Offset::zero) v -= g.zero;
    v *= g.scale;
    if (OFFSET == Offset::minimum) v += g.minimum;
    return v;
  }

  // The same in two steps, for sums over a group: without an offset, the scale can wait until the sum is known.
  template <typename V>
  static METAL_FUNC V unscaled(V v, Group g) { return has_offset ? apply(v, g) : v; }
  static METAL_FUNC float scaled(float sum, Group g) { return has_offset ? sum : sum * g.scale; }
};

}  // namespace billfish
