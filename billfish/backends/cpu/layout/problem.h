// What a GEMM gets: the packed weights and x, as plain pointers. The same for every ISA level.
#pragma once
#include <cstddef>
#include <cstdint>

namespace billfish {

constexpr int CHUNK = 256;  // k of the stream, with the upper scales of all rows before them
constexpr int BLOCK = 32;   // k of the stream, and k of x that share a scale unless span_of_x says more
constexpr int MANY_ROWS = 8;  // from about here on, weights are decoded once for all rows of x

// A thread keeps buffers for x, and for attention scores, from call to call, up to this size each. Larger ones are freed at once.
constexpr size_t KEPT_BYTES = 8 << 20;

// How the bits of a code are stored; see gemm/decode.h. Those of e4m3 and floats stand for numbers that int8 does not hold: bytes of E4M3,
// and nibbles that are indices into 16 float32. f32, f16 and bf16 are unquantized weights: no codes but the numbers themselves. A table becomes a
// small one where a level wants that: see take_table.
enum class Codes : int32_t { u2, u3, u4, u5, u6, s8, table, e4m3, floats, f32, f16, bf16, small_table };

// What may be in the bytes that dot() gets: unsigned codes, signed values above -128, or any signed bytes.
enum class Operand { below_16, below_32, below_64, values, bytes };
constexpr bool has_codes(Operand operand) { return operand <= Operand::below_64; }

// How the scales of a chunk are stored; see gemm/scales.h. Unquantized weights have none.
enum class Scales : int32_t { f16, f16_minimum, f16_zero8, f16_zero16, e8m0, e4m3, sub, sub_minimum, sub_nibbles, f32, f32_minimum, none };

// SwiGLU and its like: what a feed-forward network does to its gate and up rows, numbered as in billfish/core/mixture.py; see gemm/gates.h.
enum class Gate : int32_t { silu, gelu, clamped_silu, gelu_erf };

struct Weights {
  const uint8_t* stream;  // tile after tile of rows; see TileShape
  int64_t n, k;           // as the user has them; the stream is padded to whole tiles and blocks
  Codes codes;
  Scales scales;
  int32_t bias;           // what a code has more than its value
  int32_t group;          // k that share a scale: 16, 32, 64, 128 or 256
  float factor;           // multiplies every scale; 1 where there are minimums
  uint8_t table[64];      // for Codes::table and small_table, 16 bytes; for Codes::floats, 16 float32
  const int32_t* order = nullptr;  // [k], or null: column j of the stream is multiplied with x[order[j]]
};

inline bool is_plain(const Weights& w) { return w.codes == Codes::f32 || w.codes == Codes::f16 || w.codes == Codes::bf16; }
// Weights that are multiplied with x in float32 alone, whatever was asked for: x in integers would gain nothing.
inline bool wants_floats(const Weights& w) { return is_plain(w) || w.codes == Codes::e4m3 || w.codes == Codes::floats; }

// How many int8 digits make x exact; see quantize_exactly.
constexpr int EXACT_DIGITS = 4;

// Blocks of x that share a scale in q8: as many as a group of weights has, so that one integer sum serves the whole group, but 128 values at
// most. Sums of 128 codes of x times bytes of weights are below 128 * 127 * 255 < 2^22, which SUM_START needs and int32 has 2^9 times.
constexpr int LARGEST_SPAN_OF_X = 4;
inline int span_of_x(const Weights& w, int digits) { return digits != 1 || w.group <= BLOCK ? 1 : w.group < LARGEST_SPAN_OF_X * BLOCK ? w.group / BLOCK : LARGEST_SPAN_OF_X; }

// x in integers of one int8 digit, of two for q16 (256 * digit 0 + digit 1), or of four for exact products with few rows,
// with a scale for each `span` blocks. Sums, totals and starts of the first block of a span are those of the span. Rows go side by side in bundles: tiles of `lanes` rows, as many as a kernel takes at a time:
// [bundles, blocks, ..., lanes]. Sums are in two parts where there are several digits: one for each of two, or for each pair of four.
struct Activations8 {
  int8_t* codes;    // [bundles, blocks, digits, lanes, 32]
  float* scale;     // [bundles, blocks, 2, lanes]: the scale, and a sixteenth of it
  int32_t* sums;    // [bundles, blocks, parts, 3, lanes]: of the codes of each half of a block, and of all 32
  float* totals;    // [bundles, blocks, 3, lanes]: the same times the scale
  float* power;     // [m]: what each row was divided by beforehand, a power of two; see power_of_row
  int32_t* starts;  // what the integer sums of a block begin with, every `start_stride` of them; see fill_starts
  int64_t start_stride, m, blocks;
  int32_t digits, lanes, span;
  // For exact products: whether a block is wide, [m, blocks], and then what of it is not in digits but stays float32, [m, blocks, 32].
  uint8_t* wide;
  float* rest;

