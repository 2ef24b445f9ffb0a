// Random weights of every kind, multiplied by a level that is compiled without Python.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "activations/prepared.h"
#include "layout/prepack.h"

struct billfish::DecoderKernels {};  // nobody decodes here
struct billfish::SearchKernels {};   // nor quantizes

using namespace billfish;

// dequantize.cpp, level_gates.cpp, level_search.cpp and level_decoder.cpp are not needed here.
#define WITHOUT_THE_REST(level_name)                                                     \
  namespace level_name {                                                                 \
  extern const Level level;                                                              \
  void dequantize_rows(const Storage&, void*, int, int64_t, int64_t) {}                  \
  void dequantize_words(const Storage&, void*, int, int64_t, int64_t) {}                 \
  void read_codes(const Storage&, int64_t, int64_t, int64_t, uint8_t*) {}                \
  void open_gate(const float*, const float*, Gate, int64_t, float*) {}                   \
  extern const DecoderKernels decoder_kernels;                                           \
  const DecoderKernels decoder_kernels{};                                                \
  extern const SearchKernels search_kernels;                                             \
  const SearchKernels search_kernels{};                                                  \
  }

struct Kind {
  const char* name;
  Codes codes;
  Scales scales;
  int group, bias;
};
const Kind KINDS[] = {
    {"q4_0", Codes::u4, Scales::f16, 32, 8},         {"u4b8:128", Codes::u4, Scales::f16, 128, 8},     {"q4_1", Codes::u4, Scales::f16_minimum, 32, 0},
    {"u4", Codes::u4, Scales::f16_zero8, 64, 0},     {"u4 zeros", Codes::u4, Scales::f16_zero16, 32, 0}, {"q4_k", Codes::u4, Scales::sub_minimum, 32, 0},
    {"q5_0", Codes::u5, Scales::f16, 32, 16},        {"q5_1", Codes::u5, Scales::f16_minimum, 32, 0},  {"q5_k", Codes::u5, Scales::sub_minimum, 32, 0},
    {"q6_k", Codes::u6, Scales::sub, 16, 32},        {"q3_k", Codes::u3, Scales::sub, 16, 4},          {"q2_k", Codes::u2, Scales::sub_nibbles, 16, 0},
    {"q8_0", Codes::s8, Scales::f16, 32, 0},         {"mxfp4", Codes::table, Scales::e8m0, 32, 0},     {"nvfp4", Codes::table, Scales::e4m3, 16, 0},
    {"fp4:16", Codes::table, Scales::f16, 16, 0},    {"fp4:32", Codes::table, Scales::f16, 32, 0},     {"float32", Codes::u4, Scales::f32, 64, 8},
    {"minimum", Codes::s8, Scales::f32_minimum, 32, 0}, {"plain f32", Codes::f32, Scales::none, 32, 0}, {"plain f16", Codes::f16, Scales::none, 32, 0},
    {"plain bf16", Codes::bf16, Scales::none, 32, 0}, {"iq4_xs", Codes::table, Scales::sub, 32, 0},      {"fp8", Codes::e4m3, Scales::f32, 128, 0},
    {"mxfp8", Codes::e4m3, Scales::e8m0, 32, 0},     {"nf4", Codes::floats, Scales::f32, 64, 0},
};
const int8_t TWICE_E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
const int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

std::mt19937 source(1);
int random_below(int end) { return int(source() % uint32_t(end)); }

// Weights as words of four codes, [k / 4, n], and fields of random scales; or plain ones, [n, k].
struct Matrix {
  Weights weights{};
  std::vector<uint8_t> codes;
  std::vector<std::vector<uint8_t>> numbers;
  std::vector<Field> chunk_fields, group_fields;

