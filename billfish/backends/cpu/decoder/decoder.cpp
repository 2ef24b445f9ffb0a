#include "decoder/decoder.h"

#include <chrono>
#include <cmath>
#include <deque>

#include "activations/rows.h"
#include "decoder/router.h"
#include "decoder/screen.h"

namespace billfish {
namespace {

// Where a row of x belongs.
struct Place {
  const SequenceState* state;
  int64_t position;
};

// What attends together: rows of one passage, or for a single row up to four heads that share their keys and values.
struct QueryBlock {
  int64_t row, rows, head, heads;
  int64_t slice;  // of the positions; -1: all
};

constexpr int64_t ROWS_TOGETHER = 32, HEADS_TOGETHER = 4;

// A single row that sees several slices is seen slice by slice.
int64_t slices_of(const Passage& passage) {
  const int64_t slices = (passage.start + SLICE) / SLICE;
  return passage.count == 1 && slices > 1 ? slices : 0;
}

// A row that is seen slice by slice, and where its numbers are: [slices, heads, SEEN_HEAD + head_size].
struct SlicedRow {
  int64_t row, slices, at;
};

// How the work of attention is shared out, for all layers with these heads.
struct AttentionPlan {
  int64_t heads, kv_heads, head_size;
  std::vector<QueryBlock> blocks;  // those with the same keys one after the other
  std::vector<SlicedRow> sliced;
  size_t slices_size = 0;  // numbers of all slices

  // Heads go together only as far as each thread gets two blocks.
  AttentionPlan(const std::vector<Passage>& passages, const Attention& a) : heads(a.heads), kv_heads(a.kv_heads), head_size(a.head_size) {
    int64_t single = 0;
    for (const Passage& passage : passages) single += std::max<int64_t>(slices_of(passage), 1);
    const int64_t sharing = heads / kv_heads;
    const int64_t together = std::clamp<int64_t>(heads * single / (2 * threads()), 1, std::min(HEADS_TOGETHER, sharing));
    for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
      int64_t row = 0;
      for (const Passage& passage : passages) {
        const int64_t count = passage.count == 1 ? together : 1, slices = slices_of(passage);
        for (int64_t slice = slices ? 0 : -1; slice < slices || slice < 0; slice++) {
          for (int64_t i = 0; i < sharing; i += count)
            for (int64_t j = 0; j < passage.count; j += ROWS_TOGETHER)
              blocks.push_back({row + j, std::min(ROWS_TOGETHER, passage.count - j), kv_head * sharing + i, std::min(count, sharing - i), slice});
          if (slice < 0) break;
        }
        row += passage.count;
      }
    }
    int64_t row = 0, at = 0;
    for (const Passage& passage : passages) {
      if (const int64_t slices = slices_of(passage)) sliced.push_back({row, slices, at}), at += slices * heads * (SEEN_HEAD + head_size);
      row += passage.count;
    }
    slices_size = size_t(at);
  }

