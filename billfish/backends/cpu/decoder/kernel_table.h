// What the decoder asks of the kernels of one ISA level: those of its parts that are not products.
#pragma once
#include <cstddef>
#include <cstdint>

namespace billfish {

// Keys and values lie in blocks of 64 positions, in the order in which attention reads them: keys by 16 positions, transposed, so that one load
// brings one number of 16 keys; values by 16 columns.
constexpr int64_t CACHE_BLOCK = 64;

// The type of keys and values. int8 has a float32 scale per position and head, and the keys of a block begin with the scales of its 64 positions, as
// the values do: see decoder/attention_int8.h.
enum class CacheType : int { float32, float16, int8 };

// Bytes of the keys, or of the values, of one head.
inline size_t head_bytes(CacheType type, int64_t head_size, int64_t positions) {
  const int64_t position = type == CacheType::float32 ? 4 * head_size : type == CacheType::float16 ? 2 * head_size : head_size + 4;
  return size_t(positions * position);
}

// Of one layer and one head.
struct HeadCache {
  void *keys, *values;
  CacheType type;
  int64_t positions;  // there is room for: position p is at p % positions
};

// Positions that attention sees without the others. Threads share out the slices of a single row.
constexpr int64_t SLICE = 256;
// What a row has of a slice is head_size numbers behind so many others; see decoder/attention.h.
constexpr int64_t SEEN_HEAD = 16;

// Rows of q, `stride` apart, of so many heads that share their keys and values, `head_stride` apart.
struct Queries {
  const float* q;
  int64_t rows, stride, heads, head_stride;
};

// Which keys queries see, and what becomes of their scores. Rows are at consecutive positions, and `more` is 1; or they are heads of one position, and
// it is 0.
struct Sight {
  int64_t seen, more;  // the first row sees the keys before `seen`, each row `more` more than the one before it
  int64_t behind;      // but not these first ones; of them, too, each row has `more` more. Less than 0 is none
  float cap;           // as in Attention
  const float* sinks;  // of each head: of head h of Queries, or where `more` is 0, of row h; or null
};

// The delta rule takes tokens in chunks of so many, which begin at multiples of it in a sequence.
constexpr int64_t DELTA_CHUNK = 8;

// What a token of a delta net has to do with those before it in its chunk, for one head. In order: how much of what each of them has written its k
// recalls, and its q (which recalls its own, too); what is left of each, its own the whole; and what is left of the state before the chunk.
struct DeltaInner {
  float k[DELTA_CHUNK], q[DELTA_CHUNK], left[DELTA_CHUNK];
  float decay, unused[7];
};

// Tokens of a chunk that one column block of a state goes through; see decoder/recurrent.h. Strides are from token to token.
struct DeltaTokens {
  int64_t first, count;  // within the chunk
  int64_t rows;          // of the state, the size of a key
  const float* kq;       // of each token k [rows], then q [rows], one behind the other
  const DeltaInner* inner;
  const float* beta;
  int64_t head_stride;  // of inner and beta
  const float* v;       // [16], as out
  int64_t v_stride;
  float* out;
  int64_t out_stride;
  float* written;  // [16]: what tokens of the chunk have written; those before `first` are there
  int64_t written_stride;
  const float* const* keys;  // of all tokens of the chunk, if it ends with these
};

// Tokens of a sequence that one column block of a state goes through. Strides are from token to token.
struct MambaScan {
  int64_t tokens, rows;  // rows: of the state, the size of b and c
  const float *b, *c;
  int64_t b_stride;  // of both
  const float *decay, *step;
  int64_t gate_stride;
  const float* x;  // [16], as out
  int64_t x_stride;
  float skip;
  float* out;
  int64_t out_stride;
};

// The parts that are not products, for one ISA level; see decoder/kernels.h.
struct DecoderKernels {
  void (*normalize)(const float* x, const float* weight, float epsilon, int64_t count, float* out);
  void (*normalize_centered)(const float* x, const float* weight, const float* bias, float epsilon, int64_t count, float* out);
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
  // Mixers with a recurrent state; see decoder/recurrent.h.
  void (*convolve)(const float* const* inputs, int64_t taps, const float* weight, const float* bias, int64_t channels, int64_t first, int64_t last, bool activate,
                   float* out);
  void (*normalize_length)(float* x, float epsilon, float factor, int64_t count);
  float (*dot)(const float* a, const float* b, int64_t count);
  void (*multiply)(float* x, const float* other, int64_t count);
  void (*multiply_sigmoid)(float* x, const float* gate, int64_t count);
  void (*delta_rule)(const DeltaTokens& tokens, float* block);
  void (*mamba_scan)(const MambaScan& scan, float* block);
};

}  // namespace billfish
