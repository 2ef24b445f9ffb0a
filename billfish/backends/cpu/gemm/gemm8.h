// y = x W^T in integers: q8 and q16 for any number of rows of x, exact for few.
//
// sums8.h has the integer sums of a block, stream8.h and many8.h what is done with them: four algorithms, each a kernel of its own.
// One row of x, one row of an exact product where scales have two levels, several rows straight from the stream, and many rows from a buffer.
#pragma once
#include "gemm/many8.h"

namespace BILLFISH_ISA {

// Whether dot() gets codes that have more than the weights' values, unsigned ones.
inline bool unsigned_codes(const Weights& w, const Activations8& x) {
  return w.codes != Codes::s8 && w.codes != Codes::table && !(buffered(w, x.m, x.digits, x.span) && buffered_as_values(w, x.digits, x.span));
}

// Whether both digits of x make one sum: add_buffered_16.
inline bool in_one_sum(const Weights& w, const Activations8& x) { return DIGITS_IN_ONE_SUM && x.digits == 2 && buffered(w, x.m, x.digits, x.span); }
inline int start_parts(const Weights& w, const Activations8& x) { return in_one_sum(w, x) ? 1 : x.parts(); }

// What the integer sums of each block begin with: SUM_START, which stands for 0, less what the codes as dot() gets them
// have more than the weights' values, times the sum of x. [bundles, blocks, halves, even or odd row vector, parts, lanes,
// START_INTS]; `halves` is 2 where a group of weights is 16. Where the sum of x does not matter, one block serves all.
inline int64_t start_stride(const Weights& w, const Activations8& x) {
  return !unsigned_codes(w, x) && SIGNED_BIAS == 0 ? 0 : (w.group == 16 ? 2 : 1) * 2 * start_parts(w, x) * x.lanes * START_INTS;
}

// For rows [first, last), in whole tiles, and blocks [begin, end).
inline void fill_starts(const Weights& w, const Activations8& x, int64_t first, int64_t last, int64_t begin, int64_t end) {
  const int halves = w.group == 16 ? 2 : 1, lanes = x.lanes, parts = start_parts(w, x);
  const bool is_unsigned = unsigned_codes(w, x), sixteenfold = is_unsigned && w.codes == Codes::u4 && WHOLE_BYTES_FIT;
  const bool in_place = sixteenfold && !is_held(w, x.m, x.digits, x.span), one_sum = in_one_sum(w, x);
  const int32_t zero = magic_sums(w, x.digits) && !one_sum ? SUM_START : 0, bias = is_unsigned ? w.bias : SIGNED_BIAS;
  if (x.start_stride == 0) {
    if (first == 0 && begin == 0) std::fill_n(x.starts, halves * 2 * parts * lanes * START_INTS, zero);
    return;
  }
  // What even and odd row vectors have of the sum of x. In place: the odd sum has the even one in it, which is taken off later. Either way it has
  // 16 times its own bias.
  const int32_t even = -bias, odd = sixteenfold ? (in_place ? even : 0) + 16 * (HIGH_FLIP - bias) : even;
  const auto fill = [&](int32_t times, const int32_t* sums, int32_t* out) {
    for (int lane = 0; lane < lanes; lane++) {
      // Unsigned: in lanes that no row has, anything may be.
      const uint32_t sum = one_sum ? uint32_t(sums[lane]) * 256 + uint32_t(sums[3 * lanes + lane]) : uint32_t(sums[lane]);
      std::fill_n(out + lane * START_INTS, START_INTS, int32_t(uint32_t(zero) + uint32_t(times) * sum));
    }
  };
  for (int64_t row = first; row < last; row += lanes)
    for (int64_t at = x.block_of(row, begin); at < x.block_of(row, end); at += x.span) {
      int32_t* out = x.starts + at * x.start_stride;
      for (int half = 0; half < halves; half++, out += 2 * parts * lanes * START_INTS)
        for (int part = 0; part < parts; part++) {
          const int32_t* sums = x.sums + ((at * x.parts() + part) * 3 + (halves == 2 ? half : 2)) * lanes;
          fill(even, sums, out + part * lanes * START_INTS), fill(odd, sums, out + (parts + part) * lanes * START_INTS);
        }
    }
}

inline void multiply8(const Weights& w, const Activations8& x, const float* bias, float* y, int64_t first, int64_t last) {
  if constexpr (FEW_FROM_STREAM)
    if (!buffered(w, x.m, x.digits, x.span)) return multiply_few8(w, x, bias, y, first, last);
  with_decoder(w.codes, [&](auto decoder) {
    using Decoder = decltype(decoder);
    const auto multiply = [&](auto buffer) { multiply_many8<decltype(buffer)>(w, x, bias, y, first, last, decode_for<Decoder, decltype(buffer)>(w)); };
    if (buffered_as_values(w, x.digits, x.span)) multiply(Whole{});
    else if constexpr (!WHOLE_BYTES_FIT) multiply(BufferOf<Decoder>{});
  });
}

}  // namespace BILLFISH_ISA
