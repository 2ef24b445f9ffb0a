#include "decoder/decoder.h"

#include <chrono>
#include <cmath>

#include "activations/rows.h"

namespace billfish {
namespace {

// Where a row of x belongs.
struct Place {
  const Cache* cache;
  int64_t position;
};

// What attends together: up to four rows of one passage, or for a single row up to four heads that share their keys and values.
struct QueryBlock {
  int64_t row, rows, head, heads;
};

constexpr int64_t QUERY_BLOCK = 4;

// All of them, those with the same keys one after the other. Heads go together only as far as each thread gets two.
std::vector<QueryBlock> query_blocks(const std::vector<Passage>& passages, const DecoderShape& s) {
  const int64_t sharing = s.heads / s.kv_heads;
  const int64_t together = std::clamp<int64_t>(s.heads * int64_t(passages.size()) / (2 * threads()), 1, std::min(QUERY_BLOCK, sharing));
  std::vector<QueryBlock> blocks;
  for (int64_t kv_head = 0; kv_head < s.kv_heads; kv_head++) {
    int64_t row = 0;
    for (const Passage& passage : passages) {
      const int64_t heads = passage.count == 1 ? together : 1;
      for (int64_t i = 0; i < sharing; i += heads)
        for (int64_t j = 0; j < passage.count; j += QUERY_BLOCK)
          blocks.push_back({row + j, std::min(QUERY_BLOCK, passage.count - j), kv_head * sharing + i, std::min(heads, sharing - i)});
      row += passage.count;
    }
  }
  return blocks;
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

void add_to(float* x, const float* more, int64_t count) {
  for (int64_t i = 0; i < count; i++) x[i] += more[i];
}

}  // namespace

void Decoder::run_layers(float* x, const std::vector<Passage>& passages, int digits, int64_t first_layer, int64_t last_layer, const Observe& observe) const {
  const DecoderShape& s = shape_;
  std::vector<Place> places;
  for (const Passage& passage : passages)
    for (int64_t i = 0; i < passage.count; i++) places.push_back({&passage.cache, passage.start + i});
  const std::vector<QueryBlock> blocks = query_blocks(passages, s);
  const int64_t m = int64_t(places.size()), pairs = int64_t(frequencies_.size());
  const int64_t q_size = s.heads * s.head_size, kv_size = s.kv_heads * s.head_size;
  std::vector<float> cosine(size_t(m * pairs)), sine(cosine.size());
  for (int64_t i = 0; i < m * pairs; i++) {
    const double angle = double(places[size_t(i / pairs)].position) * frequencies_[size_t(i % pairs)];
    cosine[size_t(i)] = float(std::cos(angle)), sine[size_t(i)] = float(std::sin(angle));
  }
  const float q_scale = float(1.0 / std::sqrt(double(s.head_size)));

  Rows hidden(level_, m, s.hidden, digits), attended(level_, m, q_size, digits), opened(level_, m, s.feed_forward, digits);
  std::vector<float> q(size_t(m * q_size)), k(size_t(m * kv_size)), v(k.size()), out(q.size());
  std::vector<float> gate(size_t(m * s.feed_forward)), up(gate.size()), added(size_t(m * s.hidden));

  // Rows that are made part by part, together for an observer.
  std::vector<float> seen(observe ? size_t(m * std::max(s.hidden, s.feed_forward)) : 0);
  auto note = [&](int64_t row, const float* made, int64_t width) {
    if (observe) std::copy(made, made + width, seen.data() + row * width);
  };

  // x takes in what the last part computed, and is normalized for the next.
  auto add_and_normalize = [&](const float* weight, const std::vector<const Weights*>& next) {
    hidden.fill(next, [&](int64_t row, float* to) {
      add_to(x + row * s.hidden, added.data() + row * s.hidden, s.hidden);
      kernels_.normalize(x + row * s.hidden, weight, s.epsilon, s.hidden, to);
      note(row, to, s.hidden);
    });
  };

  Stopwatch watch(seconds_);
  for (int64_t l = first_layer; l < last_layer; l++) {
    const Layer& layer = layers_[size_t(l)];
    auto keys_of = [&](const Cache& c, int64_t head) { return c.keys + (l * s.kv_heads + head) * c.capacity * s.head_size; };
    auto values_of = [&](const Cache& c, int64_t head) { return c.values + (l * s.kv_heads + head) * c.capacity * s.head_size; };

    add_and_normalize(layer.attention_norm, {&layer.q.weights, &layer.k.weights, &layer.v.weights});
    if (observe) observe(l, INPUT_QKV, seen.data(), m, s.hidden);
    watch.lap(NORM);
    hidden.multiply({{layer.q.weights, layer.q.bias, q.data()}, {layer.k.weights, layer.k.bias, k.data()}, {layer.v.weights, layer.v.bias, v.data()}});
    watch.lap(QKV);
    parallel_for(m, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) {
        const Place& place = places[size_t(row)];
        const float *c = cosine.data() + row * pairs, *n = sine.data() + row * pairs;
        for (int64_t h = 0; h < s.heads; h++) {
          float* head = q.data() + row * q_size + h * s.head_size;
          if (layer.q_norm) kernels_.normalize(head, layer.q_norm, s.epsilon, s.head_size, head);
          kernels_.rotate(head, c, n, pairs, s.adjacent);
          for (int64_t i = 0; i < s.head_size; i++) head[i] *= q_scale;
        }
        for (int64_t h = 0; h < s.kv_heads; h++) {
          float* head = k.data() + row * kv_size + h * s.head_size;
          if (layer.k_norm) kernels_.normalize(head, layer.k_norm, s.epsilon, s.head_size, head);
          kernels_.rotate(head, c, n, pairs, s.adjacent);
          const int64_t block = place.position / KEY_BLOCK, lane = place.position % KEY_BLOCK;
          float* key = keys_of(*place.cache, h) + block * s.head_size * KEY_BLOCK + lane;
          for (int64_t i = 0; i < s.head_size; i++) key[i * KEY_BLOCK] = head[i];
          const float* value = v.data() + row * kv_size + h * s.head_size;
          std::copy(value, value + s.head_size, values_of(*place.cache, h) + place.position * s.head_size);
        }
      }
    });
    watch.lap(ROTATE);
    parallel_for(int64_t(blocks.size()), [&](int64_t first, int64_t last) {
      for (int64_t unit = first; unit < last; unit++) {
        const auto [row, rows, head, heads] = blocks[size_t(unit)];
        const Place& place = places[size_t(row)];
        const int64_t kv_head = head / (s.heads / s.kv_heads), at = row * q_size + head * s.head_size;
        const float *keys = keys_of(*place.cache, kv_head), *values = values_of(*place.cache, kv_head);
        if (heads > 1) kernels_.attend(q.data() + at, heads, s.head_size, keys, values, place.position + 1, 0, s.head_size, out.data() + at);
        else kernels_.attend(q.data() + at, rows, q_size, keys, values, place.position + 1, 1, s.head_size, out.data() + at);
      }
    });
    if (observe) observe(l, INPUT_OUTPUT, out.data(), m, q_size);
    attended.take({&layer.o.weights}, out.data());
    watch.lap(ATTENTION);
    attended.multiply({{layer.o.weights, layer.o.bias, added.data()}});
    watch.lap(OUTPUT);

