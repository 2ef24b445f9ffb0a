// The search for scales and minimums, row by row: billfish/core/search.py, bit for bit.
//
// Every operation is rounded once, in the order in which NumPy has them. Sums go by lanes: product k into lane k % 16, then the upper half of
// the lanes onto the lower, until one is left.
#pragma once
#include "search/elements.h"

namespace BILLFISH_ISA {
namespace {

using billfish::ScaleSearch;
using billfish::SearchRule;

// The sums of COUNT products each: products(at, p) fills p with those of elements [at, at + PER_PART).
template <int COUNT, class Products> INLINED inline void sum_lanes(int64_t length, const Products& products, float* sums) {
  Reals lanes[COUNT][PARTS];
  for (int i = 0; i < COUNT; i++)
    for (int part = 0; part < PARTS; part++) lanes[i][part] = reals(-0.0f);  // -0 + x is x, -0 included
  const int64_t whole = length / SUM_LANES * SUM_LANES;
  int64_t at = 0;
  for (; at < whole; at += SUM_LANES)
    each_part([&](int part) INLINED {
      Reals p[COUNT];
      products(at + part * PER_PART, p);
      repeat<COUNT>([&](int i) INLINED { lanes[i][part] += p[i]; });
    });
  if (at < length) {  // there is room behind the row; what comes from there counts as +0
    Integers index;
    for (int i = 0; i < PER_PART; i++) index[i] = i;
    each_part([&](int part) INLINED {
      Reals p[COUNT];
      products(at + part * PER_PART, p);
      const Integers inside = index < int32_t(length - at) - part * PER_PART;
      repeat<COUNT>([&](int i) INLINED { lanes[i][part] += of_bits(bits_of(p[i]) & inside); });
    });
  }
  repeat<COUNT>([&](int i) INLINED {
    alignas(64) float sum[SUM_LANES];
    std::memcpy(sum, lanes[i], sizeof sum);
    for (int j = 0; j < 8; j++) sum[j] += sum[j + 8];
    for (int j = 0; j < 4; j++) sum[j] += sum[j + 4];
    for (int j = 0; j < 2; j++) sum[j] += sum[j + 2];
    sums[i] = sum[0] + sum[1];
  });
}

inline float half_of(float x) { return half_to_float_fast(float_to_half_fast(x)); }

// What a format can store that is nearest to x; the rule of a minimum knows the scale.
inline float stored(const SearchRule& rule, int64_t row, float x, float scale = 0) {
  auto clip = [&](float v, float low, float high) { return v < low ? low : v > high ? high : v; };
  auto to_integer = [](float v) {
    const float magnitude = bits_to_float(float_to_bits(v) & 0x7fffffff);
    return magnitude < 0x1p23f ? bits_to_float(float_to_bits((magnitude + 0x1p23f) - 0x1p23f) | (float_to_bits(v) & 0x80000000)) : v;
  };
  switch (rule.kind) {
    case SearchRule::any: return x;
    case SearchRule::f16: return half_of(x);
    case SearchRule::e4m3: {
      const float wanted = x * reciprocal(rule.factor);
      return nearest_e4m3(wanted > 448 ? 448 : wanted) * rule.factor;
    }
    case SearchRule::integer: return clip(to_integer(x * reciprocal(rule.upper[row])), rule.low, rule.high) * rule.upper[row];
    case SearchRule::at_most_zero: return x < 0 ? x : 0.0f;
    case SearchRule::zero_integer: return -scale * (clip(to_integer(-x * reciprocal(scale)), 0, rule.high) + 0.0f);
    case SearchRule::zero_f16: return -scale * half_of(-x * reciprocal(scale));
  }
  return x;
}

struct Pair {
  float scale, minimum;
};

// The least error so far, and its candidate.
struct Best {
  Pair pair;
  float error;
  // Which candidate is better cannot be foreseen: no branch.
  INLINED void consider(Pair candidate, float its_error) {
    const bool better = its_error < error;
    pair.scale = better ? candidate.scale : pair.scale;
    pair.minimum = better ? candidate.minimum : pair.minimum;
    error = better ? its_error : error;
  }
};

// What a search by importance and one without it have in common.
template <class Element, bool MINIMUM> struct RowFit {
  const ScaleSearch& s;
  const Element& element;
  int64_t row;
  const float *w, *importance;

  INLINED Reals shifted(int64_t at, Reals minimum) const {
    if constexpr (MINIMUM) return load_reals(w + at) - minimum;
    else return load_reals(w + at);
  }

  Pair storable(float scale, float minimum) const {
    const float d = stored(s.scale_rule, row, scale);
    return {d, MINIMUM ? stored(s.minimum_rule, row, minimum, d) : 0};
  }

  // The pair that is best for the codes which another pair gives. WITH: by importance.
  template <bool WITH> Pair fitted(float scale, float minimum) const {
    const Reals least = reals(minimum), inverse = reals(reciprocal(scale));
    auto codes_at = [&](int64_t at) INLINED { return element.round(shifted(at, least) * inverse); };
    if constexpr (!MINIMUM) {
      float sums[2];
      sum_lanes<2>(s.length, [&](int64_t at, Reals* p) INLINED {
        const Reals codes = codes_at(at), weighted = WITH ? codes * load_reals(importance + at) : codes;
        p[0] = weighted * codes, p[1] = weighted * load_reals(w + at);
      }, sums);
      const float fit = sums[1] * reciprocal(sums[0]);
      return storable(sums[0] > 0 ? fit : scale, 0);
    } else {
      float sums[5];
      sum_lanes<5>(s.length, [&](int64_t at, Reals* p) INLINED {
        const Reals codes = codes_at(at), x = load_reals(w + at), v = WITH ? load_reals(importance + at) : x;
        const Reals weighted = WITH ? codes * v : codes;
        p[0] = codes * weighted, p[1] = x * weighted, p[2] = weighted, p[3] = WITH ? x * v : x, p[4] = v;
      }, sums);
      const float squares = sums[0], products = sums[1], code_sum = sums[2], w_sum = sums[3], total = WITH ? sums[4] : float(s.length);
      const float determinant = total * squares - code_sum * code_sum;
      const bool solvable = determinant > 0;
      const float inverse_determinant = reciprocal(solvable ? determinant : 0);
      const float fit = (total * products - w_sum * code_sum) * inverse_determinant;
      const float lowest = (w_sum - fit * code_sum) / total;
      return storable(solvable ? fit : scale, solvable ? lowest : minimum);
    }
  }
};

template <class Element, bool MINIMUM, bool WEIGHTED> struct RowSearch : RowFit<Element, MINIMUM> {
  using Fit = RowFit<Element, MINIMUM>;
  using Fit::s, Fit::element, Fit::row, Fit::importance, Fit::shifted, Fit::storable;

  // The squared error, the weighted one, or both.
  template <bool SQUARED, bool BY_IMPORTANCE> void errors(Pair pair, float* error) const {
    const Reals scale = reals(pair.scale), minimum = reals(pair.minimum), inverse = reals(reciprocal(pair.scale));
    sum_lanes<SQUARED + BY_IMPORTANCE>(s.length, [&](int64_t at, Reals* p) INLINED {
      const Reals x = shifted(at, minimum), wrong = element.round(x * inverse) * scale - x;
      p[0] = wrong * wrong;
      if constexpr (BY_IMPORTANCE) p[SQUARED] = p[0] * load_reals(importance + at);
    }, error);
  }

  void run() const {
    const float scale = s.scale[row], minimum = MINIMUM ? s.minimum[row] : 0;
    const Pair start = storable(scale, minimum);
    float first[2];
    errors<true, WEIGHTED>(start, first);
    Best plain{start, first[0]}, weighted{start, first[WEIGHTED]};
    if constexpr (!MINIMUM)
      for (int64_t i = 0; i < s.factor_count; i++) {
        const Pair candidate = storable(scale * s.factors[i], 0);
        float error[2];
        errors<true, WEIGHTED>(candidate, error);
        plain.consider(candidate, error[0]);
        if constexpr (WEIGHTED) weighted.consider(candidate, error[1]);
      }
    if (s.thorough) finish<false>(plain, s.plain_scale, s.plain_minimum);
    if constexpr (WEIGHTED) finish<true>(weighted, s.weighted_scale, s.weighted_minimum);
  }

  // Candidates for one of the two errors alone, and what fits the codes of the winner. WITH: by importance.
  template <bool WITH> void finish(Best& best, float* scale, float* minimum) const {
    auto consider = [&](Pair candidate) INLINED {
      float error;
      errors<!WITH, WITH>(candidate, &error);
      best.consider(candidate, error);
    };
    if constexpr (MINIMUM)
      for (int64_t i = 0; i < s.factor_count; i++) {
        const float other = s.scale[row] * s.factors[i], least = s.minimum[row];
        consider(Fit::template fitted<WITH>(other, i % 2 ? least + (s.scale[row] - other) * s.element.high : least));
      }
    else if constexpr (WITH)
      for (int64_t i = 0; i < s.further_count; i++) consider(storable(s.scale[row] * s.further[i], 0));
    consider(Fit::template fitted<WITH>(best.pair.scale, best.pair.minimum));
    scale[row] = best.pair.scale;
    if constexpr (MINIMUM) minimum[row] = best.pair.minimum;
  }
};

template <class Element, bool MINIMUM, bool WEIGHTED>
void search_rows(const Element& element, const ScaleSearch& s, int64_t first, int64_t last, float* room) {
  const bool copied = s.length % SUM_LANES != 0;  // whole lanes are read
  float *w = room, *importance = room + s.length + SUM_LANES;
  if (copied) std::memset(room, 0, size_t(2 * (s.length + SUM_LANES)) * sizeof(float));
  for (int64_t row = first; row < last; row++) {
    RowSearch<Element, MINIMUM, WEIGHTED> search{{s, element, row, s.w + row * s.length, WEIGHTED ? s.importance + row * s.length : nullptr}};
    if (copied) {
      std::memcpy(w, search.w, size_t(s.length) * sizeof(float));
      search.w = w;
      if constexpr (WEIGHTED) {
        std::memcpy(importance, search.importance, size_t(s.length) * sizeof(float));
        search.importance = importance;
      }
    }
    search.run();
  }
}

void search_scales(const ScaleSearch& s, int64_t first, int64_t last, float* room) {
  with_element(s.element, [&](const auto& element) {
    using E = std::decay_t<decltype(element)>;
    if (s.minimum) {
      if (s.importance) search_rows<E, true, true>(element, s, first, last, room);
      else search_rows<E, true, false>(element, s, first, last, room);
    } else {
      if (s.importance) search_rows<E, false, true>(element, s, first, last, room);
      else search_rows<E, false, false>(element, s, first, last, room);
    }
  });
}

// ---- codes ----------------------------------------------------------------------------------------------------------

// code(x) for each (w - minimum) / scale + zero.
template <class Code> INLINED inline void encode_with(const billfish::Encoding& e, int64_t first, int64_t last, const Code& code) {
  for (int64_t row = first; row < last; row++) {
    const float* w = e.w + row * e.length;
    uint8_t* out = e.codes + row * e.length;
    const Reals inverse = reals(reciprocal(e.scale[row])), minimum = reals(e.minimum ? e.minimum[row] : 0), zero = reals(e.zero ? e.zero[row] : 0);
    alignas(64) float tail[SUM_LANES] = {};
    alignas(64) int32_t codes[SUM_LANES];
    for (int64_t at = 0; at < e.length; at += SUM_LANES) {
      const int64_t count = e.length - at < SUM_LANES ? e.length - at : SUM_LANES;
      const float* from = w + at;
      if (count < SUM_LANES) from = static_cast<const float*>(std::memcpy(tail, from, size_t(count) * sizeof(float)));
      each_part([&](int part) INLINED {
        Reals x = load_reals(from + part * PER_PART);
        if (e.minimum) x -= minimum;
        x *= inverse;
        if (e.zero) x += zero;
        const Integers found = code(x);
        std::memcpy(codes + part * PER_PART, &found, sizeof found);
      });
      if (count == SUM_LANES) for (int i = 0; i < SUM_LANES; i++) out[at + i] = uint8_t(codes[i]);
      else for (int64_t i = 0; i < count; i++) out[at + i] = uint8_t(codes[i]);
    }
  }
}

void encode_rows(const billfish::Encoding& e, int64_t first, int64_t last) {
  using billfish::Ties;
  const float middle = 0.5f + e.element.bias, top = float((1 << e.element.bits) - 1);
  auto whole_of = [](Reals x) INLINED {  // toward zero, of magnitudes below 2^31
    return __builtin_convertvector(__builtin_convertvector(x, Integers), Reals);
  };
  switch (e.ties) {
    case Ties::even: return with_element(e.element, [&](const auto& element) {
      encode_with(e, first, last, [&](Reals x) INLINED { return element.code(x); });
    });
    case Ties::up: return encode_with(e, first, last, [&](Reals x) INLINED {
      return __builtin_convertvector(clipped(x + middle, 0, top), Integers);
    });
    case Ties::away: return encode_with(e, first, last, [&](Reals x) INLINED {
      const Reals magnitude = clipped(magnitude_of(x), 0, 1024), whole = whole_of(magnitude);
      const Integers code = __builtin_convertvector(whole + whole_of(2.0f * (magnitude - whole)), Integers);
      return (bits_of(x) < 0 ? -code : code) & 255;
    });
    case Ties::toward_zero: return encode_with(e, first, last, [&](Reals x) INLINED {
      const Reals magnitude = magnitude_of(x);
      Integers code = {};
      for (const float edge : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f}) code -= magnitude > edge;
      return code | ((x < 0) & (code > 0) & 8);
    });
  }
}

// ---- errors ---------------------------------------------------------------------------------------------------------

typedef uint8_t CodeBytes __attribute__((vector_size(PER_PART)));
typedef float HalfReals __attribute__((vector_size(WIDTH / 2)));
typedef double Doubles __attribute__((vector_size(WIDTH)));

// Numbers of the groups that PER_PART weights from `at` on belong to, of which a row has `count`.
INLINED inline Reals of_groups(const float* numbers, int64_t at, int64_t group, int64_t count) {
  const int64_t first = at / group;
  if (first == (at + PER_PART - 1) / group) return reals(numbers[first]);
  Reals each{};
  for (int i = 0; i < PER_PART; i++) {
    const int64_t own = (at + i) / group;
    each[i] = numbers[own < count ? own : count - 1];
  }
  return each;
}

void error_of_rows(const billfish::ErrorOfCodes& e, int64_t first, int64_t last) {
  const int64_t groups = (e.length + e.group - 1) / e.group;
  for (int64_t row = first; row < last; row++) {
    const float *w = e.w + row * e.length, *importance = e.importance ? e.importance + row * e.length : nullptr;
    const float *scale = e.scale + row * groups, *zero = e.zero ? e.zero + row * groups : nullptr, *minimum = e.minimum ? e.minimum + row * groups : nullptr;
    const uint8_t* codes = e.codes + row * e.length;
    Doubles lanes[2 * PARTS];
    for (Doubles& lane : lanes) lane = -0.0 - Doubles{};
    alignas(64) float tail_w[SUM_LANES] = {}, tail_importance[SUM_LANES] = {};
    alignas(64) uint8_t tail_codes[SUM_LANES] = {};
    for (int64_t at = 0; at < e.length; at += SUM_LANES) {
      const int64_t count = e.length - at;
      const float *w_here = w + at, *importance_here = importance ? importance + at : nullptr;
      const uint8_t* codes_here = codes + at;
      if (count < SUM_LANES) {
        std::memcpy(tail_w, w_here, size_t(count) * sizeof(float)), w_here = tail_w;
        if (importance) std::memcpy(tail_importance, importance_here, size_t(count) * sizeof(float)), importance_here = tail_importance;
        std::memcpy(tail_codes, codes_here, size_t(count)), codes_here = tail_codes;
      }
      each_part([&](int part) INLINED {
        const int64_t here = at + part * PER_PART;
        CodeBytes bytes;
        std::memcpy(&bytes, codes_here + part * PER_PART, sizeof bytes);
        Reals value = looked_up(e.values, __builtin_convertvector(bytes, Integers));
        if (zero) value -= of_groups(zero, here, e.group, groups);
        value *= of_groups(scale, here, e.group, groups);
        if (minimum) value += of_groups(minimum, here, e.group, groups);
        float values[PER_PART];
        std::memcpy(values, &value, sizeof value);
        repeat<2>([&](int half) INLINED {
          const int from = half * PER_PART / 2;
          auto doubles = [&](const float* p) INLINED {
            HalfReals part_of;
            std::memcpy(&part_of, p, sizeof part_of);
            return __builtin_convertvector(part_of, Doubles);
          };
          const Doubles wrong = doubles(w_here + part * PER_PART + from) - doubles(values + from);
          Doubles product = importance ? wrong * (wrong * doubles(importance_here + part * PER_PART + from)) : wrong * wrong;
          if (count < SUM_LANES)
            for (int i = 0; i < PER_PART / 2; i++)
              if (part * PER_PART + from + i >= count) product[i] = 0;
          lanes[2 * part + half] += product;
        });
      });
    }
    double sums[SUM_LANES];
    std::memcpy(sums, lanes, sizeof sums);
    for (int half = SUM_LANES / 2; half; half /= 2)
      for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    e.error[row] = sums[0];
  }
}

// ---- rows -----------------------------------------------------------------------------------------------------------

void extremes_of_rows(const float* w, int64_t rows, int64_t length, float* least, float* greatest) {
  for (int64_t row = 0; row < rows; row++, w += length) {
    int64_t k = 0;
    float low = w[0], high = w[0];
    if (length >= PER_PART) {
      Reals lows = load_reals(w), highs = lows;
      for (; k + PER_PART <= length; k += PER_PART) {
        const Reals x = load_reals(w + k);
        lows = x < lows ? x : lows, highs = x > highs ? x : highs;
      }
      alignas(64) float l[PER_PART], h[PER_PART];
      std::memcpy(l, &lows, sizeof l), std::memcpy(h, &highs, sizeof h);
      for (int i = 0; i < PER_PART; i++) low = l[i] < low ? l[i] : low, high = h[i] > high ? h[i] : high;
    }
    for (; k < length; k++) low = w[k] < low ? w[k] : low, high = w[k] > high ? w[k] : high;
    // Zeros of both signs are equal: of these, the first.
    for (k = 0; low == 0 && k < length; k++) if (w[k] == 0) { low = w[k]; break; }
    for (k = 0; high == 0 && k < length; k++) if (w[k] == 0) { high = w[k]; break; }
    least[row] = low, greatest[row] = high;
  }
}

void signed_extreme_of_rows(const float* w, int64_t rows, int64_t length, float* largest) {
  for (int64_t row = 0; row < rows; row++, w += length) {
    int64_t k = 0;
    float low = w[0], high = w[0];
    if (length >= PER_PART) {
      Reals lows = load_reals(w), highs = lows;
      for (k = PER_PART; k + PER_PART <= length; k += PER_PART) {
        const Reals x = load_reals(w + k);
        lows = x < lows ? x : lows, highs = x > highs ? x : highs;
      }
      alignas(64) float l[PER_PART], h[PER_PART];
      std::memcpy(l, &lows, sizeof l), std::memcpy(h, &highs, sizeof h);
      for (int i = 0; i < PER_PART; i++) low = l[i] < low ? l[i] : low, high = h[i] > high ? h[i] : high;
    }
    for (; k < length; k++) low = w[k] < low ? w[k] : low, high = w[k] > high ? w[k] : high;
    if (high != -low) {
      largest[row] = high > -low ? high : low;
      continue;
    }
    for (k = 0; k + 1 < length && w[k] != low && w[k] != high; k++) {}  // both, or zeros: the first
    largest[row] = w[k];
  }
}

void dot_of_rows(const float* a, const float* b, int64_t rows, int64_t length, float* out) {
  for (int64_t row = 0; row < rows; row++, a += length, b += length) {
    const int64_t whole = length / SUM_LANES * SUM_LANES;
    alignas(64) float x[SUM_LANES] = {}, y[SUM_LANES] = {};
    if (whole < length) {
      std::memcpy(x, a + whole, size_t(length - whole) * sizeof(float));
      std::memcpy(y, b + whole, size_t(length - whole) * sizeof(float));
    }
    sum_lanes<1>(length, [&](int64_t at, Reals* p) INLINED {
      const bool tail = at >= whole;
      p[0] = load_reals(tail ? x + (at - whole) : a + at) * load_reals(tail ? y + (at - whole) : b + at);
    }, out + row);
  }
}

}  // namespace
}  // namespace BILLFISH_ISA
