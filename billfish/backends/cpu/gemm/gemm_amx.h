// y = x W^T in integers with many rows of x, by AMX: one instruction multiplies 16 rows of x with 16 rows of W, 64 k of each.
//
// Slices, scales and the order of all roundings are those of many8.h, so the bits are the same too. An integer sum ends where a scale does, with
// most formats after 32 k: then the rows of a tile register are half full, and the float32 steps take longer than the product, 16 cycles. After
// an instruction of AMX, port 5 takes no float32 operation of 64 bytes for some 100 cycles, so 32 FMA for 16 rows take 32 cycles on port 0, and what
// can be an integer operation is one. Long runs of either gain nothing: the sums of a group are made while vectors scale and add those of
// the group before. docs/notes/2026-11-20-cpu-amx.md counts.
#pragma once
#include "gemm/sums8.h"

namespace BILLFISH_ISA {

// ---- x --------------------------------------------------------------------------------------------------------------

constexpr int AMX_LANES = 16;  // rows of x that go together

inline bool in_tile_rows(const Activations8& x) { return x.lanes == AMX_LANES; }

// Of rows [first, last) and blocks [begin, end), in place: where a sum goes over several blocks, codes of two blocks [2][16 rows][32] become
// rows of a tile register [16][64]. A last block without another stays as it is.
inline void join_blocks(const Activations8& x, int64_t first, int64_t last, int64_t begin, int64_t end) {
  if (x.span == 1) return;
  for (int64_t row = first; row < last; row += AMX_LANES)
    for (int64_t b = begin; b + 1 < end; b += 2) {
      int8_t* codes = x.codes + x.block_of(row, b) * AMX_LANES * 32;
      __m256i halves[2][AMX_LANES];
      std::memcpy(halves, codes, sizeof(halves));
      for (int t = 0; t < AMX_LANES; t++)
        for (int half = 0; half < 2; half++) std::memcpy(codes + t * 64 + half * 32, &halves[half][t], 32);
    }
}

// The most chunks of a slice. Each slice loads and stores the totals of all rows, which a single chunk is not worth: with 576 columns, SmolLM2's, it took a
// tenth of the time.
constexpr int CHUNKS = SLICE + 1;

// ---- W --------------------------------------------------------------------------------------------------------------

// Blocks of the stream to signed bytes. The order is that of the stream, [8 quads][2 row vectors][64], in which a row vector's quads are
// the rows of a tile register.
template <class Decoder, bool CENTRED> __attribute__((flatten)) void decode_signed(const Weights& w, Blocks run, uint8_t* out) {
  const Table table(w);
  const int bias = CENTRED ? 8 : w.bias;
  const uint8_t* p = run.stream;
  for (int64_t b = 0; b < run.count; b++, p += Decoder::block_bytes, out += Whole::block_bytes) {
    p += ((b & 7) == 0 ? run.chunk_header : 0) + ((b & (run.span - 1)) == 0 ? run.span_header : 0);
    unroll<VECTORS>([&](auto v) {
      store_bytes(out + v * VECTOR_BYTES, bit_xor(Decoder::template byte<decltype(v)::value, CENTRED>(p, table.values, bias), splat_byte(SIGNED_BIAS)));
    });
  }
}

using DecodeSigned = void (*)(const Weights&, Blocks, uint8_t*);
inline DecodeSigned signed_decoder(const Weights& w) {
  DecodeSigned chosen = nullptr;
  with_decoder(w.codes, [&](auto decoder) {
    constexpr bool nibbles = std::is_same_v<decltype(decoder), Nibbles>;  // which alone gain from a constant bias
    chosen = nibbles && w.bias == 8 ? decode_signed<decltype(decoder), nibbles> : decode_signed<decltype(decoder), false>;
  });
  return chosen;
}

// ---- products -------------------------------------------------------------------------------------------------------

// Tile registers: sums in 0 to 3, x in 4 and 5, W in 6 and 7.
inline TileShapes tile_shapes(Reach reach) {
  const int k = reach == Reach::half ? 16 : reach == Reach::block ? 32 : 64;
  TileShapes shapes;
  for (int i = 0; i < 8; i++) shapes.rows[i] = uint8_t(i < 6 ? AMX_LANES : k / 4), shapes.row_bytes[i] = uint16_t(i == 4 || i == 5 ? k : 64);
  return shapes;
}

// Sums of 16 rows of x and a row vector, in so many digits, as tile registers leave them.
template <int DIGITS> struct alignas(64) TileSums {
  int32_t digit[DIGITS][AMX_LANES][LANES];
};

// total += sums * scales, for rows of x [FIRST, LAST) of 16, with the roundings of add_buffered. `scales` is at a row vector of GroupScales::scale; one
// pointer for all three, because registers are scarce.
template <bool MAGIC, bool MINIMUMS, int FIRST, int LAST, int DIGITS>
INLINED inline void add_sums(Floats (&total)[AMX_LANES], const TileSums<DIGITS>& sums, const float* scales, const float* x_scales, const float* x_totals) {
  constexpr int OFFSET = offsetof(GroupScales, offset) / sizeof(float), MINIMUM = offsetof(GroupScales, minimum) / sizeof(float);
  const Floats scale = load_floats(scales), minimum = MINIMUMS ? load_floats(scales + MINIMUM) : scale;
  const auto sum_of = [&](int digit, int t) INLINED { return Ints{load_bytes(reinterpret_cast<const uint8_t*>(sums.digit[digit][t]))}; };
  repeat<LAST - FIRST>([&](int i) INLINED {
    const int t = FIRST + i;
    Ints sum = sum_of(0, t);
    if constexpr (DIGITS == 2) sum = add(times_256(sum), sum_of(1, t));
    const Floats x_scale = splat(x_scales[t]);
    if constexpr (MAGIC) total[t] = multiply_add(total[t], scale_sum<true>(add(sum, splat_int(SUM_START)), scale, scales + OFFSET), x_scale);
    else total[t] = multiply_add(total[t], multiply(to_floats(sum), x_scale), scale);
    if constexpr (MINIMUMS) total[t] = multiply_add(total[t], minimum, splat(x_totals[t]));
  });
}

// Which operands tile registers load next: those of all groups of a row vector, then of the other row vector, then of the next bundle of x. Groups go in
// pairs, whose registers and sums take turns; where the last one is alone, what lies behind it makes a pair.
template <int DIGITS, Reach REACH> struct NextGroup {
  static constexpr int HALVES = REACH == Reach::half ? 2 : 1, QUAD_BYTES = ROW_VECTORS * VECTOR_BYTES, X_BYTES = AMX_LANES * 32;  // of a block and a digit
  const uint8_t *stream, *w;
  const int8_t *codes, *x;
  const int64_t blocks, groups, bundle_bytes;  // of a slice, in whole pairs, and from one bundle to the next
  const int step;                              // blocks of a group
  int64_t bundles, group = 0;                  // that are left, and that comes next
  int vector = 0;
  alignas(64) int8_t padded[AMX_LANES][64];

  template <int TILE> INLINED void load_x(const int8_t* from, bool alone) {
    if (__builtin_expect(alone, 0)) {  // a last block, with zeros for what follows it in the buffer
      for (int t = 0; t < AMX_LANES; t++) std::memcpy(padded[t], from + t * 32, 32), std::memset(padded[t] + 32, 0, 32);
      from = padded[0];
    }
    load_tile<TILE>(from, 64);
  }
  template <int ODD> INLINED void load() {
    if constexpr (REACH == Reach::blocks) {
      const int64_t left = blocks - group * step;
      if (left > 0) load_x<4>(x, left == 1);
      else clear_tile<4>();
      load_tile<6>(w, QUAD_BYTES);
      if (step > 2) {
        if (left > 2) load_x<5>(x + 2 * X_BYTES, left == 3), load_tile<7>(w + 2 * Whole::block_bytes, QUAD_BYTES);
        else clear_tile<5>();
      }
    } else if constexpr (DIGITS == 2) {
      load_tile<4>(x, 32), load_tile<5>(x + X_BYTES, 32), load_tile<6 + ODD>(w, QUAD_BYTES);
    } else {
      load_tile<4 + ODD>(x, 32), load_tile<6 + ODD>(w, QUAD_BYTES);
    }
    if constexpr (REACH == Reach::half) x += ODD ? DIGITS * X_BYTES - 16 : 16, w += 4 * QUAD_BYTES;
    else x += step * DIGITS * X_BYTES, w += step * Whole::block_bytes;
    if (__builtin_expect(++group == groups, 0)) {
      group = 0, vector ^= 1;
      if (vector == 0 && --bundles > 0) codes += bundle_bytes;
      x = codes, w = stream + vector * VECTOR_BYTES;
    }
  }
  // With what was loaded.
  template <int ODD> INLINED void multiply() const {
    constexpr int SUMS = ODD * DIGITS;
    clear_tile<SUMS>();
    if constexpr (REACH == Reach::blocks) {
      multiply_tiles<SUMS, 4, 6>();
      if (step > 2) multiply_tiles<SUMS, 5, 7>();
    } else if constexpr (DIGITS == 2) {
      clear_tile<SUMS + 1>(), multiply_tiles<SUMS, 4, 6 + ODD>(), multiply_tiles<SUMS + 1, 5, 6 + ODD>();
    } else {
      multiply_tiles<SUMS, 4 + ODD, 6 + ODD>();
    }
  }
  template <int ODD, int DIGIT> INLINED static void store(TileSums<DIGITS>& sums) {
    if constexpr (DIGIT < DIGITS) store_tile<ODD * DIGITS + DIGIT>(sums.digit[DIGIT]);
  }
};

// Adds blocks of a tile, whose codes are in a buffer, times rows of x [first_row, last_row), whole bundles, to sums [rows][TILE_ROWS].
//
// A group takes four steps: its operands are loaded, multiplied, the sums stored, and scaled and added. Each step runs beside the next step of the group
// before, also from one row vector or bundle of rows to the next. A product takes 52 cycles, longer than all other steps of a group, so its sums are
// stored amid the float32 steps that come after the next product.
template <int DIGITS, Reach REACH, bool MAGIC, bool MINIMUMS>
KERNEL void add_tiles(const Blocks& run, const GroupScales* scales, const Activations8& x, int64_t first_row, int64_t last_row, float* sums) {
  using Next = NextGroup<DIGITS, REACH>;
  constexpr int HALVES = Next::HALVES;
  const int step = REACH == Reach::blocks ? x.span : 1, shift = __builtin_ctz(unsigned(run.span)), pair_blocks = HALVES == 2 ? 1 : 2 * step;
  const int64_t groups = HALVES * ((run.count + step - 1) / step), at = x.block_of(first_row, run.first);
  const int8_t* codes = x.codes + at * DIGITS * Next::X_BYTES;
  Next next{run.stream, run.stream, codes, codes, run.count, (groups + 1) / 2 * 2, x.blocks * DIGITS * Next::X_BYTES, step, (last_row - first_row + AMX_LANES - 1) / AMX_LANES, 0, 0, {}};
  TileSums<DIGITS> made[2];
  const float *bundle_scales = x.scale + at * 2 * AMX_LANES, *bundle_totals = x.totals + at * 3 * AMX_LANES;
  const int64_t bundles = next.bundles, blocks = x.blocks;
  const float* group_scales[CHUNKS * 16];  // a look-up: shifts by a variable and multiplications take as long as three rows
  for (int64_t group = 0; group < groups; group++) group_scales[group] = scales[(group / HALVES * step >> shift) * HALVES + group % HALVES].scale;
  next.template load<0>(), next.template multiply<0>(), next.template load<1>(), Next::template store<0, 0>(made[0]), Next::template store<0, 1>(made[0]), next.template multiply<1>(), next.template load<0>();
  for (int64_t bundle = 0; bundle < bundles; bundle++, bundle_scales += blocks * 2 * AMX_LANES, bundle_totals += blocks * 3 * AMX_LANES)
    for (int vector = 0; vector < ROW_VECTORS; vector++) {
      float* own = sums + bundle * AMX_LANES * TILE_ROWS + vector * LANES;
      Floats total[AMX_LANES];
      repeat<AMX_LANES>([&](int t) INLINED { total[t] = load_floats(own + t * TILE_ROWS); });
      const float *x_scales = bundle_scales, *x_totals = bundle_totals + (HALVES == 2 ? 0 : 2) * AMX_LANES;
      const auto add_group = [&](auto odd, auto first, int64_t group) INLINED {
        constexpr int ODD = decltype(odd)::value, FIRST = decltype(first)::value;
        const int64_t blocks_on = HALVES == 2 ? 0 : ODD * step, halves_on = HALVES == 2 ? ODD : 0;
        add_sums<MAGIC, MINIMUMS, FIRST, FIRST + AMX_LANES / 2>(total, made[ODD], group_scales[group] + vector * LANES, x_scales + blocks_on * 2 * AMX_LANES,
                                                                x_totals + (blocks_on * 3 + halves_on) * AMX_LANES);
      };
      constexpr std::integral_constant<int, 0> even, first_half;
      constexpr std::integral_constant<int, 1> odd;
      constexpr std::integral_constant<int, AMX_LANES / 2> second_half;
      for (int64_t group = 0; group < groups; group += 2) {
        next.template multiply<0>(), next.template load<1>();
        add_group(even, first_half, group);
        Next::template store<1, 0>(made[1]);
        add_group(even, second_half, group);
        Next::template store<1, 1>(made[1]);
        next.template multiply<1>(), next.template load<0>();
        if (group + 1 < groups) add_group(odd, first_half, group + 1);
        Next::template store<0, 0>(made[0]);
        if (group + 1 < groups) add_group(odd, second_half, group + 1);
        Next::template store<0, 1>(made[0]);
        x_scales += pair_blocks * 2 * AMX_LANES, x_totals += pair_blocks * 3 * AMX_LANES;
      }
      repeat<AMX_LANES>([&](int t) INLINED { store_floats(own + t * TILE_ROWS, total[t]); });
    }
}

using TilesKernel = void (*)(const Blocks&, const GroupScales*, const Activations8&, int64_t first_row, int64_t last_row, float*);
template <int DIGITS, bool MAGIC, bool MINIMUMS> TilesKernel tiles_kernel(Reach reach) {
  if constexpr (DIGITS == 1)
    if (reach == Reach::blocks) return add_tiles<1, Reach::blocks, MAGIC, MINIMUMS>;
  return reach == Reach::half ? add_tiles<DIGITS, Reach::half, MAGIC, MINIMUMS> : add_tiles<DIGITS, Reach::block, MAGIC, MINIMUMS>;
}
template <bool MINIMUMS> TilesKernel tiles_kernel(const Weights& w, const Activations8& x) {
  const Reach reach = reach_of(w, x.span);
  if (x.digits == 2) return tiles_kernel<2, false, MINIMUMS>(reach);
  return magic_sums(w, 1) ? tiles_kernel<1, true, MINIMUMS>(reach) : tiles_kernel<1, false, MINIMUMS>(reach);
}

constexpr int64_t X_PANEL_BYTES = 1 << 20;  // half of the second-level cache of a processor with AMX

// As multiply8, for x in rows of tile registers.
inline void multiply_in_tiles(const Weights& w, const Activations8& x, const float* bias, float* y, int64_t first, int64_t last) {
  const DecodeSigned decode_slice = signed_decoder(w);
  const TilesKernel add_slice = has_minimum(w.scales) ? tiles_kernel<true>(w, x) : tiles_kernel<false>(w, x);
  alignas(64) uint8_t bytes[(CHUNKS * 8 + 1) * Whole::block_bytes];  // a last block without another is read with what follows
  GroupScales scales[CHUNKS * 16];
  auto decode = [&](const TileShape& shape, Blocks& run) {
    read_scales<true>(w, shape, run.stream, run.count, scales, -SUM_OFFSET, 1);
    decode_slice(w, run, bytes);
    run.stream = bytes;
  };
  const TileRegisters registers(tile_shapes(reach_of(w, x.span)));
  multiply_slices(w, x, bias, y, first, last, decode, [&](const Blocks& run, int64_t first_row, int64_t last_row, float* sums) { add_slice(run, scales, x, first_row, last_row, sums); }, X_PANEL_BYTES, CHUNKS - SLICE);
}

// ---- the machine ----------------------------------------------------------------------------------------------------

// As dot_rounds of level/machine.h: four independent tiles of sums.
inline float tile_rounds(int64_t rounds) {
  alignas(64) int8_t bytes[16][64] = {{1, 2, 3}, {4, 5, 6}};
  alignas(64) int32_t sums[16][16];
  const TileRegisters registers(tile_shapes(Reach::blocks));
  clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
  load_tile<4>(bytes, 64), load_tile<6>(bytes, 64);
  for (int64_t r = 0; r < rounds; r++) multiply_tiles<0, 4, 6>(), multiply_tiles<1, 4, 6>(), multiply_tiles<2, 4, 6>(), multiply_tiles<3, 4, 6>();
  store_tile<0>(sums);
  return float(sums[0][0]);
}
constexpr double TILE_OPERATIONS = 4.0 * 2 * 16 * 16 * 64;  // in each round

}  // namespace BILLFISH_ISA
