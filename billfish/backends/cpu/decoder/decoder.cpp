#include "decoder/decoder.h"

#include <chrono>
#include <cmath>

#include "activations/rows.h"
#include "decoder/router.h"
#include "decoder/screen.h"

namespace billfish {
namespace {

// Where a row of x belongs.
struct Place {
  const Cache* cache;
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

// All of them, those with the same keys one after the other. Heads go together only as far as each thread gets two blocks.
std::vector<QueryBlock> query_blocks(const std::vector<Passage>& passages, const DecoderShape& s) {
  int64_t single = 0;
  for (const Passage& passage : passages) single += std::max<int64_t>(slices_of(passage), 1);
  const int64_t sharing = s.heads / s.kv_heads;
  const int64_t together = std::clamp<int64_t>(s.heads * single / (2 * threads()), 1, std::min(HEADS_TOGETHER, sharing));
  std::vector<QueryBlock> blocks;
  for (int64_t kv_head = 0; kv_head < s.kv_heads; kv_head++) {
    int64_t row = 0;
    for (const Passage& passage : passages) {
      const int64_t heads = passage.count == 1 ? together : 1, slices = slices_of(passage);
      for (int64_t slice = slices ? 0 : -1; slice < slices || slice < 0; slice++) {
        for (int64_t i = 0; i < sharing; i += heads)
          for (int64_t j = 0; j < passage.count; j += ROWS_TOGETHER)
            blocks.push_back({row + j, std::min(ROWS_TOGETHER, passage.count - j), kv_head * sharing + i, std::min(heads, sharing - i), slice});
        if (slice < 0) break;
      }
      row += passage.count;
    }
  }
  return blocks;
}

// A row that is seen slice by slice, and where its numbers are: [slices, heads, SEEN_HEAD + head_size].
struct SlicedRow {
  int64_t row, slices, at;
};

std::vector<SlicedRow> sliced_rows(const std::vector<Passage>& passages, int64_t slice_size) {
  std::vector<SlicedRow> rows;
  int64_t row = 0, at = 0;
  for (const Passage& passage : passages) {
    if (const int64_t slices = slices_of(passage)) rows.push_back({row, slices, at}), at += slices * slice_size;
    row += passage.count;
  }
  return rows;
}

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

// Of all rows [m, pairs], for one Rotation.
struct Angles {
  std::vector<float> cosine, sine;
};

Angles angles_of(const Rotation& rotation, const std::vector<Place>& places) {
  const size_t pairs = rotation.frequencies.size();
  Angles angles{std::vector<float>(places.size() * pairs), std::vector<float>(places.size() * pairs)};
  for (size_t i = 0; i < angles.cosine.size(); i++) {
    const double angle = double(places[i / pairs].position) * rotation.frequencies[i % pairs];
    angles.cosine[i] = float(std::cos(angle) * rotation.magnitude), angles.sine[i] = float(std::sin(angle) * rotation.magnitude);
  }
  return angles;
}

// One run of rows through layers: what lies between two products.
class Pass {
 public:
  Pass(const Level& level, const DecoderKernels& kernels, const DecoderShape& shape, const std::vector<Rotation>& rotations,
       const std::vector<Passage>& passages, int digits, float* x, double* seconds, const Observe& observe)
      : level_(level), kernels_(kernels), s_(shape), digits_(digits), rotations_(rotations), places_(places_of(passages)),
        blocks_(query_blocks(passages, shape)), sliced_(sliced_rows(passages, shape.heads * (SEEN_HEAD + shape.head_size))), m_(int64_t(places_.size())), q_size_(s_.heads * s_.head_size), kv_size_(s_.kv_heads * s_.head_size), x_(x),
        hidden_(level, m_, s_.hidden, digits), attended_(level, m_, q_size_, digits), opened_(level, m_, s_.feed_forward, digits),
        q_(size_t(m_ * q_size_)), k_(size_t(m_ * kv_size_)), v_(k_.size()), out_(q_.size()), gate_(size_t(m_ * s_.feed_forward)),
        up_(gate_.size()), added_(size_t(m_ * s_.hidden)),
        observe_(observe), seen_(observe ? size_t(m_ * std::max(s_.hidden, s_.feed_forward)) : 0), watch_(seconds) {
    if (!sliced_.empty()) slices_.resize(size_t(sliced_.back().at + sliced_.back().slices * s_.heads * (SEEN_HEAD + s_.head_size)));
    for (const Rotation& rotation : rotations) angles_.push_back(angles_of(rotation, places_));
  }

