// A decoder-only language model on packed weights: a list of blocks, each a token mixer and a feed-forward part. One call runs all of them for some
// rows (tokens), so that a token costs one trip from Python. billfish/models/description.py has the same structures, and says what they mean.
#pragma once
#include <array>
#include <deque>
#include <functional>
#include <optional>
#include <variant>
#include <vector>

#include "decoder/kernel_table.h"
#include "decoder/sequence_state.h"
#include "gemm/experts.h"
#include "layout/problem.h"

namespace billfish {

// Consecutive tokens of one sequence: they come at positions start, start + 1, ... and see all before them. There is room for them.
struct Passage {
  const SequenceState* state;
  int64_t start, count;
};

struct Matrix {
  Weights weights;
  const float* bias;
};

// A rotary table: radians from one position to the next for each pair, and what cosine and sine are multiplied with.
struct Rope {
  std::vector<double> frequencies;
  double magnitude;
  bool adjacent;  // the numbers of a pair are side by side, not half of the rotating part apart
};

// A norm before a part: RMSNorm, or LayerNorm where it is `centered`. Without a weight there is none.
struct Norm {
  const float *weight, *bias;
  bool centered;
  bool of_residual;  // what it gives is the residual stream, too
};

// ---- token mixers: a new one is a struct here, a member of Mixer, and a function of Pass in decoder.cpp ----------------------------------------

struct Attention {
  int64_t heads, kv_heads, head_size;
  Matrix q, output;
  std::optional<Matrix> k, v;  // without k: keys and values of layer `state`. Without v: keys, before their norm and rotation, are values, too
  int64_t state;               // the layer whose keys and values these are: its own, or an earlier one's
  float scale, cap;            // of scores s, which become cap tanh(s / cap); a cap of 0 leaves them
  int64_t window;              // of positions that a row sees, its own the last; 0: all
  int rope;                    // the number of its table; -1: heads do not rotate
  const float *q_norm, *k_norm;  // or null
  bool joint_norms;              // they are of all heads together, not of each
  const float* v_norm;           // of each head, or null
  const float* sinks;            // for each head the score of a key whose value is zero; or null
  bool gated;                    // behind the rows of each head, q has those of a gate, whose sigmoid the head's output is multiplied with
  float growth;                  // scores at position p are multiplied by 1 + growth ln(1 + floor(p / growth_length))
  int64_t growth_length;
  bool bidirectional;  // a row sees the rows behind it, too: all, or those up to window / 2 away on either side
};

// Over the last `taps` tokens, each channel for itself.
struct Convolution {
  const float* weight;  // [taps, channels], the oldest token first
  const float* bias;    // [channels], or null
  int64_t taps, channels;
};

// Of recurrent mixers, a sequence keeps the states [heads, columns / 16, rows, 16], then the last taps - 1 inputs of the convolution. Of a delta net, the
// state is that before the last chunk, and between them is what the chunk's tokens have left: keys [DELTA_CHUNK, key heads, key size], what they have
// written [DELTA_CHUNK, value heads, value size], and for each value head `left` and `decay` of DeltaInner.
struct GatedDeltaNet {
  int64_t key_heads, value_heads, key_size, value_size;
  bool tiled;  // value head i goes with key head i % key_heads, not with i / (value_heads / key_heads)
  Matrix qkv, z, beta, alpha, output;
  Convolution convolution;
  const float *decay, *step;  // [value_heads]: the state is multiplied with e^(decay softplus(alpha + step))
  const float* norm;          // [value_size]

  int64_t key_head(int64_t value_head) const { return tiled ? value_head % key_heads : value_head / (value_heads / key_heads); }
  int64_t keys_at() const { return value_heads * key_size * value_size; }
  int64_t written_at() const { return keys_at() + DELTA_CHUNK * key_heads * key_size; }
  int64_t left_at() const { return written_at() + DELTA_CHUNK * value_heads * value_size; }
  int64_t state_numbers() const { return left_at() + value_heads * (DELTA_CHUNK + 1); }
};

struct ShortConvolution {
  Matrix projection, output;
  Convolution convolution;
};

struct Mamba2 {
  int64_t heads, head_size, state_size, groups;
  Matrix projection, output;
  Convolution convolution;
  const float *decay, *step, *skip;  // [heads]
  const float* norm;                 // [heads * head_size], of each group