    add_and_normalize(layer.feed_forward_norm, {&layer.gate.weights, &layer.up.weights});
    if (observe) observe(l, INPUT_GATE_UP, seen.data(), m, s.hidden);
    watch.lap(NORM);
    hidden.multiply({{layer.gate.weights, layer.gate.bias, gate.data()}, {layer.up.weights, layer.up.bias, up.data()}});
    watch.lap(GATE_UP);
    opened.fill({&layer.down.weights}, [&](int64_t row, float* to) {
      kernels_.open_gate(gate.data() + row * s.feed_forward, up.data() + row * s.feed_forward, s.gelu, s.feed_forward, to);
      note(row, to, s.feed_forward);
    });
    if (observe) observe(l, INPUT_DOWN, seen.data(), m, s.feed_forward);
    watch.lap(GATE);
    opened.multiply({{layer.down.weights, layer.down.bias, added.data()}});
    watch.lap(DOWN);
  }
  add_to(x, added.data(), m * s.hidden);
}

void Decoder::normalize(const float* x, int64_t m, const float* norm, float* out) const {
  for (int64_t row = 0; row < m; row++) kernels_.normalize(x + row * shape_.hidden, norm, shape_.epsilon, shape_.hidden, out + row * shape_.hidden);
}

void Decoder::finish(const float* x, int64_t m, const float* norm, const Matrix& head, int digits, float* out) const {
  Stopwatch watch(seconds_);
  Rows rows(level_, m, shape_.hidden, digits);
  rows.fill({&head.weights}, [&](int64_t row, float* to) { kernels_.normalize(x + row * shape_.hidden, norm, shape_.epsilon, shape_.hidden, to); });
  rows.multiply({{head.weights, head.bias, out}});
  watch.lap(HEAD);
}

}  // namespace billfish