  bool is_for(const Attention& a) const { return heads == a.heads && kv_heads == a.kv_heads && head_size == a.head_size; }
  const SlicedRow& sliced_row(int64_t row) const {
    return *std::lower_bound(sliced.begin(), sliced.end(), row, [](const SlicedRow& each, int64_t wanted) { return each.row < wanted; });
  }
};

// Adds the time since it was last asked to a part.
class Stopwatch {
 public:
  explicit Stopwatch(double* seconds) : seconds_(seconds), last_(std::chrono::steady_clock::now()) {}
  void lap(Part part) {
    const auto now = std::chrono::steady_clock::now();
    seconds_[part] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  double* seconds_;
  std::chrono::steady_clock::time_point last_;
};

// Of all rows [m, pairs], for one table.
struct Angles {
  std::vector<float> cosine, sine;
};

Angles angles_of(const Rope& rope, const std::vector<Place>& places) {
  const size_t pairs = rope.frequencies.size();
  Angles angles{std::vector<float>(places.size() * pairs), std::vector<float>(places.size() * pairs)};
  for (size_t i = 0; i < angles.cosine.size(); i++) {
    const double angle = double(places[i / pairs].position) * rope.frequencies[i % pairs];
    angles.cosine[i] = float(std::cos(angle) * rope.magnitude), angles.sine[i] = float(std::sin(angle) * rope.magnitude);
  }
  return angles;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Memory that layers take in turn. It grows to what the largest needs, and what is in it is anybody's.
class Scratch {
 public:
  float* take(int64_t count) {
    if (int64_t(numbers_.size()) < count) numbers_.resize(size_t(count));
    return numbers_.data();
  }
  float* data() { return numbers_.data(); }

 private:
  std::vector<float> numbers_;
};

// One run of rows through layers: what lies between two products.
class Pass {
 public:
  Pass(const Level& level, const DecoderKernels& kernels, const DecoderShape& shape, const std::vector<Rope>& ropes, const std::vector<Passage>& passages,
       int digits, float* x, double* seconds, const Observe& observe)
      : level_(level), kernels_(kernels), s_(shape), digits_(digits), ropes_(ropes), passages_(passages), places_(places_of(passages)),
        m_(int64_t(places_.size())), x_(x), hidden_(level, m_, s_.hidden, digits), added_(size_t(m_ * s_.hidden)), observe_(observe), watch_(seconds) {
    for (const Rope& rope : ropes) angles_.push_back(angles_of(rope, places_));
  }

  // layer_inputs [rows, `stride` apart]: what PerLayerInput multiplies.
  void run(const Block& block, int64_t number, const float* layer_inputs, int64_t stride) {
    const Attention* attention = std::get_if<Attention>(&block.mixer);
    attend(*attention, block.mixer_norm, number);
    after_ = block.mixer_post_norm, scale_ = block.residual_scale;
    if (const Dense* dense = std::get_if<Dense>(&block.feed_forward)) feed_forward(*dense, block.feed_forward_norm, number);
    else if (const Mixture* mixture = std::get_if<Mixture>(&block.feed_forward)) this->mixture(*mixture, block.feed_forward_norm, number);
    else both(std::get<DenseAndMixture>(block.feed_forward), block.feed_forward_norm, number);
    after_ = block.feed_forward_post_norm;
    if (block.per_layer_input) add_layer_input(*block.per_layer_input, layer_inputs, stride, number);
    if (block.output_scale != 1.0f) {
      finish();
      kernels_.scale(x_, block.output_scale, m_ * s_.hidden);
      std::fill(added_.begin(), added_.end(), 0.0f), after_ = nullptr;
    }
  }

  void finish() {
    for (int64_t row = 0; row < m_; row++) take_in(row);
  }

 private:
  static std::vector<Place> places_of(const std::vector<Passage>& passages) {
    std::vector<Place> places;
    for (const Passage& passage : passages)
      for (int64_t i = 0; i < passage.count; i++) places.push_back({passage.state, passage.start + i});
    return places;
  }

  // ---- norms and residuals -------------------------------------------------------------------------------------------

  // x takes in what the last part computed.
  void take_in(int64_t row) {
    float* added = added_.data() + row * s_.hidden;
    if (after_) kernels_.normalize(added, after_, s_.epsilon, s_.hidden, added);
    kernels_.add_scaled(x_ + row * s_.hidden, added, scale_, s_.hidden);
  }

  // A row of x through a norm, or as it is where there is none.
  void normalize(int64_t row, const float* norm, float* to) {
    const float* x = x_ + row * s_.hidden;
    if (norm) kernels_.normalize(x, norm, s_.epsilon, s_.hidden, to);
    else std::copy(x, x + s_.hidden, to);
  }

  // All rows take in what the last part computed; then x is normalized for the next part.
  void add_and_normalize(const float* norm, const std::vector<const Weights*>& next) {
    if (observe_) seen_.take(m_ * s_.hidden);
    hidden_.fill(next, [&](int64_t row, float* to) {
      take_in(row);
      normalize(row, norm, to);
      note(row, to, s_.hidden);
    });
  }

  // Rows that are made part by part come together for the observer.
  void note(int64_t row, const float* made, int64_t width) {
    if (observe_) std::copy(made, made + width, seen_.data() + row * width);
  }

  // All rows of an input are there.
  void tell(int64_t number, LayerInput input, const float* rows, int64_t width) {
    if (observe_) observe_(number, input, NO_EXPERT, rows, m_, width);
  }

  // ---- attention -----------------------------------------------------------------------------------------------------

  void attend(const Attention& a, const float* norm, int64_t number) {
    const int64_t q_size = a.heads * a.head_size, kv_size = a.kv_heads * a.head_size;
    float *q = q_.take(m_ * q_size), *k = k_.take(m_ * kv_size), *v = v_.take(m_ * kv_size), *out = out_.take(m_ * q_size);
    std::vector<const Weights*> next;
    std::vector<LinearInto> products;
    next.reserve(3), products.reserve(3);
    next.push_back(&a.q.weights), products.push_back({a.q.weights, a.q.bias, q});
    if (a.k) next.push_back(&a.k->weights), products.push_back({a.k->weights, a.k->bias, k});
    if (a.v) next.push_back(&a.v->weights), products.push_back({a.v->weights, a.v->bias, v});
    add_and_normalize(norm, next);
    tell(number, INPUT_QKV, seen_.data(), s_.hidden);
    watch_.lap(NORM);
    hidden_.multiply(products);
    watch_.lap(QKV);
    parallel_for(m_, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) rotate_and_store(a, row, q + row * q_size, k + row * kv_size, v + row * kv_size);
    });
    watch_.lap(ROTATE);
    const AttentionPlan& plan = plan_for(a);
    slices_.take(int64_t(plan.slices_size));
    parallel_for(int64_t(plan.blocks.size()), [&](int64_t first, int64_t last) {
      for (int64_t unit = first; unit < last; unit++) attend(a, plan, plan.blocks[size_t(unit)]);
    }, 1);
    parallel_for(int64_t(plan.sliced.size()), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) gather(a, plan.sliced[size_t(i)]);
    });
    tell(number, INPUT_OUTPUT, out, q_size);
    attended_.begin_for(level_, m_, q_size, digits_);
    attended_.take({&a.output.weights}, out);
    watch_.lap(ATTENTION);
    attended_.multiply({{a.output.weights, a.output.bias, added_.data()}});
    watch_.lap(OUTPUT);
  }

  const AttentionPlan& plan_for(const Attention& a) {
    for (const AttentionPlan& plan : plans_)
      if (plan.is_for(a)) return plan;
    plans_.emplace_back(passages_, a);
    return plans_.back();
  }

  // Normalizes and rotates the heads of a row, where the layer does that.
  void rotate(const Attention& a, int64_t row, float* heads, int64_t count, const float* norm) const {
    if (norm && a.joint_norms) kernels_.normalize(heads, norm, s_.epsilon, count * a.head_size, heads);
    for (int64_t h = 0; h < count; h++) {
      float* head = heads + h * a.head_size;
      if (norm && !a.joint_norms) kernels_.normalize(head, norm, s_.epsilon, a.head_size, head);
      if (a.rope < 0) continue;
      const Angles& angles = angles_[size_t(a.rope)];
      const Rope& rope = ropes_[size_t(a.rope)];
      const int64_t pairs = int64_t(rope.frequencies.size());
      kernels_.rotate(head, angles.cosine.data() + row * pairs, angles.sine.data() + row * pairs, pairs, rope.adjacent);
    }
  }

  // q, k and v of a row are made ready; k and v go into the cache.
  void rotate_and_store(const Attention& a, int64_t row, float* q, float* k, float* v) {
    const Place& place = places_[size_t(row)];
    rotate(a, row, q, a.heads, a.q_norm);
    const float growth = a.growth > 0 ? 1 + a.growth * std::log(1 + float(place.position / a.growth_length)) : 1.0f;
    kernels_.scale(q, a.scale * growth, a.heads * a.head_size);
    if (!a.k) return;
    if (!a.v) std::copy(k, k + a.kv_heads * a.head_size, v);
    rotate(a, row, k, a.kv_heads, a.k_norm);
    for (int64_t h = 0; h < a.kv_heads; h++) {
      float* value = v + h * a.head_size;
      if (a.v_norm) kernels_.normalize(value, a.v_norm, s_.epsilon, a.head_size, value);
      kernels_.store(place.state->layer(a.state).head(h), place.position, k + h * a.head_size, value, a.head_size);
    }
  }

  void attend(const Attention& a, const AttentionPlan& plan, const QueryBlock& block) {
    const auto [row, rows, head, heads, slice] = block;
    const Place& place = places_[size_t(row)];
    const int64_t q_size = a.heads * a.head_size, at = row * q_size + head * a.head_size, seen = place.position + 1, more = heads > 1 ? 0 : 1;
    const HeadCache cache = place.state->layer(a.state).head(head / (a.heads / a.kv_heads));
    const Queries queries{q_.data() + at, heads > 1 ? heads : rows, heads > 1 ? a.head_size : q_size};
    const Sight sight{seen, more, a.window > 0 ? seen - a.window : -rows, a.cap, a.sinks ? a.sinks + head : nullptr};
    if (slice < 0) kernels_.attend(queries, cache, sight, a.head_size, out_.data() + at);
    else kernels_.see_slice(queries, cache, sight, slice, a.head_size, slice_of(a, plan.sliced_row(row), slice, head));
  }

  float* slice_of(const Attention& a, const SlicedRow& sliced, int64_t slice, int64_t head) {
    return slices_.data() + sliced.at + (slice * a.heads + head) * (SEEN_HEAD + a.head_size);
  }

  // The slices of a row are put together.
  void gather(const Attention& a, const SlicedRow& sliced) {
    for (int64_t head = 0; head < a.heads; head++)
      kernels_.gather(slice_of(a, sliced, 0, head), sliced.slices, a.heads * (SEEN_HEAD + a.head_size), a.sinks ? a.sinks[head] : -INFINITY, a.head_size,
                      out_.data() + (sliced.row * a.heads + head) * a.head_size);
  }

  // ---- feed-forward --------------------------------------------------------------------------------------------------

  void feed_forward(const Dense& dense, const float* norm, int64_t number) {
    float *gate = gate_.take(m_ * dense.size()), *up = up_.take(m_ * dense.size());
    add_and_normalize(norm, {&dense.gate.weights, &dense.up.weights});
    tell(number, INPUT_GATE_UP, seen_.data(), s_.hidden);
    watch_.lap(NORM);
    hidden_.multiply({{dense.gate.weights, dense.gate.bias, gate}, {dense.up.weights, dense.up.bias, up}});
    watch_.lap(GATE_UP);
    open_and_close(dense, number, added_.data());
  }

  // The second half of a feed-forward part, from gate and up.
  void open_and_close(const Dense& dense, int64_t number, float* out) {
    const int64_t size = dense.size();
    opened_.begin_for(level_, m_, size, digits_);
    if (observe_) seen_.take(m_ * size);
    opened_.fill({&dense.down.weights}, [&](int64_t row, float* to) {
      level_.open_gate(gate_.data() + row * size, up_.data() + row * size, dense.activation, size, to);
      note(row, to, size);
    });
    tell(number, INPUT_DOWN, seen_.data(), size);
    watch_.lap(GATE);
    opened_.multiply({{dense.down.weights, dense.down.bias, out}});
    watch_.lap(DOWN);
  }

  void mixture(const Mixture& mixture, const float* norm, int64_t number) {
    float *normal = normal_.take(m_ * s_.hidden), *logits = logits_.take(m_ * mixture.gate.experts);
    std::vector<const Weights*> next{&mixture.router.weights};
    std::vector<LinearInto> products{{mixture.router.weights, mixture.router.bias, logits}};
    if (mixture.shared) {
      const Dense& shared = *mixture.shared;
      next.insert(next.end(), {&shared.gate.weights, &shared.up.weights});
      products.push_back({shared.gate.weights, shared.gate.bias, gate_.take(m_ * shared.size())});
      products.push_back({shared.up.weights, shared.up.bias, up_.take(m_ * shared.size())});
    }
    hidden_.fill(next, [&](int64_t row, float* to) {
      take_in(row);
      normalize(row, norm, to);
      std::copy(to, to + s_.hidden, normal + row * s_.hidden);
    });
    tell(number, INPUT_GATE_UP, normal, s_.hidden);
    watch_.lap(NORM);
    hidden_.multiply(products);
    run_experts(mixture, number, added_.data());
    if (mixture.shared) add_shared(mixture, number);
  }

  // What experts make of normal_, by the router's logits_.
  void run_experts(const Mixture& mixture, int64_t number, float* out) {
    const Choice choice = route(logits_.data(), m_, mixture.gate.experts, mixture.routing);
    watch_.lap(ROUTER);
    ObserveExpert observe = nullptr;
    if (observe_) observe = [&](int64_t expert, int64_t count, const float* x, const float* h) {
      observe_(number, INPUT_EXPERT, expert, x, count, s_.hidden);
      observe_(number, INPUT_EXPERT_DOWN, expert, h, count, mixture.down.weights.k);
    };
    billfish::run_experts(level_, normal_.data(), m_, choice.ids.data(), choice.weights.data(), mixture.routing.chosen, mixture.gate, mixture.up ? &*mixture.up : nullptr,
                          mixture.down, int(mixture.activation), digits_, out, observe);
    watch_.lap(EXPERTS);
  }

  // What the expert for all rows gives, times the sigmoid of its own gate if it has one.
  void add_shared(const Mixture& mixture, int64_t number) {
    float* more = more_.take(m_ * s_.hidden);
    open_and_close(*mixture.shared, number, more);
    parallel_for(m_, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) {
        double score = 0;
        for (int64_t i = 0; mixture.shared_gate && i < s_.hidden; i++) score += double(normal_.data()[row * s_.hidden + i]) * double(mixture.shared_gate[i]);
        kernels_.add_scaled(added_.data() + row * s_.hidden, more + row * s_.hidden, mixture.shared_gate ? float(sigmoid(score)) : 1.0f, s_.hidden);
      }
    });
  }

  void both(const DenseAndMixture& parts, const float* norm, int64_t number) {
    const Mixture& mixture = parts.mixture;
    feed_forward(parts.dense, norm, number);  // x has taken in the mixer's output, and `added_` is what the dense part gives
    float *normal = normal_.take(m_ * s_.hidden), *more = more_.take(m_ * s_.hidden), *logits = logits_.take(m_ * mixture.gate.experts);
    if (observe_) seen_.take(m_ * s_.hidden);
    hidden_.fill({&mixture.router.weights}, [&](int64_t row, float* to) {
      normalize(row, parts.mixture_norm, normal + row * s_.hidden);
      normalize(row, parts.router_norm, to);
      note(row, to, s_.hidden);
    });
    tell(number, INPUT_ROUTER, seen_.data(), s_.hidden);
    watch_.lap(NORM);
    hidden_.multiply({{mixture.router.weights, mixture.router.bias, logits}});
    run_experts(mixture, number, more);
    parallel_for(m_, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) {
        float *own = added_.data() + row * s_.hidden, *other = more + row * s_.hidden;
        kernels_.normalize(own, parts.dense_post_norm, s_.epsilon, s_.hidden, own);
        kernels_.normalize(other, parts.mixture_post_norm, s_.epsilon, s_.hidden, other);
        kernels_.add_scaled(own, other, 1.0f, s_.hidden);
      }
    });
    watch_.lap(NORM);
  }

  void add_layer_input(const PerLayerInput& input, const float* inputs, int64_t stride, int64_t number) {
    const int64_t size = input.size();
    float* gate = gate_.take(m_ * size);
    add_and_normalize(nullptr, {&input.gate.weights});
    tell(number, INPUT_LAYER_GATE, seen_.data(), s_.hidden);
    hidden_.multiply({{input.gate.weights, input.gate.bias, gate}});
    opened_.begin_for(level_, m_, size, digits_);
    if (observe_) seen_.take(m_ * size);
    opened_.fill({&input.projection.weights}, [&](int64_t row, float* to) {
      level_.open_gate(gate + row * size, inputs + row * stride, input.activation, size, to);
      note(row, to, size);
    });
    tell(number, INPUT_LAYER_PROJECTION, seen_.data(), size);
    opened_.multiply({{input.projection.weights, input.projection.bias, added_.data()}});
    after_ = input.post_norm;
    watch_.lap(DOWN);
  }

  const Level& level_;
  const DecoderKernels& kernels_;
  const DecoderShape& s_;
  const int digits_;
  const std::vector<Rope>& ropes_;
  const std::vector<Passage>& passages_;
  const std::vector<Place> places_;
  const int64_t m_;
  float* x_;
  Rows hidden_, attended_, opened_;
  std::deque<AttentionPlan> plans_;
  Scratch q_, k_, v_, out_, slices_, gate_, up_, more_;
  Scratch normal_, logits_;       // of rows before experts: their normalized x, and the router's logits
  std::vector<float> added_;      // what the last part computed
  const float* after_ = nullptr;  // its norm, if it has one
  float scale_ = 1;               // of it
  std::vector<Angles> angles_;
  const Observe& observe_;
  Scratch seen_;
  Stopwatch watch_;
};

}  // namespace