  int64_t size() const { return heads * head_size; }
  int64_t state_numbers() const { return size() * state_size; }
};

using Mixer = std::variant<Attention, GatedDeltaNet, ShortConvolution, Mamba2>;

// ---- feed-forward parts ------------------------------------------------------------------------------------------------------------------------

struct Dense {
  Matrix gate;
  std::optional<Matrix> up;  // else there is no gate: down(activation(gate x))
  Matrix down;
  Gate activation;
  int64_t size() const { return down.weights.k; }
};

// Of scores, which experts a row takes, and with what weight; see decoder/router.h.
struct Routing {
  int64_t chosen;
  bool sigmoid;         // what makes scores of logits, else a softmax
  bool renormalized;    // weights of a row's experts sum to 1
  float scale;          // of all weights
  const float* selection_bias;  // [experts], for the choice alone; or null
  const float* expert_scale;    // [experts], of weights; or null
  int64_t groups, groups_used;  // experts of so many groups are chosen from
};

struct Mixture {
  Matrix router;  // logits [rows, experts]
  Routing routing;
  ExpertStack gate, down;
  std::optional<ExpertStack> up;  // else `gate` has the rows of both, all gate rows first
  Gate activation;
  std::optional<Dense> shared;  // for all rows
  const float* shared_gate;     // [hidden], the sigmoid of whose product with x scales the shared expert; or null
};

// Both of x, each with norms of its own; their sum is the part's output.
struct DenseAndMixture {
  Dense dense;
  Mixture mixture;
  const float *dense_post_norm, *router_norm, *mixture_norm, *mixture_post_norm;
};

using FeedForward = std::variant<Dense, Mixture, DenseAndMixture>;

// ---- the model ---------------------------------------------------------------------------------------------------------------------------------

// x += post_norm(projection(activation(gate x) * input)), where `input` is this layer's part of what the model computes for each token.
struct PerLayerInput {
  Matrix gate, projection;
  const float* post_norm;
  Gate activation;
  int64_t size() const { return projection.weights.k; }
};

// Of all layers: (norm(projection_scale projection(x)) + scale rows) / sqrt(2).
struct PerLayerEmbedding {
  int64_t size, layers;
  Matrix projection;
  const float* norm;
  float scale, projection_scale;
};

struct Block {
  Mixer mixer;
  FeedForward feed_forward;
  Norm mixer_norm, feed_forward_norm;
  const float *mixer_post_norm, *feed_forward_post_norm;  // or null
  float residual_scale;
  std::optional<PerLayerInput> per_layer_input;
  float output_scale;
};

// What an adapter adds to a product y = W x of a layer: scale up^T (down x), of low rank.
struct LowRank {
  const float *down, *up;  // [rank, k] and [rank, n]; null: nothing
  int64_t rank;
  float scale;
};
enum AdaptedMatrix : int { ADAPTED_Q, ADAPTED_K, ADAPTED_V, ADAPTED_OUTPUT, ADAPTED_GATE, ADAPTED_UP, ADAPTED_DOWN, ADAPTED_MATRICES };
struct Adapter {
  std::vector<std::array<LowRank, ADAPTED_MATRICES>> layers;
};

struct DecoderShape {
  int64_t hidden;
  float epsilon;    // of all norms
  float logit_cap;  // c, where logits s become c tanh(s / c); 0 leaves them
};

// Where the time of run() and finish() goes. Quantizing x counts as part of what makes it: norm, attention, gate.
enum Part : int { NORM, QKV, ROTATE, ATTENTION, OUTPUT, GATE_UP, GATE, DOWN, ROUTER, EXPERTS, RECURRENCE, HEAD, PARTS };
constexpr const char* PART_NAMES[PARTS] = {"norms", "q, k, v", "rotation and cache", "attention", "attention output",
                                           "gate and up", "gate", "down", "router", "experts", "recurrence", "head"};

// What the products of a layer multiply: of q, k and v, or of whatever a mixer begins with; of the mixer's output; of gate and up, and of a router without a norm of its own; of down; of
// an expert's gate and up; of an expert's down; of a router with a norm of its own; of the two matrices of PerLayerInput.
enum LayerInput : int { INPUT_QKV, INPUT_OUTPUT, INPUT_GATE_UP, INPUT_DOWN, INPUT_EXPERT, INPUT_EXPERT_DOWN, INPUT_ROUTER, INPUT_LAYER_GATE, INPUT_LAYER_PROJECTION };
constexpr int64_t NO_EXPERT = -1;
// Gets the rows [count, width] of an input as float32 numbers, before they are rounded, on the thread that runs the layers. expert: which one
// multiplies them, or NO_EXPERT.
using Observe = std::function<void(int64_t layer, LayerInput input, int64_t expert, const float* rows, int64_t count, int64_t width)>;

constexpr int BEST_OF_16 = -1;

class Decoder {
 public:
  Decoder(const billfish::Level& level, const DecoderKernels& kernels, const DecoderShape& shape, std::vector<Rope> ropes)
      : level_(level), kernels_(kernels), shape_(shape), ropes_(std::move(ropes)) {}
  void add_block(const Block& block) { blocks_.push_back(block); }
  // Sequences with the state's `adapter` have it from now on.
  int add_adapter(Adapter adapter) {
    adapters_.push_back(std::move(adapter));
    return int(adapters_.size()) - 1;
  }
  const DecoderShape& shape() const { return shape_; }
  int64_t layers() const { return int64_t(blocks_.size()); }

  // x [rows of all passages, hidden] goes through layers [first, last), in place. digits: 0 for exact, 1 for q8, 2 for q16. layer_inputs [rows,
  // layers, size]: of PerLayerInput; or null. `observe` may be null.
  void run(float* x, const float* layer_inputs, const std::vector<Passage>& passages, int digits, int64_t first, int64_t last, const Observe& observe) const;
  // rows [m, layers, size], of the embedding per layer, become the inputs of layers; x [m, hidden] are rows of the embedding.
  void add_layer_inputs(const PerLayerEmbedding& embedding, const float* x, int64_t m, int digits, float* rows) const;
  // x [m, hidden] as the head multiplies it.
  void normalize(const float* x, int64_t m, const Norm& norm, float* out) const;
  // The last norm and product: x [m, hidden] -> out [m, n]. digits may be BEST_OF_16, for whoever takes the largest of a row: that one, and what comes
  // near it, is the product with x in q16, and the rest with x in q8.
  void finish(const float* x, int64_t m, const Norm& norm, const Matrix& head, int digits, float* out) const;
  // Seconds since the decoder was made, by Part.
  const double* seconds() const { return seconds_; }

 private:
  mutable double seconds_[PARTS] = {};
  const billfish::Level& level_;
  const DecoderKernels& kernels_;
  DecoderShape shape_;
  std::vector<Rope> ropes_;
  std::vector<Block> blocks_;
  std::deque<Adapter> adapters_;
};

}  // namespace billfish
