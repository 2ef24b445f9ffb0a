// Compiled once for each ISA level; see dequantize.h.
#include "dequantize/dequantize.h"
#include BILLFISH_SIMD
#include "layout/file_codes.h"
#include "layout/file_scales.h"

namespace BILLFISH_ISA {
namespace {

// Codes at a time where values wait in the first-level cache, to be rounded.
constexpr int64_t SHORT_RUN = 1024;

// What one thread needs to decode runs of rows.
struct Run {
  const Storage& s;
  Lookup lookup;
  Counted5 counted5;
  Counted counted;
  int shift;  // of codes in rows of bytes or nibbles, 2^shift have a scale in common
  bool has_minimum, exact_products, has_tables, apart_in_place;
  GroupNumbers groups;

  explicit Run(const Storage& storage) : s(storage), lookup(storage.table), counted5(storage.bias), counted(storage.bias) {
    for (shift = 4; int64_t(1) << shift < s.group; shift++) {}
    has_tables = TABLES_PAY && s.scaled_tables && s.group == 32;
    has_minimum = s.minimum.kind != GroupField::none || s.minimum_offset >= 0;
    apart_in_place = s.scales == Storage::apart && !has_minimum && s.zero.kind == GroupField::none && s.k % s.block == 0 &&
                     (s.scale.kind == GroupField::looked_up || (s.scale.kind == GroupField::f16 && s.group >= 32));
    exact_products = s.scales == Storage::apart ? s.scale.kind == GroupField::f16 : s.scales != Storage::looked_up;
  }

  // `count` codes from p on, a multiple of Codes::count. element(i) knows what codes of block i mean, and group(i, v), called in
  // order, is that of its codes 16 v to 16 v + 15.
  template <class Codes, Rest REST, class ElementOf, class GroupOf>
  INLINED void decode_blocks(const uint8_t* p, int64_t count, ElementOf element, GroupOf group, float* __restrict out) const {
    constexpr int SIXTEENS = Codes::count / 16;
    const int64_t low = s.code_field[0].offset, high = s.code_field[1].offset, last = count / Codes::count - 1;
    const int64_t stride = s.block_bytes, run_bytes = RUN_GROUPS * s.group / s.block * s.block_bytes;
    const Sixteen flip = Sixteen{} + s.flip;
    auto codes = [&](const uint8_t* block, auto v) INLINED {
      if constexpr (std::is_same_v<decltype(element(int64_t())), Subnormal>)
        return Codes::template get_large<v>(block + low, block + high);
      else if constexpr (Codes::bits == 8) return Codes::template get<v>(block + low, block + high) ^ flip;
      else return Codes::template get<v>(block + low, block + high);
    };
    Parts parts[2];
    unroll<2>([&](auto i) INLINED { parts[i] = look(element(int64_t(0)), codes(p, i)); });
    for (int64_t i = 0; i <= last; i++, out += Codes::count) {
      const int64_t following = std::min(i + 1, last);  // after the last block it is looked up again, and nobody wants to know
      const uint8_t* ahead = i < last ? p + stride : p;
      if constexpr (Codes::count == 256)  // before the next run is decoded, its scales are read
        for (int64_t j = 0; j < stride; j += 64) __builtin_prefetch(p + run_bytes + j);
      unroll<SIXTEENS / 2>([&](auto pair) INLINED {
        constexpr int v = 2 * pair, next_v = (v + 2) % SIXTEENS;
        const uint8_t* block = next_v ? p : ahead;
        auto next = [&](auto j) INLINED { return codes(block, Index<next_v + j>()); };
        const Group groups[2] = {group(i, v), group(i, v + 1)};
        decode_pair<REST>(element(next_v ? i : following), parts, next, groups, out + 16 * v);
      });
      p = ahead;
    }
  }