void Decoder::run(float* x, const float* layer_inputs, const std::vector<Passage>& passages, int digits, int64_t first, int64_t last, const Observe& observe) const {
  Pass pass(level_, kernels_, shape_, ropes_, passages, digits, x, seconds_, observe);
  const int64_t size = blocks_.empty() || !blocks_[0].per_layer_input ? 0 : blocks_[0].per_layer_input->size();
  for (int64_t l = first; l < last; l++) pass.run(blocks_[size_t(l)], l, layer_inputs ? layer_inputs + l * size : nullptr, layers() * size);
  pass.finish();
}

void Decoder::add_layer_inputs(const PerLayerEmbedding& embedding, const float* x, int64_t m, int digits, float* rows) const {
  const int64_t size = embedding.size, width = embedding.layers * size;
  std::vector<float> projected(size_t(m * width));
  Rows input(level_, m, shape_.hidden, digits);
  input.take({&embedding.projection.weights}, x);
  input.multiply({{embedding.projection.weights, embedding.projection.bias, projected.data()}});
  const float half = std::sqrt(0.5f);
  parallel_for(m * embedding.layers, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      float *own = projected.data() + i * size, *row = rows + i * size;
      kernels_.scale(own, embedding.projection_scale, size);
      kernels_.normalize(own, embedding.norm, shape_.epsilon, size, own);
      kernels_.scale(row, embedding.scale, size);
      kernels_.add_scaled(row, own, 1.0f, size);
      kernels_.scale(row, half, size);
    }
  });
}

