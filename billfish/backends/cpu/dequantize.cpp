// Compiled once for each ISA level; see dequantize.h.
#include "dequantize.h"
#include BILLFISH_SIMD
#include "file_codes.h"
#include "file_scales.h"

namespace BILLFISH_ISA {
namespace {

// What is left to do with elements: value = (element - zero) * scale + minimum. A code times a half, or times a half and a small
// integer, is exact: there, product and sum can be one operation.
enum class Rest { nothing, scale, zero_scale, scale_minimum, fused_minimum };

template <Rest REST> inline Floats finish(Floats x, float scale, const float* offset) {
  if constexpr (REST == Rest::nothing) return x;
  if constexpr (REST == Rest::scale) return times(x, scale);
  if constexpr (REST == Rest::zero_scale) return times(x - *offset, scale);
  if constexpr (REST == Rest::scale_minimum) return times(x, scale) + *offset;
  if constexpr (REST == Rest::fused_minimum) return times_plus(x, scale, offset);
}

// Codes at a time where values wait in the first-level cache, to be rounded.
constexpr int64_t SHORT_RUN = 1024;

// What one thread needs to decode runs of rows.
struct Run {
  const Storage& s;
  Lookup lookup;
  Counted5 counted5;
  Counted counted;
  int shift;  // of codes in rows of bytes or nibbles, 2^shift have a scale in common
  bool has_minimum, exact_products, has_tables;
  GroupNumbers groups{};

  explicit Run(const Storage& storage) : s(storage), lookup(storage.table), counted5(storage.bias), counted(storage.bias) {
    for (shift = 4; shift < 14 && 1 << shift < s.group; shift++) {}
    has_tables = TABLES_PAY && s.scaled_tables && s.group == 32;
    has_minimum = s.minimum.kind != GroupField::none || s.minimum_offset >= 0;
    exact_products = s.scales == Storage::apart ? s.scale.kind == GroupField::f16 : s.scales != Storage::looked_up;
  }

  // One block, or 32 codes of a row, whose planes begin at `low` and `high`. scale(v) and offset(v) are those of its codes 16 v to
  // 16 v + 15.
  template <class Codes, Rest REST, class Element, class ScaleOf, class OffsetOf>
  static INLINED void decode_block(const Element& element, const uint8_t* low, const uint8_t* high, Sixteen flip, ScaleOf scale,
                                   OffsetOf offset, float* __restrict out) {
    unroll<Codes::count / 32>([&](auto pair) INLINED {
      Values x[2];
      unroll<2>([&](auto i) INLINED {
        Sixteen codes = Codes::template get<2 * pair + i>(low, high);
        if constexpr (Codes::bits == 8) codes ^= flip;
        x[i] = element(codes);
      });
      unroll<2>([&](auto i) INLINED {
        constexpr int v = 2 * pair + i;
        const float by = scale(v);
        unroll<16 / LANES>([&](auto j) INLINED { x[i].part[j] = finish<REST>(x[i].part[j], by, offset(v)); });
      });
      // In large blocks gcc would change the order of stores, and a line that is not written from end to end is read first.
      auto in_order = [&]() INLINED {
        if constexpr (Codes::count > 64) asm volatile("" : "+r"(out));
      };
      store(out + 32 * pair, x[0]), in_order();
      store(out + 32 * pair + 16, x[1]), in_order();
    });
  }

  // `count` codes from p on, a multiple of Codes::count, whose groups have been read.
  template <class Codes, Rest REST, class Element>
  __attribute__((noinline)) void decode_groups(const Element& element, const uint8_t* p, int64_t count, float* __restrict out) const {
    const uint8_t *low = p + s.plane[0].offset, *high = p + s.plane[1].offset;
    const int64_t stride = s.block_bytes, by = shift;
    const float *scale = groups.scale, (*offset)[4] = groups.offset;
    const Sixteen flip = Sixteen{} + s.flip;
    for (int64_t at = 0; at < count; at += Codes::count, low += stride, high += stride) {
      auto group = [&](int v) INLINED { return Codes::group ? 16 * v / std::max(Codes::group, 1) : (at + 16 * v) >> by; };
      decode_block<Codes, REST>(element, low, high, flip, [&](int v) INLINED { return scale[group(v)]; },
                                  [&](int v) INLINED { return offset[group(v)]; }, out + at);
      if constexpr (Codes::group > 0) scale += Codes::count / Codes::group, offset += Codes::count / Codes::group;
    }
  }

  // The same for blocks with one half as their scale, and perhaps one as their minimum, which are read here.
  template <class Codes, Rest REST, class Element>
  __attribute__((noinline)) void decode_halves(const Element& element, const uint8_t* p, int64_t count, float* __restrict out) const {
    const int64_t stride = s.block_bytes, low = s.plane[0].offset, high = s.plane[1].offset;
    const int64_t scale_at = s.scale_offset, minimum_at = s.minimum_offset;
    const Sixteen flip = Sixteen{} + s.flip;
    for (const float* end = out + count; out < end; out += Codes::count, p += stride) {
      const float scale = read_half(p + scale_at);
      alignas(16) float offset[4];
      if constexpr (REST == Rest::fused_minimum) put(offset, read_half(p + minimum_at));
      decode_block<Codes, REST>(element, p + low, p + high, flip, [&](int) INLINED { return scale; },
                                  [&](int) INLINED { return offset; }, out);
    }
  }

