// Sixteen codes, a byte each, to sixteen floats: the part of dequantize that each ISA level does in its own way.
#pragma once
#include <cstdint>
#include <cstring>

#include "simd/halves.h"
#include "simd/unroll.h"

namespace BILLFISH_ISA {

// How far FileCodes::get_large moves codes of so many bits in their bytes.
constexpr int room(int low_bits, int high_bits) { return high_bits ? 0 : 8 - low_bits; }

// The compiler's own vector: it has & | ^ << >> on every machine.
typedef uint8_t Sixteen __attribute__((vector_size(16)));

inline Sixteen load_sixteen(const uint8_t* p) {
  Sixteen v;
  std::memcpy(&v, p, 16);
  return v;
}

inline uint64_t load_eight(const uint8_t* p) {
  uint64_t eight;
  std::memcpy(&eight, p, 8);
  return eight;
}

inline Sixteen two_eights(uint64_t first, uint64_t second) {
  typedef uint64_t Two __attribute__((vector_size(16)));
  return reinterpret_cast<Sixteen>(Two{first, second});
}

// The first (or second) halves of a and b, a T of each in turn.
template <class T, bool SECOND, int... I> Sixteen interleave(Sixteen a, Sixteen b, std::integer_sequence<int, I...>) {
  typedef T Elements __attribute__((vector_size(16)));
  constexpr int all = 16 / sizeof(T), from = SECOND ? all / 2 : 0;
  const Elements first = reinterpret_cast<Elements>(a), second = reinterpret_cast<Elements>(b);
#if defined(__clang__)
  return reinterpret_cast<Sixteen>(__builtin_shufflevector(first, second, (from + I / 2 + I % 2 * all)...));
#else
  return reinterpret_cast<Sixteen>(__builtin_shuffle(first, second, Elements{T(from + I / 2 + I % 2 * all)...}));
#endif
}
template <class T, bool SECOND> Sixteen interleave(Sixteen a, Sixteen b) {
  return interleave<T, SECOND>(a, b, std::make_integer_sequence<int, 16 / sizeof(T)>());
}

// Four rows of four words to columns.
inline void turn_four(Sixteen (&rows)[4]) {
  const Sixteen first[2] = {interleave<uint32_t, false>(rows[0], rows[2]), interleave<uint32_t, false>(rows[1], rows[3])};
  const Sixteen second[2] = {interleave<uint32_t, true>(rows[0], rows[2]), interleave<uint32_t, true>(rows[1], rows[3])};
  rows[0] = interleave<uint32_t, false>(first[0], first[1]), rows[1] = interleave<uint32_t, true>(first[0], first[1]);
  rows[2] = interleave<uint32_t, false>(second[0], second[1]), rows[3] = interleave<uint32_t, true>(second[0], second[1]);
}

template <int I> using Index = std::integral_constant<int, I>;

// Sixteen floats in vectors of LANES.
struct Values {
  Floats part[16 / LANES];
};

inline INLINED void store(float* out, const Values& v) {
  unroll<16 / LANES>([&](auto i) INLINED { store_floats(out + LANES * i, v.part[i]); });
}

// What is left to do with elements: value = (element - zero) * scale + minimum. A code times a half, or times a half and a small
// integer, is exact: there, product and sum can be one operation.
enum class Rest { nothing, scale, zero_scale, scale_minimum, fused_minimum, perhaps_raised };  // the last: see Run::decode_raised

// What this does to the codes of a group. An offset, if any, is a zero point or a minimum, and stands there four times where
// vectors have four lanes.
struct Group {
  float scale;
  const float* offset;
};

#if defined(BILLFISH_simd_neon)  // which header the level has, by CMake

// What follows stands in the order in which it is to be issued, and is volatile so that gcc keeps it: the queues before the two
// vector pipes of the Neoverse-N1 are short, and what waits there for its operands soon holds up all the rest.

// The bytes that sixteen floats are made of. pick<PAIR> makes four of them: byte i of the result is byte index[i], 16 and up of the
// second vector, 255 for a zero. The instruction wants neighbouring registers; with its intrinsic, gcc 12 copies both for each use.
struct Parts {
  uint8x16_t first, second;
};
template <int PAIR> INLINED inline Floats pick(const Parts& from, uint8x16_t index) {
  Floats four;
  const uint8x16_t first = from.first, second = from.second;  // read before registers are named: a sanitizer's check of a load is a call
  if constexpr (PAIR == 0) {
    register uint8x16_t a asm("v28") = first, b asm("v29") = second;
    asm volatile("tbl %0.16b, {%1.16b, %2.16b}, %3.16b" : "=w"(four) : "w"(a), "w"(b), "w"(index));
  } else {
    register uint8x16_t a asm("v30") = first, b asm("v31") = second;
    asm volatile("tbl %0.16b, {%1.16b, %2.16b}, %3.16b" : "=w"(four) : "w"(a), "w"(b), "w"(index));
  }
  return four;
}
// For floats 4 PART to 4 PART + 3, where byte j of float i is byte Element::from(i, j).
template <class Element, int PART> INLINED inline uint8x16_t index_of() {
  constexpr auto at = [](int byte) constexpr { return Element::from(4 * PART + byte / 4, byte % 4); };
  return uint8x16_t{at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10), at(11), at(12), at(13), at(14), at(15)};
}
INLINED inline uint8x16_t lookup_alone(uint8x16_t table, Sixteen codes) {
  uint8x16_t found;
  asm volatile("tbl %0.16b, {%1.16b}, %2.16b" : "=w"(found) : "w"(table), "w"(codes));
  return found;
}