  // Of blocks, or rows, whose groups have been read.
  template <class Codes, Rest REST, class Element>
  __attribute__((noinline)) void decode_groups(const Element& of, const uint8_t* p, int64_t count, float* out) const {
    const Element element = of;  // in registers, where stores cannot change it
    const float *scale = groups.scale, (*offset)[4] = groups.offset;
    const int64_t by = shift;
    decode_blocks<Codes, REST>(p, count, [&](int64_t) INLINED { return element; }, [&](int64_t i, int v) INLINED {
      const int64_t at = i * Codes::count + 16 * v, group = Codes::group ? at / std::max(Codes::group, 1) : at >> by;
      return Group{scale[group], offset[group]};
    }, out);
  }

  // The same for blocks with one half as their scale, and perhaps one as their minimum, which are read here.
  template <class Codes, Rest REST, class Element>
  __attribute__((noinline)) void decode_halves(const Element& of, const uint8_t* p, int64_t count, float* out) const {
    const Element element = of;  // in registers, where stores cannot change it
    const uint8_t *scale = p + s.scale_offset, *minimum = p + s.minimum_offset;
    const int64_t stride = s.block_bytes, last = count / Codes::count - 1;
    alignas(64) float offset[2][4];  // of this block and the next: in one line of the cache, or the stream of stores would stop
    if constexpr (REST == Rest::fused_minimum) put(offset[0], read_half(minimum));
    decode_blocks<Codes, REST>(p, count, [&](int64_t) INLINED { return element; }, [&](int64_t i, int v) INLINED {
      if (REST == Rest::fused_minimum && v == 0) put(offset[~i & 1], read_half(minimum + std::min(i + 1, last) * stride));
      return Group{read_half(scale + i * stride), offset[i & 1]};
    }, out);
  }

  // Signed bytes with one half as their scale. (code - 128) * d is (2^-133 code) * (2^133 d) - 2^7 d, exactly, and a zero has the
  // right sign if d is positive. So where d is from 2^-14 to 2^-5, both numbers are made of its bits, a block ahead.
  template <class Codes>
  __attribute__((noinline)) void decode_raised(const uint8_t* p, int64_t count, float* out) const {
    struct Raised {
      float offset[4], scale, unused[3];
    };
    alignas(64) Raised raised[2];  // as above
    auto raise = [](Raised& to, const uint8_t* half) INLINED {
      const uint32_t d = uint32_t(read<uint16_t>(half)) << 13, up = 112;  // from the exponent of a half to that of a float
      const uint32_t scale = d + ((up + 133) << 23);
      uint64_t minus = d + ((up + 7) << 23) + 0x80000000;
      minus |= minus << 32;
      asm("" : "+r"(minus));  // or gcc would copy it in a vector
      std::memcpy(to.offset, &minus, 8), std::memcpy(to.offset + 2, &minus, 8), std::memcpy(&to.scale, &scale, 4);
    };
    const uint8_t* scale = p + s.scale_offset;
    const int64_t stride = s.block_bytes, last = count / Codes::count - 1;
    Raised *now = raised, *next = raised + 1;
    raise(*next, scale);
    const Counted element = counted;
    decode_blocks<Codes, Rest::perhaps_raised>(p, count, [&](int64_t) INLINED { return element; }, [&](int64_t i, int v) INLINED {
      if (v == 0) {
        std::swap(now, next);
        raise(*next, i < last ? scale + stride : scale);
      }
      const bool fits = uint32_t(read<uint16_t>(scale)) - 0x0400 < 0x2800 - 0x0400;
      const Group group = fits ? Group{now->scale, now->offset} : Group{read_half(scale), nullptr};
      if (v == 1) scale += stride;
      return group;
    }, out);
  }

  // Of rows, where GROUP codes, or a multiple of so many, have a scale in common that number(p) reads from an array.
  template <class Codes, int GROUP, class Element, class Number>
  __attribute__((noinline)) void decode_apart(const Element& of, const uint8_t* p, int64_t count, const uint8_t* scale,
                                              Number number, float* out) const {
    const Element element = of;
    const int64_t by = shift, stride = s.scale.stride;
    decode_blocks<Codes, Rest::scale>(p, count, [&](int64_t) INLINED { return element; }, [&](int64_t i, int v) INLINED {
      return Group{number(scale + ((i * Codes::count + 16 * v / GROUP * GROUP) >> by) * stride), nullptr};
    }, out);
  }

