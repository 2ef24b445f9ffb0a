// A decoder-only transformer on packed weights: RMSNorm, rotary positions, grouped-query attention with a cache, a gated
// feed-forward part. One call runs all layers for some rows (tokens), so that a token costs one trip from Python.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "gemm/experts.h"
#include "layout/problem.h"

namespace billfish {

// Keys and values lie in blocks of 64 positions, in the order in which attention reads them: keys by 16 positions, transposed, so that one load
// brings one number of 16 keys; values by 16 columns.
constexpr int64_t CACHE_BLOCK = 64;

struct Cache {
  void* keys;        // [layers, kv_heads, capacity / 64, 64 / 16, head_size, 16], float32 or float16
  void* values;      // [layers, kv_heads, capacity / 64, head_size / 16, 64, 16], the same
  bool half;         // which of them
  int64_t capacity;  // positions, a multiple of 64
};

// Of one layer and one head.
struct HeadCache {
  void *keys, *values;
  bool half;
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

// Consecutive tokens of one text: they come at positions start, start + 1, ... and see all before them.
struct Passage {
  Cache cache;
  int64_t start, count;
};

struct Matrix {
  Weights weights;
  const float* bias;
};

// How the heads of a layer rotate: radians from one position to the next for each pair, and what cosine and sine are multiplied with.
struct Rotation {
  std::vector<double> frequencies;
  double magnitude;
};

// The vectors of a layer. All but the first two are null where there are none.
struct LayerVectors {
  const float *attention_norm, *feed_forward_norm;
  const float *q_norm, *k_norm;                            // of each head, or of all heads together
  const float *after_attention_norm, *after_feed_forward_norm;  // of what these parts give, before x takes it in
  const float* sinks;                                      // for each head the score of a key whose value is zero
};

// Experts, of which each row takes the `chosen` ones with the largest scores; of equal scores the lower index goes first.
struct Mixture {
  Matrix router;  // scores [rows, experts]
  ExpertStack gate, up, down;
  int64_t chosen;
  bool renormalized;         // routing weights are a softmax over the chosen scores, not over all
  float scale;               // of routing weights
  const float* shared_gate;  // [hidden], of the expert that Layer has for all rows; null where there is none
};

struct Layer {
  LayerVectors vectors;
  int64_t window;  // of positions that a row sees, its own the last; 0: all
  int rotation;    // the number of its Rotation; -1: heads do not rotate
  Matrix q, k, v, o, gate, up, down;  // the last three of the shared expert, or unused, where there is a mixture
  std::optional<Mixture> mixture;
};

struct DecoderShape {
  int64_t hidden, heads, kv_heads, head_size;
  int64_t feed_forward;  // of Layer's gate and up
  float epsilon, query_scale;
  float residual_scale;  // of what each part gives, before x takes it in
  float attention_cap, logit_cap;  // c, where scores s become c tanh(s / c); 0 leaves them
  bool adjacent;                   // how pairs of a head rotate
  Gate gate;                       // of the feed-forward part, of experts too
  bool joint_norms;                // q_norm and k_norm are of all heads together
};

// Which keys a block of queries sees, and what becomes of its scores. Rows are at consecutive positions, and `more` is 1; or they are heads of one
// position, and it is 0.
struct Sight {
  int64_t seen, more;  // the first row sees the keys before `seen`, each row `more` more than the one before it
  int64_t behind;      // but not these first ones; of them, too, each row has `more` more. Less than 0 is none
  float cap;           // as in DecoderShape
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

// Where the time of run() and finish() goes. Quantizing x counts as part of what makes it: norm, attention, gate.
enum Part : int { NORM, QKV, ROTATE, ATTENTION, OUTPUT, GATE_UP, GATE, DOWN, ROUTER, EXPERTS, HEAD, PARTS };
constexpr const char* PART_NAMES[PARTS] = {"norms", "q, k, v", "rotation and cache", "attention", "attention output",
                                           "gate and up", "gate", "down", "router", "experts", "head"};

// What the products of a layer multiply: of q, k and v; of the attention's output; of gate, up and the router; of down; of an expert's
// gate and up; of an expert's down.
enum LayerInput : int { INPUT_QKV, INPUT_OUTPUT, INPUT_GATE_UP, INPUT_DOWN, INPUT_EXPERT, INPUT_EXPERT_DOWN };
constexpr int64_t NO_EXPERT = -1;
// Gets the rows [count, width] of an input as float32 numbers, before they are rounded, on the thread that runs the layers. expert: which one
// multiplies them, or NO_EXPERT.
using Observe = std::function<void(int64_t layer, LayerInput input, int64_t expert, const float* rows, int64_t count, int64_t width)>;

constexpr int BEST_OF_16 = -1;

class Decoder {
 public:
  Decoder(const billfish::Level& level, const DecoderKernels& kernels, const DecoderShape& shape, std::vector<Rotation> rotations)
      : level_(level), kernels_(kernels), shape_(shape), rotations_(std::move(rotations)) {}
  void add_layer(const Layer& layer) { layers_.push_back(layer); }
  const DecoderShape& shape() const { return shape_; }

  // x [rows of all passages, hidden] goes through all layers, in place. digits: 0 for exact, 1 for q8, 2 for q16.
  void run(float* x, const std::vector<Passage>& passages, int digits) const { run_layers(x, passages, digits, 0, int64_t(layers_.size()), nullptr); }
  // The same through layers [first, last). `observe` may be null.
  void run_layers(float* x, const std::vector<Passage>& passages, int digits, int64_t first, int64_t last, const Observe& observe) const;
  // x [m, hidden] as the head multiplies it.
  void normalize(const float* x, int64_t m, const float* norm, float* out) const;
  // The last norm and product: x [m, hidden] -> out [m, n]. digits may be BEST_OF_16, for whoever takes the largest of a row: that one, and what comes
  // near it, is the product with x in q16, and the rest with x in q8.
  void finish(const float* x, int64_t m, const float* norm, const Matrix& head, int digits, float* out) const;
  // Seconds since the decoder was made, by Part.
  const double* seconds() const { return seconds_; }

 private:
  mutable double seconds_[PARTS] = {};
  const billfish::Level& level_;
  const DecoderKernels& kernels_;
  DecoderShape shape_;
  std::vector<Rotation> rotations_;
  std::vector<Layer> layers_;
};

}  // namespace billfish