  Matrix(const Kind& kind, int64_t n, int64_t k) : codes(size_t(n * k)) {
    weights.n = n, weights.k = k, weights.codes = kind.codes, weights.scales = kind.scales, weights.group = kind.group, weights.bias = kind.bias;
    weights.factor = kind.codes == Codes::table ? 0.5f : 1.0f;
    const int64_t groups = (k + kind.group - 1) / kind.group, chunks = (k + CHUNK - 1) / CHUNK;
    const auto half = [](uint8_t* to) { to[0] = uint8_t(random_below(256)), to[1] = uint8_t(random_below(2) << 7 | (8 + random_below(8)) << 2 | random_below(4)); };
    const auto below = [](int end) { return [end](uint8_t* to) { *to = uint8_t(random_below(end)); }; };
    const auto number = [](uint8_t* to) {
      const float x = float(random_below(2001) - 1000) / 997;
      std::memcpy(to, &x, 4);
    };
    if (!is_plain(weights))
      for (auto& code : codes) code = uint8_t(random_below(1 << code_bits(kind.codes)));
    else if (kind.codes == Codes::f32) make_numbers(4, number);
    else if (kind.codes == Codes::f16) make_numbers(2, half);
    else make_numbers(2, [&](uint8_t* to) { uint8_t bytes[4]; number(bytes), std::memcpy(to, bytes + 2, 2); });
    switch (kind.scales) {
      case Scales::f16: add(group_fields, groups, 2, half); break;
      case Scales::f16_minimum: case Scales::f16_zero16: add(group_fields, groups, 2, half), add(group_fields, groups, 2, half); break;
      case Scales::f16_zero8: add(group_fields, groups, 2, half), add(group_fields, groups, 1, below(16)); break;
      case Scales::e8m0: add(group_fields, groups, 1, [](uint8_t* to) { *to = uint8_t(120 + random_below(8)); }); break;
      case Scales::e4m3: add(group_fields, groups, 1, below(127)); break;
      case Scales::sub: add(chunk_fields, chunks, 2, half), add(group_fields, groups, 1, below(256)); break;
      case Scales::sub_minimum:
        add(chunk_fields, chunks, 2, half), add(chunk_fields, chunks, 2, half);
        add(group_fields, groups, 1, below(64)), add(group_fields, groups, 1, below(64));
        break;
      case Scales::sub_nibbles: add(chunk_fields, chunks, 2, half), add(chunk_fields, chunks, 2, half), add(group_fields, groups, 1, below(256)); break;
      case Scales::f32: add(group_fields, groups, 4, number); break;
      case Scales::f32_minimum: add(group_fields, groups, 4, number), add(group_fields, groups, 4, number); break;
      case Scales::none: break;
    }
  }
  template <class F> void make_numbers(size_t size, F make) {
    codes.resize(codes.size() * size);
    for (size_t i = 0; i < codes.size(); i += size) make(codes.data() + i);
  }
  template <class F> void add(std::vector<Field>& fields, int64_t count, int size, F make) {
    std::vector<uint8_t> bytes(size_t(weights.n * count * size));
    for (size_t i = 0; i < bytes.size(); i += size_t(size)) make(bytes.data() + i);
    numbers.push_back(std::move(bytes));
    fields.push_back({numbers.back().data(), count * size, size, count, size});
  }

  // y [m, n] of this level, for x [m, k]; digits as in Prepared.
  std::vector<float> multiply(const Level& level, const std::vector<float>& x, int digits) const {
    Weights w = weights;
    uint8_t table[64];
    for (int i = 0; i < 16; i++) {
      const float number = float(i * i - 100) / 99;
      if (w.codes == Codes::floats) std::memcpy(table + 4 * i, &number, 4);
      else table[i] = uint8_t((w.scales == Scales::sub ? IQ4 : TWICE_E2M1)[i]);
    }
    take_table(w, level, table, w.codes == Codes::floats ? 64 : 16);
    const TileShape shape(w, level.tile_rows);
    const int64_t tiles = (w.n + shape.rows - 1) / shape.rows, m = int64_t(x.size()) / w.k;
    std::vector<uint8_t> stream(size_t(tiles) * shape.tile_bytes);
    Storage words{};
    words.bytes = codes.data(), words.n = w.n, words.k = w.k, words.code_field[0].bits = 8, words.flip = 128;
    const CodeReader reader(level, words, true, w);
    for (int64_t tile = 0; tile < tiles; tile++) {
      uint8_t* out = stream.data() + tile * int64_t(shape.tile_bytes);
      if (!is_plain(w)) pack_tile(w, reader, chunk_fields, group_fields, tile, out);
      else (w.codes == Codes::f32 ? pack_plain_tile<uint32_t> : pack_plain_tile<uint16_t>)(w, codes.data(), shape.rows, tile, out);
    }
    w.stream = stream.data();
    Prepared prepared;
    prepared.begin(level, w, m, digits, span_of_x(w, digits));
    for (int64_t first = 0; first < m; first += prepared.bundle()) {
      const Prepared::Part part{first, std::min(prepared.bundle(), m - first), 0, blocks_of(w.k)};
      for (int64_t row = first; row < first + part.rows; row++) prepared.put(x.data() + row * w.k, row, part);
      prepared.finish(part);
    }
    std::vector<float> y(size_t(m * w.n));
    prepared.multiply(w, nullptr, y.data(), 0, tiles);
    return y;
  }
};