  int parts() const { return digits == 1 ? 1 : 2; }
  int64_t bundles() const { return (m + lanes - 1) / lanes; }
  int64_t block_of(int64_t row, int64_t block) const { return row / lanes * blocks + block; }
};

// Where the blocks of one row go.
class RowOfX {
 public:
  RowOfX(const Activations8& x, int64_t row) : x_(x), row_(row), first_(x.block_of(row, 0)), lane_(row % x.lanes) {}

  void set_power(float power) const { x_.power[row_] = power; }
  void set_wide(int64_t block, bool wide) const { x_.wide[row_ * x_.blocks + block] = wide; }
  float* rest(int64_t block) const { return x_.rest + (row_ * x_.blocks + block) * 32; }
  int8_t* codes(int64_t block, int digit) const { return x_.codes + (((first_ + block) * x_.digits + digit) * x_.lanes + lane_) * 32; }

  int span() const { return x_.span; }

  // The scale of a block, and what its codes, part[0] or part[0] * base + part[1], add up to in each half of it.
  template <int PARTS> void finish(int64_t block, float scale, const int32_t (&halves)[PARTS][2], float base) const {
    const int64_t at = first_ + block, lanes = x_.lanes;
    float* scales = x_.scale + at * 2 * lanes + lane_;
    scales[0] = scale, scales[lanes] = scale * 0.0625f;
    float* totals = x_.totals + at * 3 * lanes + lane_;
    int32_t* sums = x_.sums + at * PARTS * 3 * lanes + lane_;
    for (int i = 0; i < 3; i++) {
      float total = 0;
      for (int p = 0; p < PARTS; p++) {
        const int32_t sum = i < 2 ? halves[p][i] : halves[p][0] + halves[p][1];
        sums[(p * 3 + i) * lanes] = sum;
        total = p == 0 ? float(sum) : total * base + float(sum);
      }
      totals[i * lanes] = scale * total;
    }
  }

  // Blocks of one digit that share a scale: the sum and the total of all become those of the first.
  void join(int64_t block, int count) const {
    const int64_t at = first_ + block, lanes = x_.lanes;
    int32_t* sums = x_.sums + (at * 3 + 2) * lanes + lane_;
    for (int i = 1; i < count; i++) sums[0] += sums[i * 3 * lanes];
    x_.totals[(at * 3 + 2) * lanes + lane_] = x_.scale[at * 2 * lanes + lane_] * float(sums[0]);
  }

 private:
  const Activations8& x_;
  int64_t row_, first_, lane_;
};

// x as it is, for products in float32. Rows go side by side in bundles of four, or one by one: see lanes_of_floats.
struct ActivationsExact {
  float* x;  // [bundles, blocks * 32, lanes]; there may be room for more blocks than x has
  int64_t m, blocks;
  int32_t lanes;