template <class Element> INLINED inline Parts look(const Element& element, Sixteen codes) {
  Parts parts;
  element.low(parts, codes), element.high(parts, codes);
  return parts;
}

// The bits of MASK of `other`, beside those of v, which has none there.
template <int MASK> INLINED inline Sixteen insert(Sixteen v, Sixteen other) { return vbslq_u8(vdupq_n_u8(MASK), other, v); }

// Whether it pays to have a table for each scale instead of a product for each value.
constexpr bool TABLES_PAY = true;

// Values of a table of 16, each of which fits a bfloat16, the upper half of a float: two lookups make sixteen of these halves, and
// four more put them in place.
class Lookup {
 public:
  static constexpr bool LOOKS = true;
  explicit Lookup(const float* table) {
    for (int i = 0; i < 16; i++) {
      const uint32_t bits = float_to_bits(table[i]);
      low_[i] = uint8_t(bits >> 16), high_[i] = uint8_t(bits >> 24);
    }
  }
  explicit Lookup(const uint8_t* rows) : low_(vld1q_u8(rows)), high_(vld1q_u8(rows + 16)) {}
  INLINED void low(Parts& parts, Sixteen codes) const { parts.first = lookup_alone(low_, codes); }
  INLINED void high(Parts& parts, Sixteen codes) const { parts.second = lookup_alone(high_, codes); }
  static constexpr uint8_t from(int i, int byte) { return uint8_t(byte < 2 ? 255 : i + 16 * (byte - 2)); }
  static INLINED Floats centred(Floats x) { return x; }

 private:
  uint8x16_t low_{}, high_{};
};

// Codes of 5 bits less a bias, by a table of 32.
class Counted5 {
 public:
  static constexpr bool LOOKS = true;
  explicit Counted5(int bias) {
    for (int i = 0; i < 32; i++) {
      const uint32_t bits = float_to_bits(float(i - bias));
      low_[i / 16][i % 16] = uint8_t(bits >> 16), high_[i / 16][i % 16] = uint8_t(bits >> 24);
    }
  }
  INLINED void low(Parts& parts, Sixteen codes) const {
    const uint8x16_t first = low_[0], second = low_[1];
    register uint8x16_t a asm("v24") = first, b asm("v25") = second;
    asm volatile("tbl %0.16b, {%1.16b, %2.16b}, %3.16b" : "=w"(parts.first) : "w"(a), "w"(b), "w"(codes));
  }
  INLINED void high(Parts& parts, Sixteen codes) const {
    const uint8x16_t first = high_[0], second = high_[1];
    register uint8x16_t a asm("v26") = first, b asm("v27") = second;
    asm volatile("tbl %0.16b, {%1.16b, %2.16b}, %3.16b" : "=w"(parts.second) : "w"(a), "w"(b), "w"(codes));
  }
  static constexpr uint8_t from(int i, int byte) { return Lookup::from(i, byte); }
  static INLINED Floats centred(Floats x) { return x; }

 private:
  uint8x16_t low_[2] = {}, high_[2] = {};
};