void Decoder::normalize(const float* x, int64_t m, const float* norm, float* out) const {
  for (int64_t row = 0; row < m; row++) kernels_.normalize(x + row * shape_.hidden, norm, shape_.epsilon, shape_.hidden, out + row * shape_.hidden);
}

void Decoder::finish(const float* x, int64_t m, const float* norm, const Matrix& head, int digits, float* out) const {
  Stopwatch watch(seconds_);
  const auto prepare = [&](Rows& rows) {
    rows.fill({&head.weights}, [&](int64_t row, float* to) { kernels_.normalize(x + row * shape_.hidden, norm, shape_.epsilon, shape_.hidden, to); });
  };
  const bool best = digits == BEST_OF_16 && !wants_floats(head.weights);
  Rows rows(level_, m, shape_.hidden, best ? 1 : digits == BEST_OF_16 ? 2 : digits);
  prepare(rows);
  rows.multiply({{head.weights, head.bias, out}});
  if (best) {
    rows.begin(level_, m, shape_.hidden, 2);
    prepare(rows);
    settle_best(rows, {head.weights, head.bias, out}, m, level_.tile_rows);
  }
  if (shape_.logit_cap > 0)
    parallel_for(m, [&](int64_t first, int64_t last) { kernels_.soften(out + first * head.weights.n, (last - first) * head.weights.n, shape_.logit_cap); });
  watch.lap(HEAD);
}

}  // namespace billfish