  // The same where each 32 codes have a byte as their scale, and Storage::scaled_tables a table for each byte.
  template <class Codes, class Table>
  __attribute__((noinline)) void decode_scaled(const uint8_t* p, int64_t count, const uint8_t* byte, int64_t byte_stride,
                                               float* out) const {
    const uint8_t* tables = s.scaled_tables;
    decode_blocks<Codes, Rest::nothing>(p, count, [&](int64_t i) INLINED { return Table(tables + 32 * byte[i * byte_stride]); },
                                        [](int64_t, int) INLINED { return Group{1, nullptr}; }, out);
  }

  // Codes from p on, at k of a row; a multiple of a block.
  void decode(int64_t row, int64_t k, const uint8_t* p, int64_t count, float* out) const {
    const uint8_t* apart = s.scale.data + row * s.scale.row_stride + k / s.group * s.scale.stride;
    with_codes(s, [&](auto codes) {
      using Codes = decltype(codes);
      if constexpr (TABLES_PAY && Codes::count == 32 && Codes::bits == 4)
        if (has_tables) {
          if (s.scales == Storage::apart) return decode_scaled<Codes, Lookup>(p, count, apart, s.scale.stride, out);
          return decode_scaled<Codes, Lookup>(p, count, p + s.sub_offset, s.block_bytes, out);
        }
      auto elements = [&](const auto& element) {
        if constexpr (Codes::group == 0)
          if (apart_in_place) {
            auto half = [](const uint8_t* at) INLINED { return read_half(at); };
            if (s.scale.kind == GroupField::f16) return decode_apart<Codes, 32>(element, p, count, apart, half, out);
            auto value = [values = s.byte_values](const uint8_t* at) INLINED { return values[*at]; };
            return decode_apart<Codes, 16>(element, p, count, apart, value, out);
          }
        decode_elements<Codes>(element, p, count, out);
      };
      if constexpr (Codes::bits <= 4) elements(lookup);
      else if constexpr (Codes::bits == 5) elements(counted5);
      else elements(counted);
    });
  }

  template <class Codes, class Element>
  void decode_elements(const Element& element, const uint8_t* p, int64_t count, float* out) const {
    if constexpr (Codes::count == 32) {
      if constexpr (Codes::group == 32)
        if (s.scales == Storage::halves && has_minimum) return decode_halves<Codes, Rest::fused_minimum>(element, p, count, out);
      if constexpr (SUBNORMALS_PAY && Codes::bits == 8)
        if (s.scales == Storage::halves && s.bias == 128) return decode_raised<Codes>(p, count, out);
      if (s.scales == Storage::halves) return decode_halves<Codes, Rest::scale>(element, p, count, out);
    }
    if constexpr (Codes::minimums != Minimums::never)
      if (has_minimum && exact_products) {
        if constexpr (SUBNORMALS_PAY && Codes::minimums == Minimums::always)
          if (groups.raised) return decode_groups<Codes, Rest::fused_minimum>(Subnormal(), p, count, out);
        return decode_groups<Codes, Rest::fused_minimum>(element, p, count, out);
      }
    if constexpr (Codes::group == 0) {
      if (has_minimum) return decode_groups<Codes, Rest::scale_minimum>(element, p, count, out);
      if (s.zero.kind != GroupField::none) return decode_groups<Codes, Rest::zero_scale>(element, p, count, out);
    }
    if constexpr (Codes::minimums != Minimums::always) decode_groups<Codes, Rest::scale>(element, p, count, out);
  }

  // Whether kernels read scales themselves.
  bool in_place() const { return s.scales == Storage::halves || has_tables || apart_in_place; }

  // How many codes decode_run takes at most.
  int64_t longest(int type) const { return type != 0 || s.k % s.block ? SHORT_RUN : in_place() ? s.k : RUN_GROUPS * s.group; }