  int64_t bundles() const { return (m + lanes - 1) / lanes; }
};

// So many rows are multiplied with weights that want floats straight from the stream, and these kernels take x row by row.
constexpr int FEW_FLOAT_ROWS = 8;
inline int32_t lanes_of_floats(const Weights& w, int64_t m) { return wants_floats(w) && m <= FEW_FLOAT_ROWS ? 1 : 4; }

// Codes as a file holds them: from byte `offset` of a block on, in runs of `width` bytes, `bits` wide; see
// billfish.core.formats.ggml.unfold. A second field holds the next higher bits.
struct CodeField {
  int32_t offset, width, bits;
};

// Scales, minimums or zero points in an array of their own: that of group g of a row is at data + row * row_stride + g * stride.
struct GroupField {
  enum Kind : int32_t { none, f16, bf16, f32, byte, looked_up };  // byte: an integer; looked_up: of Storage::byte_values
  Kind kind;
  const uint8_t* data;
  int64_t row_stride, stride;
};

// Quantized weights as a file holds them, for dequantize. Rows of bytes or nibbles count as blocks of 32.
struct Storage {
  // Where scales are: in fields of their own, or in each block, in the ways of ggml's formats; see file_scales.h.
  enum Scales : int32_t { apart, halves, looked_up, six_bit_pairs, nibble_pairs, six_bits, signed_bytes, six_bits_apart };
  const uint8_t* bytes;
  int64_t n, k, row_bytes;
  int32_t block, block_bytes, group;
  CodeField code_field[2];
  float table[16];  // values of codes of up to 4 bits
  int32_t bias;     // wider codes have this more than their values, when bits have been flipped by
  uint8_t flip;
  Scales scales;
  int32_t scale_offset, minimum_offset, sub_offset;  // in a block, -1 for none: float16, and the small integers below them
  GroupField scale, minimum, zero;
  const float* byte_values;  // [256]
  // Where every value times every scale of byte_values fits a bfloat16: [256, 2, 16], low bytes of the products, then high ones.
  const uint8_t* scaled_tables;
  // Of rows of bytes that stand for numbers which are no small integers: what each byte means, [256, per_byte]; else null.
  const float* numbers;
  int32_t per_byte;  // 1, or 2 where a byte holds two codes
};

struct DecoderKernels;  // decoder/decoder.h
struct SearchKernels;   // search/search_problem.h

// The kernels of one ISA level. Each multiplies rows [first, last) of tiles and writes those columns of y [m, n].
struct Level {
  const char* name;
  int32_t tile_rows, vector_bytes, row_lanes, high_flip, signed_bias;
  bool small_tables;
  // Blocks [first, last) of a row of x.
  void (*quantize_row)(const float* x, int64_t k, const Activations8& out, int64_t row, int64_t first, int64_t last);
  // Of x for these weights, with so many rows and digits, and blocks that share a scale: how many rows go together, and the stride of the starts.
  int32_t (*lanes)(const Weights&, int64_t m, int32_t digits, int32_t span);
  int64_t (*start_stride)(const Weights&, const Activations8&);
  // What is left to do for x when its codes are there: for rows [first, last), whole bundles or the last rows, and blocks [begin, end), once.
  void (*finish_x)(const Weights&, const Activations8&, int64_t first, int64_t last, int64_t begin, int64_t end);
  bool (*exact_in_digits)(const Weights&, int64_t m);  // whether exact products are to be made by multiply8
  void (*lay_out_row)(const float* x, int64_t k, const ActivationsExact& out, int64_t row, int64_t first, int64_t last);
  void (*multiply8)(const Weights&, const Activations8&, const float* bias, float* y, int64_t first, int64_t last);
  void (*multiply_exact)(const Weights&, const ActivationsExact&, const float* bias, float* y, int64_t first, int64_t last);
  void (*multiply_floats)(const Weights&, const ActivationsExact&, const float* bias, float* y, int64_t first, int64_t last);  // of weights that want floats
  // out [count] of gate [count] and up [count]; it may be one of them.
  void (*open_gate)(const float* gate, const float* up, Gate activation, int64_t count, float* out);
  // out [n, k]; type 0 float32, 1 float16, 2 bfloat16. Rows, or columns of words, from `first` to `last`.
  void (*dequantize_rows)(const Storage&, void* out, int type, int64_t first, int64_t last);
  void (*dequantize_words)(const Storage&, void* out, int type, int64_t first, int64_t last);
  // The codes of `count` blocks of a row from block `first` on, a byte each.
  void (*read_codes)(const Storage&, int64_t row, int64_t first, int64_t count, uint8_t* codes);
  // For measuring the machine; see level/machine.h.
  uint8_t (*read_all)(const uint8_t* p, int64_t vectors);
  float (*dot_rounds)(int64_t rounds);
  float (*fma_rounds)(int64_t rounds);
  double dot_operations, fma_operations;
  const DecoderKernels* decoder;
  const SearchKernels* search;
};

// The values of a small table and so much more are unsigned, and below 32.
constexpr int SMALL_BIAS = 16;

// Gives weights their table of `count` bytes as a level's kernels have it: integers plus what dot() wants them to have more, or floats.
inline void take_table(Weights& w, const Level& level, const uint8_t* table, size_t count) {
  bool small = level.small_tables && w.codes == Codes::table;
  for (size_t i = 0; i < count; i++) small = small && int8_t(table[i]) >= -SMALL_BIAS && int8_t(table[i]) < SMALL_BIAS;
  if (small) w.codes = Codes::small_table, w.bias = SMALL_BIAS;
  const int more = small ? SMALL_BIAS : w.codes == Codes::table ? level.signed_bias : 0;
  for (size_t i = 0; i < count; i++) w.table[i] = uint8_t(table[i] + more);
}

inline int64_t blocks_of(int64_t k) { return (k + BLOCK - 1) / BLOCK; }

inline int code_bits(Codes codes) {
  switch (codes) {
    case Codes::u2: return 2;
    case Codes::u3: return 3;
    case Codes::u5: return 5;
    case Codes::u6: return 6;
    case Codes::s8: case Codes::e4m3: return 8;
    case Codes::f16: case Codes::bf16: return 16;
    case Codes::f32: return 32;
    default: return 4;
  }
}

// Bytes that the scales of a group take for each row, and those of a chunk, where scales have two levels.
inline size_t group_scale_bytes(Scales scales) {
  switch (scales) {
    case Scales::e8m0: case Scales::e4m3: case Scales::sub: case Scales::sub_nibbles: return 1;
    case Scales::f16: case Scales::sub_minimum: return 2;
    case Scales::f16_zero8: return 3;
    case Scales::f16_minimum: case Scales::f16_zero16: case Scales::f32: return 4;
    case Scales::f32_minimum: return 8;
    case Scales::none: return 0;
  }
  return 0;
}
inline size_t chunk_scale_bytes(Scales scales) {
  return scales == Scales::sub ? 2 : scales == Scales::sub_minimum || scales == Scales::sub_nibbles ? 4 : 0;
}

// The shape of one tile's stream. A *span* is a block, or as many blocks as share a scale: first the scales of all rows, then
// the codes, so that everything is read in the order in which it lies. Scales of chunks come before those of their first span.
struct TileShape {
  int rows, group;
  int span;  // blocks in one
  int64_t blocks, chunks;
  size_t chunk_header, span_header, block_code_bytes, full_chunk_bytes, tile_bytes;

  // Inlined, or it would be a weak symbol that levels share: see simd/room.h.
  __attribute__((always_inline)) TileShape(const Weights& w, int tile_rows) : rows(tile_rows), group(w.group), span(w.group <= BLOCK ? 1 : w.group / BLOCK) {
    blocks = blocks_of(w.k);
    chunks = (blocks + 7) / 8;
    chunk_header = size_t(rows) * chunk_scale_bytes(w.scales);
    span_header = size_t(rows) * group_scale_bytes(w.scales) * size_t(groups_in_span());
    block_code_bytes = size_t(rows) * BLOCK * code_bits(w.codes) / 8;
    full_chunk_bytes = chunk_header + span_header * size_t(8 / span) + block_code_bytes * 8;
    tile_bytes = chunk_header * size_t(chunks) + span_header * size_t((blocks + span - 1) / span) + block_code_bytes * size_t(blocks);
  }
  int groups_in_span() const { return group < BLOCK ? BLOCK / group : 1; }
  int groups_in(int blocks_in_chunk) const { return (blocks_in_chunk * BLOCK + group - 1) / group; }
  int blocks_in(int64_t chunk) const { return chunk + 1 < chunks ? 8 : int(blocks - chunk * 8); }
};

}  // namespace billfish