  void run(const Layer& layer, int64_t number) {
    add_and_normalize(layer.vectors.attention_norm, {&layer.q.weights, &layer.k.weights, &layer.v.weights});
    tell(number, INPUT_QKV, seen_.data(), s_.hidden);
    watch_.lap(NORM);
    hidden_.multiply({{layer.q.weights, layer.q.bias, q_.data()}, {layer.k.weights, layer.k.bias, k_.data()}, {layer.v.weights, layer.v.bias, v_.data()}});
    watch_.lap(QKV);
    parallel_for(m_, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) turn_and_store(layer, number, row);
    });
    watch_.lap(ROTATE);
    parallel_for(int64_t(blocks_.size()), [&](int64_t first, int64_t last) {
      for (int64_t unit = first; unit < last; unit++) attend(layer, number, blocks_[size_t(unit)]);
    }, 1);
    parallel_for(int64_t(sliced_.size()), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) gather(layer, sliced_[size_t(i)]);
    });
    tell(number, INPUT_OUTPUT, out_.data(), q_size_);
    attended_.take({&layer.o.weights}, out_.data());
    watch_.lap(ATTENTION);
    attended_.multiply({{layer.o.weights, layer.o.bias, added_.data()}});
    after_ = layer.vectors.after_attention_norm;
    watch_.lap(OUTPUT);
    if (layer.mixture) mixture(layer, number, *layer.mixture);
    else feed_forward(layer, number);
    after_ = layer.vectors.after_feed_forward_norm;
  }

  void finish() {
    for (int64_t row = 0; row < m_; row++) take_in(row);
  }

 private:
  static std::vector<Place> places_of(const std::vector<Passage>& passages) {
    std::vector<Place> places;
    for (const Passage& passage : passages)
      for (int64_t i = 0; i < passage.count; i++) places.push_back({&passage.cache, passage.start + i});
    return places;
  }

  // x takes in what the last part computed.
  void take_in(int64_t row) {
    float* added = added_.data() + row * s_.hidden;
    if (after_) kernels_.normalize(added, after_, s_.epsilon, s_.hidden, added);
    kernels_.add_scaled(x_ + row * s_.hidden, added, s_.residual_scale, s_.hidden);
  }

  // The same for all rows; then x is normalized for the next part.
  void add_and_normalize(const float* weight, const std::vector<const Weights*>& next) {
    hidden_.fill(next, [&](int64_t row, float* to) {
      take_in(row);
      kernels_.normalize(x_ + row * s_.hidden, weight, s_.epsilon, s_.hidden, to);
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

  HeadCache head_cache(const Cache& c, int64_t number, int64_t head) const {
    const int64_t at = (number * s_.kv_heads + head) * c.capacity * s_.head_size * (c.half ? 2 : 4);
    return {static_cast<char*>(c.keys) + at, static_cast<char*>(c.values) + at, c.half};
  }

  // Normalizes and rotates the heads of a row, where the layer does that.
  void turn(const Layer& layer, int64_t row, float* heads, int64_t count, const float* norm) const {
    if (norm && s_.joint_norms) kernels_.normalize(heads, norm, s_.epsilon, count * s_.head_size, heads);
    for (int64_t h = 0; h < count; h++) {
      float* head = heads + h * s_.head_size;
      if (norm && !s_.joint_norms) kernels_.normalize(head, norm, s_.epsilon, s_.head_size, head);
      if (layer.rotation < 0) continue;
      const Angles& angles = angles_[size_t(layer.rotation)];
      const int64_t pairs = int64_t(rotations_[size_t(layer.rotation)].frequencies.size());
      kernels_.rotate(head, angles.cosine.data() + row * pairs, angles.sine.data() + row * pairs, pairs, s_.adjacent);
    }
  }

  // q, k and v of a row are made ready; k and v go into the cache.
  void turn_and_store(const Layer& layer, int64_t number, int64_t row) {
    const Place& place = places_[size_t(row)];
    float *q = q_.data() + row * q_size_, *k = k_.data() + row * kv_size_;
    turn(layer, row, q, s_.heads, layer.vectors.q_norm);
    kernels_.scale(q, s_.query_scale, q_size_);
    turn(layer, row, k, s_.kv_heads, layer.vectors.k_norm);
    for (int64_t h = 0; h < s_.kv_heads; h++)
      kernels_.store(head_cache(*place.cache, number, h), place.position, k + h * s_.head_size, v_.data() + row * kv_size_ + h * s_.head_size, s_.head_size);
  }

  void attend(const Layer& layer, int64_t number, const QueryBlock& block) {
    const auto [row, rows, head, heads, slice] = block;
    const Place& place = places_[size_t(row)];
    const int64_t at = row * q_size_ + head * s_.head_size, seen = place.position + 1, more = heads > 1 ? 0 : 1;
    const HeadCache cache = head_cache(*place.cache, number, head / (s_.heads / s_.kv_heads));
    const Queries queries{q_.data() + at, heads > 1 ? heads : rows, heads > 1 ? s_.head_size : q_size_};
    const Sight sight{seen, more, layer.window > 0 ? seen - layer.window : -rows, s_.attention_cap, layer.vectors.sinks ? layer.vectors.sinks + head : nullptr};
    if (slice < 0) kernels_.attend(queries, cache, sight, s_.head_size, out_.data() + at);
    else kernels_.see_slice(queries, cache, sight, slice, s_.head_size, slice_of(*sliced_row(row), slice, head));
  }

  const SlicedRow* sliced_row(int64_t row) const {
    return &*std::lower_bound(sliced_.begin(), sliced_.end(), row, [](const SlicedRow& sliced, int64_t wanted) { return sliced.row < wanted; });
  }
  float* slice_of(const SlicedRow& sliced, int64_t slice, int64_t head) {
    return slices_.data() + sliced.at + (slice * s_.heads + head) * (SEEN_HEAD + s_.head_size);
  }

  // The slices of a row are put together.
  void gather(const Layer& layer, const SlicedRow& sliced) {
    for (int64_t head = 0; head < s_.heads; head++)
      kernels_.gather(slice_of(sliced, 0, head), sliced.slices, s_.heads * (SEEN_HEAD + s_.head_size), layer.vectors.sinks ? layer.vectors.sinks[head] : -INFINITY,
                      s_.head_size, out_.data() + sliced.row * q_size_ + head * s_.head_size);
  }

  void feed_forward(const Layer& layer, int64_t number) {
    add_and_normalize(layer.vectors.feed_forward_norm, {&layer.gate.weights, &layer.up.weights});
    tell(number, INPUT_GATE_UP, seen_.data(), s_.hidden);
    watch_.lap(NORM);
    hidden_.multiply({{layer.gate.weights, layer.gate.bias, gate_.data()}, {layer.up.weights, layer.up.bias, up_.data()}});
    watch_.lap(GATE_UP);
    open_and_close(layer, number, added_.data());
  }

  // The second half of a feed-forward part, from gate and up.
  void open_and_close(const Layer& layer, int64_t number, float* out) {
    opened_.fill({&layer.down.weights}, [&](int64_t row, float* to) {
      level_.open_gate(gate_.data() + row * s_.feed_forward, up_.data() + row * s_.feed_forward, s_.gate, s_.feed_forward, to);
      note(row, to, s_.feed_forward);
    });
    tell(number, INPUT_DOWN, seen_.data(), s_.feed_forward);
    watch_.lap(GATE);
    opened_.multiply({{layer.down.weights, layer.down.bias, out}});
    watch_.lap(DOWN);
  }

  void mixture(const Layer& layer, int64_t number, const Mixture& mixture) {
    const bool shared = mixture.shared_gate != nullptr;
    const int64_t experts = mixture.gate.experts;
    normal_.resize(size_t(m_ * s_.hidden)), scores_.resize(size_t(m_ * experts));
    std::vector<const Weights*> next{&mixture.router.weights};
    std::vector<LinearInto> products{{mixture.router.weights, mixture.router.bias, scores_.data()}};
    if (shared) {
      next.insert(next.end(), {&layer.gate.weights, &layer.up.weights});
      products.push_back({layer.gate.weights, layer.gate.bias, gate_.data()});
      products.push_back({layer.up.weights, layer.up.bias, up_.data()});
    }
    hidden_.fill(next, [&](int64_t row, float* to) {
      take_in(row);
      kernels_.normalize(x_ + row * s_.hidden, layer.vectors.feed_forward_norm, s_.epsilon, s_.hidden, to);
      std::copy(to, to + s_.hidden, normal_.data() + row * s_.hidden);
    });
    tell(number, INPUT_GATE_UP, normal_.data(), s_.hidden);
    watch_.lap(NORM);
    hidden_.multiply(products);
    const Routing routing = route(scores_.data(), m_, experts, mixture.chosen, mixture.renormalized, mixture.scale);
    watch_.lap(ROUTER);
    ObserveExpert observe = nullptr;
    if (observe_) observe = [&](int64_t expert, int64_t count, const float* x, const float* h) {
      observe_(number, INPUT_EXPERT, expert, x, count, s_.hidden);
      observe_(number, INPUT_EXPERT_DOWN, expert, h, count, mixture.down.weights.k);
    };
    run_experts(level_, normal_.data(), m_, routing.ids.data(), routing.weights.data(), mixture.chosen, mixture.gate, &mixture.up,
                mixture.down, int(s_.gate), digits_, added_.data(), observe);
    watch_.lap(EXPERTS);
    if (shared) add_shared(layer, number, mixture.shared_gate);
  }

  // What the expert for all rows gives, times the sigmoid of its own gate.
  void add_shared(const Layer& layer, int64_t number, const float* shared_gate) {
    std::vector<float> more(added_.size());
    open_and_close(layer, number, more.data());
    parallel_for(m_, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) {
        double score = 0;
        for (int64_t i = 0; i < s_.hidden; i++) score += double(normal_[size_t(row * s_.hidden + i)]) * double(shared_gate[i]);
        kernels_.add_scaled(added_.data() + row * s_.hidden, more.data() + row * s_.hidden, float(1 / (1 + std::exp(-score))), s_.hidden);
      }
    });
  }

  const Level& level_;
  const DecoderKernels& kernels_;
  const DecoderShape& s_;
  const int digits_;
  const std::vector<Rotation>& rotations_;
  const std::vector<Place> places_;
  const std::vector<QueryBlock> blocks_;
  const std::vector<SlicedRow> sliced_;
  const int64_t m_, q_size_, kv_size_;
  float* x_;
  Rows hidden_, attended_, opened_;
  std::vector<float> q_, k_, v_, out_, gate_, up_;
  std::vector<float> slices_;  // what sliced rows have of their slices
  std::vector<float> normal_, scores_;  // of rows before experts: their normalized x, and the router's scores
  std::vector<float> added_;      // what the last part computed
  const float* after_ = nullptr;  // its norm, if it has one
  std::vector<Angles> angles_;
  const Observe& observe_;
  std::vector<float> seen_;
  Stopwatch watch_;
};

}  // namespace

void Decoder::run_layers(float* x, const std::vector<Passage>& passages, int digits, int64_t first, int64_t last, const Observe& observe) const {
  Pass pass(level_, kernels_, shape_, rotations_, passages, digits, x, seconds_, observe);
  for (int64_t l = first; l < last; l++) pass.run(layers_[size_t(l)], l);
  pass.finish();
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