  // Codes [k, k + count) of a row, found at p, to those of the output.
  void decode_run(int64_t row, int64_t k, int64_t count, const uint8_t* p, void* out, int type) {
    const int64_t at = row * s.k + k, padded = (count + s.block - 1) / s.block * s.block;
    if (!in_place()) read_groups(s, row, k, count, groups);
    alignas(64) float values[SHORT_RUN];
    alignas(64) uint8_t copy[SHORT_RUN];
    if (padded > count) {  // rows of bytes or nibbles may end with less than a block
      std::memcpy(copy, p, size_t(count * s.code_field[0].bits / 8));
      p = copy;
    }
    float* target = type == 0 && padded == count ? static_cast<float*>(out) + at : values;
    decode(row, k, p, padded, target);
    if (target == values) put_values(values, count, out, at, type);
  }

  // Codes [k, k + count) of a row of bytes that stand for one number each, or for two.
  template <int PER> void look_up_run(int64_t row, int64_t k, int64_t count, void* out, int type) {
    const int64_t end = k + count;
    const uint8_t* bytes = s.bytes + row * s.row_bytes;
    alignas(64) float values[SHORT_RUN];
    float* to = values;
    read_groups(s, row, k, count, groups);
    const float* scale = groups.scale;
    for (int64_t i = k; i < end; scale++)
      for (const int64_t last = std::min(end, (i / s.group + 1) * s.group); i < last; i += PER)
        unroll<PER>([&](auto j) INLINED { *to++ = s.numbers[bytes[i / PER] * PER + j] * *scale; });
    put_values(values, count, out, row * s.k + k, type);
  }

  // To the type of the output, from number `at` of it on.
  static void put_values(const float* values, int64_t count, void* out, int64_t at, int type) {
    uint16_t* narrow = static_cast<uint16_t*>(out) + at;
    if (type == 1)
      for (int64_t i = 0; i < count; i++) narrow[i] = float_to_half_fast(values[i]);
    else if (type == 2)
      for (int64_t i = 0; i < count; i++) narrow[i] = float_to_bfloat(values[i]);
    else std::memcpy(static_cast<float*>(out) + at, values, size_t(count) * 4);
  }
};

}  // namespace

void dequantize_rows(const Storage& s, void* out, int type, int64_t first, int64_t last) {
  if (s.numbers) {
    Run run(s);
    for (int64_t row = first; row < last; row++)
      for (int64_t k = 0; k < s.k; k += SHORT_RUN) {
        const int64_t count = std::min(SHORT_RUN, s.k - k);
        s.per_byte == 1 ? run.look_up_run<1>(row, k, count, out, type) : run.look_up_run<2>(row, k, count, out, type);
      }
    return;
  }
  Storage rows = s;
  if (s.k % s.block == 0 && s.k % s.group == 0) {  // then rows follow one another like blocks, and are one long row
    const int64_t before = first * s.k * (type == 0 ? 4 : 2);
    out = static_cast<uint8_t*>(out) + before;
    rows.bytes += first * s.row_bytes, rows.k = (last - first) * s.k;
    for (GroupField* field : {&rows.scale, &rows.minimum, &rows.zero}) field->data += first * field->row_stride;
    first = 0, last = std::min<int64_t>(last, 1);
  }
  Run run(rows);
  const int64_t step = run.longest(type);
  for (int64_t row = first; row < last; row++)
    for (int64_t k = 0; k < rows.k; k += step)
      run.decode_run(row, k, std::min(step, rows.k - k), rows.bytes + row * rows.row_bytes + k / s.block * s.block_bytes, out, type);
}

namespace {

// A band of columns of words, transposed: each of them a row of bytes or nibbles, as long as possible, because its values are one
// stream of stores; and their scales and zero points likewise. Columns are further apart than a power of two, or they would
// share lines of the cache.
constexpr int64_t BAND = 32, BAND_BYTES = 2048, BAND_GROUPS = 128;
using TurnedField = uint8_t[BAND][BAND_GROUPS * 4 + 64];
struct Band {
  alignas(64) uint8_t codes[BAND][BAND_BYTES + 64];
  alignas(64) TurnedField scale, zero;
};
constexpr int64_t ROWS_AHEAD = 6;  // rows are far apart, so the next are asked for: not more, as all would go to one set of the cache

// Words [rows, columns], `stride` from one row to the next.
void turn_words(const uint32_t* words, int64_t stride, int64_t rows, int64_t columns, Band& band) {
  auto word = [&](int64_t r, int64_t c) INLINED { std::memcpy(band.codes[c] + 4 * r, words + r * stride + c, 4); };
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    for (int64_t i = 0; i < 4; i++)
      for (int64_t c = 0; c < columns; c += 16) __builtin_prefetch(words + (r + ROWS_AHEAD + i) * stride + c);
    int64_t c = 0;
    for (; c + 4 <= columns; c += 4) {
      Sixteen line[4];
      unroll<4>([&](auto i) INLINED { line[i] = load_sixteen(reinterpret_cast<const uint8_t*>(words + (r + i) * stride + c)); });
      turn_four(line);
      unroll<4>([&](auto i) INLINED { std::memcpy(band.codes[c + i] + 4 * r, &line[i], 16); });
    }
    for (; c < columns; c++) unroll<4>([&](auto i) INLINED { word(r + i, c); });
  }
  for (; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) word(r, c);
}

// Numbers of groups [first, first + count) of columns from n on.
GroupField turn_field(const GroupField& field, int64_t n, int64_t columns, int64_t first, int64_t count, TurnedField& turned) {
  auto turn = [&](auto item) {
    const uint8_t* row = field.data + n * item + first * field.stride;
    for (int64_t g = 0; g < count; g++, row += field.stride) {
      __builtin_prefetch(row + ROWS_AHEAD * field.stride);
      for (int64_t c = 0; c < columns; c++) std::memcpy(turned[c] + g * item, row + c * item, item);
    }
    return GroupField{field.kind, turned[0], sizeof turned[0], item};
  };
  switch (field.kind) {
    case GroupField::none: return field;
    case GroupField::byte: case GroupField::looked_up: return turn(Index<1>());
    case GroupField::f16: case GroupField::bf16: return turn(Index<2>());
    case GroupField::f32: return turn(Index<4>());
  }
  return field;
}

}  // namespace