// Codes less a bias. In bits 8 to 15 of the float 2^15, a code counts by ones; the difference is exact, so it is as good as a
// conversion, which blocks a pipe for two cycles.
class Counted {
 public:
  static constexpr bool LOOKS = false;
  explicit Counted(int bias) : offset_(vdupq_n_f32(32768 + float(bias))) {}
  static INLINED void low(Parts& parts, Sixteen codes) { parts.first = codes; }
  static INLINED void high(Parts& parts, Sixteen) { parts.second = vdupq_n_u8(0x47); }
  static constexpr uint8_t from(int i, int byte) { return uint8_t(byte == 1 ? i : byte == 3 ? 16 : 255); }
  INLINED Floats centred(Floats x) const {
    asm volatile("fsub %0.4s, %0.4s, %1.4s" : "+w"(x) : "w"(offset_));
    return x;
  }
  INLINED Values operator()(Sixteen codes) const {
    const Parts parts = look(*this, codes);
    Values v;
    unroll<4>([&](auto i) INLINED { v.part[i] = pick<0>(parts, index_of<Counted, decltype(i)::value>()); });
    repeat<4>([&](int i) INLINED { v.part[i] = centred(v.part[i]); });
    return v;
  }

 private:
  Floats offset_;
};

// Codes from 0 on. In bits 16 to 23 of a float that is 0 otherwise, a code counts by 2^-133, be it subnormal or not, and needs
// neither lookup nor difference. So scales are multiplied by 2^133 before, must still be finite, and subnormals must count.
class Subnormal {
 public:
  static constexpr bool LOOKS = false;
  static INLINED void low(Parts& parts, Sixteen codes) { parts.first = codes; }
  static INLINED void high(Parts&, Sixteen) {}
  static constexpr uint8_t from(int i, int byte) { return uint8_t(byte == 2 ? i : 255); }
  static INLINED Floats centred(Floats x) { return x; }
};
constexpr bool SUBNORMALS_PAY = true;