  // The same where each 32 codes have a byte as their scale, and Storage::scaled_tables a table for each byte.
  template <class Codes, class Table>
  __attribute__((noinline)) void decode_scaled(const uint8_t* p, const uint8_t* byte, int64_t byte_stride, int64_t count,
                                               float* __restrict out) const {
    const int64_t stride = s.block_bytes;
    const uint8_t *tables = s.scaled_tables, *low = p + s.plane[0].offset;
    for (const float* end = out + count; out < end; out += Codes::count, low += stride, byte += byte_stride) {
      const Table table(tables + 32 * *byte);
      decode_block<Codes, Rest::nothing>(table, low, low, Sixteen{}, [](int) INLINED { return 1.0f; },
                                         [](int) INLINED { return nullptr; }, out);
    }
  }

  // Codes from p on, at k of a row; a multiple of a block.
  void decode(int64_t row, int64_t k, const uint8_t* p, int64_t count, float* out) const {
    with_codes(s, [&](auto codes) {
      using Codes = decltype(codes);
      if constexpr (TABLES_PAY && Codes::count == 32 && Codes::bits == 4)
        if (has_tables) {
          const uint8_t* apart = s.scale.data + row * s.scale.row_stride + k / 32 * s.scale.stride;
          if (s.scales == Storage::apart) return decode_scaled<Codes, Lookup>(p, apart, s.scale.stride, count, out);
          return decode_scaled<Codes, Lookup>(p, p + s.sub_offset, s.block_bytes, count, out);
        }
      if constexpr (Codes::bits <= 4) decode_elements<Codes>(lookup, p, count, out);
      else if constexpr (Codes::bits == 5) decode_elements<Codes>(counted5, p, count, out);
      else decode_elements<Codes>(counted, p, count, out);
    });
  }

  template <class Codes, class Element> void decode_elements(const Element& element, const uint8_t* p, int64_t count, float* out) const {
    if constexpr (Codes::count == 32) {
      if constexpr (Codes::group == 32)
        if (s.scales == Storage::halves && has_minimum) return decode_halves<Codes, Rest::fused_minimum>(element, p, count, out);
      if (s.scales == Storage::halves) return decode_halves<Codes, Rest::scale>(element, p, count, out);
    }
    if constexpr (Codes::minimums != Minimums::never)
      if (has_minimum && exact_products) return decode_groups<Codes, Rest::fused_minimum>(element, p, count, out);
    if constexpr (Codes::group == 0) {
      if (has_minimum) return decode_groups<Codes, Rest::scale_minimum>(element, p, count, out);
      if (s.zero.kind != GroupField::none) return decode_groups<Codes, Rest::zero_scale>(element, p, count, out);
    }
    if constexpr (Codes::minimums != Minimums::always) decode_groups<Codes, Rest::scale>(element, p, count, out);
  }

  // Whether kernels read scales themselves.
  bool in_place() const { return s.scales == Storage::halves || has_tables; }

  // How many codes decode_run takes at most.
  int64_t longest(int type) const { return type != 0 || s.k % s.block ? SHORT_RUN : in_place() ? s.k : RUN; }

  // Codes [k, k + count) of a row, found at p, to those of the output.
  void decode_run(int64_t row, int64_t k, int64_t count, const uint8_t* p, void* out, int type) {
    const int64_t at = row * s.k + k, padded = (count + s.block - 1) / s.block * s.block;
    if (!in_place()) read_groups(s, row, k, count, groups);
    alignas(64) float values[SHORT_RUN];
    alignas(64) uint8_t copy[SHORT_RUN];
    if (padded > count) {  // rows of bytes or nibbles may end with less than a block
      std::memcpy(copy, p, size_t(count * s.plane[0].bits / 8));
      p = copy;
    }
    float* target = type == 0 && padded == count ? static_cast<float*>(out) + at : values;
    decode(row, k, p, padded, target);
    uint16_t* narrow = static_cast<uint16_t*>(out) + at;
    if (type == 1)
      for (int64_t i = 0; i < count; i++) narrow[i] = float_to_half_fast(values[i]);
    else if (type == 2)
      for (int64_t i = 0; i < count; i++) narrow[i] = float_to_bfloat(values[i]);
    else if (target == values)
      std::memcpy(static_cast<float*>(out) + at, values, size_t(count) * 4);
  }
};

}  // namespace

void dequantize_rows(const Storage& s, void* out, int type, int64_t first, int64_t last) {
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

// A strip of columns is turned at a time: then each of them is a row of bytes or nibbles.
void dequantize_words(const Storage& s, void* out, int type, int64_t first, int64_t last) {
  constexpr int64_t STRIP = 64, APART = 16;  // so much further than a power of two, or columns would share lines of the cache
  const uint32_t* words = reinterpret_cast<const uint32_t*>(s.bytes);
  const int64_t per = 32 / s.plane[0].bits;
  Run run(s);
  alignas(64) uint32_t turned[STRIP][SHORT_RUN / 4 + APART];
  for (int64_t n = first; n < last; n += STRIP) {
    const int64_t columns = std::min(STRIP, last - n);
    for (int64_t k = 0; k < s.k; k += SHORT_RUN) {
      const int64_t count = std::min(SHORT_RUN, s.k - k);
      for (int64_t r = 0; r < count / per; r++)
        for (int64_t c = 0; c < columns; c++) turned[c][r] = words[(k / per + r) * s.n + n + c];
      for (int64_t c = 0; c < columns; c++) run.decode_run(n + c, k, count, reinterpret_cast<const uint8_t*>(turned[c]), out, type);
    }
  }
}

void read_codes(const Storage& s, int64_t row, int64_t block, uint8_t* codes) {
  const uint8_t* p = s.bytes + row * s.row_bytes + block * s.block_bytes;
  with_codes(s, [&](auto type) {
    unroll<decltype(type)::count / 16>([&](auto v) {
      const Sixteen sixteen = decltype(type)::template get<v>(p + s.plane[0].offset, p + s.plane[1].offset);
      std::memcpy(codes + 16 * v, &sixteen, 16);
    });
  });
}

}  // namespace BILLFISH_ISA
