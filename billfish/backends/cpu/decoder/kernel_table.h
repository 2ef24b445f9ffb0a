// What the decoder asks of the kernels of one ISA level: those of its parts that are not products.
#pragma once
#include <cstdint>

namespace billfish {

// Keys and values lie in blocks of 64 positions, in the order in which attention reads them: keys by 16 positions, transposed, so that one load
// brings one number of 16 keys; values by 16 columns.
constexpr int64_t CACHE_BLOCK = 64;

// Of one layer and one head.
struct HeadCache {
  void *keys, *values;  // float32 or float16
  bool half;            // which of them
  int64_t positions;    // there is room for: position p is at p % positions
};

// Positions that attention sees without the others. Threads share out the slices of a single row.
constexpr int64_t SLICE = 256;
// What a row has of a slice is head_size numbers behind so many others; see decoder/attention.h.
constexpr int64_t SEEN_HEAD = 16;

// Rows of q, `stride` apart.
struct Queries {
  const float* q;
  int64_t rows, stride;
};

// Which keys a block of queries sees, and what becomes of its scores. Rows are at consecutive positions, and `more` is 1; or they are heads of one
// position, and it is 0.
struct Sight {
  int64_t seen, more;  // the first row sees the keys before `seen`, each row `more` more than the one before it
  int64_t behind;      // but not these first ones; of them, too, each row has `more` more. Less than 0 is none
  float cap;           // as in Attention
  const float* sinks;  // of each row, `1 - more` apart; or null
};

// The parts that are not products, for one ISA level; see decoder/kernels.h.
struct DecoderKernels {
  void (*normalize)(const float* x, const float* weight, float epsilon, int64_t count, float* out);
  void (*add_scaled)(float* x, const float* more, float scale, int64_t count);
  void (*scale)(float* x, float factor, int64_t count);
  void (*rotate)(float* head, const float* cosine, const float* sine, int64_t pairs, bool adjacent);
  // Attention; see decoder/attention.h.
  void (*store)(const HeadCache& cache, int64_t position, const float* k, const float* v, int64_t head_size);
  void (*attend)(const Queries& queries, const HeadCache& cache, const Sight& sight, int64_t head_size, float* out);
  void (*see_slice)(const Queries& queries, const HeadCache& cache, const Sight& sight, int64_t slice, int64_t head_size, float* seen);
  void (*gather)(const float* slices, int64_t count, int64_t slice_stride, float sink, int64_t head_size, float* out);
  // x becomes cap tanh(x / cap).
  void (*soften)(float* x, int64_t count, float cap);
  // Sums of outer products, for 16 columns; see decoder/outer.h.
  void (*add_outer)(const float* x, const float* columns, int64_t rows, int64_t k, int64_t sixteen, float* sums);
};

}  // namespace billfish