// In assembly also because gcc would first copy the scale to all lanes, and the offset for each use. It stands in memory four
// times: loads are free here, and copies of registers are not.
template <Rest REST> INLINED inline Floats finish(Floats x, Floats sum, const Group& group) {
  if constexpr (REST == Rest::zero_scale) x -= load_floats(group.offset);
  if constexpr (REST == Rest::scale || REST == Rest::zero_scale || REST == Rest::scale_minimum)
    asm volatile("fmul %0.4s, %0.4s, %1.s[0]" : "+w"(x) : "w"(group.scale));
  if constexpr (REST == Rest::scale_minimum) return x + load_floats(group.offset);
  if constexpr (REST == Rest::fused_minimum) {
    asm volatile("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(sum) : "w"(x), "w"(group.scale));
    return sum;
  }
  return x;
}

// The values of 32 codes, of which `parts` are there, and meanwhile the parts of the next, by `element`.
template <Rest REST, class Element, class Next>
INLINED inline void decode_pair(const Element& element, Parts (&parts)[2], Next next, const Group (&group)[2], float* out) {
  if constexpr (REST == Rest::perhaps_raised) {
    if (group[0].offset) return decode_pair<Rest::fused_minimum>(Subnormal(), parts, next, group, out);
    return decode_pair<Rest::scale>(element, parts, next, group, out);
  }
  constexpr int CENTRE = 1, FINISH = 2, STORE = 6;  // so many steps after a vector has been picked
  Floats x[8], sum[8];
  Sixteen codes[2];
  if constexpr (Element::LOOKS) codes[0] = next(Index<0>()), codes[1] = next(Index<1>());
  unroll<8 + STORE>([&](auto step) INLINED {
    if constexpr (step < 8) {
      if constexpr (REST == Rest::fused_minimum) sum[step] = load_alone<Floats>(group[step / 4].offset);
      const uint8x16_t index = index_of<Element, step % 4>();
      if constexpr (std::is_same_v<Element, Subnormal>) x[step] = vreinterpretq_f32_u8(lookup_alone(parts[step / 4].first, index));
      else x[step] = pick<step / 4>(parts[step / 4], index);
    }
    if constexpr (step >= CENTRE && step < 8 + CENTRE) x[step - CENTRE] = element.centred(x[step - CENTRE]);
    if constexpr (step >= FINISH && step < 8 + FINISH) {
      constexpr int i = step - FINISH;
      x[i] = finish<REST>(x[i], sum[i], group[i / 4]);
    }
    if constexpr (step >= STORE) {
      constexpr int i = step - STORE;
      asm volatile("str %q1, %0" : "=m"(*reinterpret_cast<Floats*>(out + 4 * i)) : "w"(x[i]));
    }
    if constexpr (step == 4 || step == 8) {
      constexpr int i = step / 4 - 1;
      if constexpr (!Element::LOOKS) codes[i] = next(Index<i>());  // in the place of the last ones, which have been used
      element.low(parts[i], codes[i]);
    }
    if constexpr (step == 5 || step == 9) element.high(parts[step / 4 - 1], codes[step / 4 - 1]);
  });
}

#else

template <int MASK> inline Sixteen insert(Sixteen v, Sixteen other) { return v | (other & uint8_t(MASK)); }

constexpr bool TABLES_PAY = false, SUBNORMALS_PAY = false;
struct Subnormal {};

#if defined(BILLFISH_simd_avx512)
inline __m512i widened(Sixteen codes) { return _mm512_cvtepu8_epi32(reinterpret_cast<__m128i>(codes)); }
struct Counted {
  Floats bias;
  explicit Counted(int b) : bias(splat(float(b))) {}
  INLINED Values operator()(Sixteen codes) const { return {{_mm512_sub_ps(_mm512_cvtepi32_ps(widened(codes)), bias)}}; }
};
struct Lookup {
  Floats table;
  explicit Lookup(const float* t) : table(load_floats(t)) {}
  INLINED Values operator()(Sixteen codes) const { return {{_mm512_permutexvar_ps(widened(codes), table)}}; }
};
#elif defined(BILLFISH_simd_avx2)
template <int HALF> __m256i widened(Sixteen codes) {
  const __m128i v = reinterpret_cast<__m128i>(codes);
  return _mm256_cvtepu8_epi32(HALF ? _mm_unpackhi_epi64(v, v) : v);
}
struct Counted {
  Floats bias;
  explicit Counted(int b) : bias(splat(float(b))) {}
  INLINED Values operator()(Sixteen codes) const {
    return {{_mm256_sub_ps(_mm256_cvtepi32_ps(widened<0>(codes)), bias), _mm256_sub_ps(_mm256_cvtepi32_ps(widened<1>(codes)), bias)}};
  }
};
// Both halves of the table, and bit 3 of the code says which.
struct Lookup {
  Floats first, second;
  explicit Lookup(const float* t) : first(load_floats(t)), second(load_floats(t + 8)) {}
  Floats eight(__m256i codes) const {
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, codes), _mm256_permutevar8x32_ps(second, codes),
                            _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
  }
  INLINED Values operator()(Sixteen codes) const { return {{eight(widened<0>(codes)), eight(widened<1>(codes))}}; }
};
#else
template <class F> inline Values each_value(F f) {
  alignas(64) float out[16];
  for (int i = 0; i < 16; i++) out[i] = f(i);
  Values v;
  unroll<16 / LANES>([&](auto i) { v.part[i] = load_floats(out + LANES * i); });
  return v;
}
struct Counted {
  int bias;
  explicit Counted(int b) : bias(b) {}
  INLINED Values operator()(Sixteen codes) const { return each_value([&](int i) { return float(int(codes[i]) - bias); }); }
};
struct Lookup {
  const float* table;
  explicit Lookup(const float* t) : table(t) {}
  INLINED Values operator()(Sixteen codes) const { return each_value([&](int i) { return table[codes[i]]; }); }
};
#endif

using Counted5 = Counted;

template <Rest REST> inline Floats finish(Floats x, const Group& group) {
  if constexpr (REST == Rest::nothing) return x;
  if constexpr (REST == Rest::scale) return x * group.scale;
  if constexpr (REST == Rest::zero_scale) return (x - *group.offset) * group.scale;
  return x * group.scale + *group.offset;
}

// 32 codes to values, which gives way to the next.
using Parts = Sixteen;
template <class Element> Parts look(const Element&, Sixteen codes) { return codes; }
template <Rest REST, class Element, class Next>
INLINED inline void decode_pair(const Element& element, Parts (&parts)[2], Next next, const Group (&group)[2], float* out) {
  unroll<2>([&](auto i) INLINED {
    Values x = element(parts[i]);
    unroll<16 / LANES>([&](auto j) INLINED { x.part[j] = finish<REST>(x.part[j], group[i]); });
    store(out + 16 * i, x);
    parts[i] = next(i);
  });
}

#endif

}  // namespace BILLFISH_ISA