void dequantize_words(const Storage& s, void* out, int type, int64_t first, int64_t last) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(s.bytes);
  const int64_t bits = s.code_field[0].bits, per = 32 / bits;
  Storage turned = s;
  Run run(turned);
  const int64_t step = std::min({run.longest(type), BAND_BYTES * 8 / bits, BAND_GROUPS * s.group});
  Band band;
  for (int64_t n = first; n < last; n += BAND) {
    const int64_t columns = std::min(BAND, last - n);
    for (int64_t k = 0; k < s.k; k += step) {
      const int64_t count = std::min(step, s.k - k), group = k / s.group, groups = (k + count - 1) / s.group - group + 1;
      turn_words(words + k / per * s.n + n, s.n, count / per, columns, band);
      turned.scale = turn_field(s.scale, n, columns, group, groups, band.scale);
      turned.zero = turn_field(s.zero, n, columns, group, groups, band.zero);
      uint8_t* target = static_cast<uint8_t*>(out) + (n * s.k + k) * (type == 0 ? 4 : 2);
      for (int64_t c = 0; c < columns; c++) run.decode_run(c, 0, count, band.codes[c], target, type);
    }
  }
}

void read_codes(const Storage& s, int64_t row, int64_t first, int64_t count, uint8_t* codes) {
  const uint8_t* p = s.bytes + row * s.row_bytes + first * s.block_bytes;
  const int64_t low = s.code_field[0].offset, high = s.code_field[1].offset, stride = s.block_bytes;  // for all the compiler knows, codes are a part of s
  with_codes(s, [&](auto type) {
    for (int64_t i = 0; i < count; i++, p += stride, codes += decltype(type)::count)
      unroll<decltype(type)::count / 16>([&](auto v) {
        const Sixteen sixteen = decltype(type)::template get<v>(p + low, p + high);
        std::memcpy(codes + 16 * v, &sixteen, 16);
      });
  });
}

}  // namespace BILLFISH_ISA
