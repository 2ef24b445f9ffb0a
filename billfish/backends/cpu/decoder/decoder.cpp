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
  int64_t offset;  // rows of the same passage before it
  int64_t end;     // positions of its sequence, with those of the passage
};

// What attends together: rows of one passage and heads that share their keys and values; for a single row up to four of these.
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

  // Heads go together only as far as each thread gets two blocks of single rows, or four of other rows.
  AttentionPlan(const std::vector<Passage>& passages, const Attention& a) : heads(a.heads), kv_heads(a.kv_heads), head_size(a.head_size) {
    int64_t single = 0, many = 0;
    for (const Passage& passage : passages) {
      single += std::max<int64_t>(slices_of(passage), 1);
      if (passage.count > 1) many += (passage.count + ROWS_TOGETHER - 1) / ROWS_TOGETHER;
    }
    const int64_t sharing = heads / kv_heads;
    const int64_t together = std::clamp<int64_t>(heads * single / (2 * threads()), 1, std::min(HEADS_TOGETHER, sharing));
    const int64_t beside = std::clamp<int64_t>(heads * many / (4 * threads()), 1, sharing);
    for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
      int64_t row = 0;
      for (const Passage& passage : passages) {
        const int64_t count = passage.count == 1 ? together : beside, slices = slices_of(passage);
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

void apply(const DecoderKernels& kernels, const Norm& norm, const DecoderShape& shape, const float* x, float* to) {
  if (norm.centered) kernels.normalize_centered(x, norm.weight, norm.bias, shape.epsilon, shape.hidden, to);
  else kernels.normalize(x, norm.weight, shape.epsilon, shape.hidden, to);
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }
float decay(float rate, float step) { return std::exp(rate * step); }
constexpr float LENGTH_EPSILON = 1e-6f;  // of normalized q and k in a delta net

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
       const std::deque<Adapter>& adapters, int digits, float* x, double* seconds, const Observe& observe)
      : level_(level), kernels_(kernels), s_(shape), digits_(digits), ropes_(ropes), passages_(passages), places_(places_of(passages)),
        m_(int64_t(places_.size())), x_(x), hidden_(level, m_, s_.hidden, digits), added_(size_t(m_ * s_.hidden)), observe_(observe),
        adapters_(adapters), watch_(seconds) {
    for (const Passage& passage : passages) adapted_ |= passage.state->adapter >= 0;
    for (const Rope& rope : ropes) angles_.push_back(angles_of(rope, places_));
  }

  // layer_inputs [rows, `stride` apart]: what PerLayerInput multiplies.
  void run(const Block& block, int64_t number, const float* layer_inputs, int64_t stride) {
    std::visit([&](const auto& mixer) { mix(mixer, block.mixer_norm, number); }, block.mixer);
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
      for (int64_t i = 0; i < passage.count; i++) places.push_back({passage.state, passage.start + i, i, passage.start + passage.count});
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
  void normalize(int64_t row, const Norm& norm, float* to) {
    float* x = x_ + row * s_.hidden;
    if (norm.weight) apply(kernels_, norm, s_, x, to);
    else std::copy(x, x + s_.hidden, to);
    if (norm.of_residual) std::copy(to, to + s_.hidden, x);
  }

  // All rows take in what the last part computed; then x is normalized for the next part.
  void add_and_normalize(const Norm& norm, const std::vector<const Weights*>& next) {
    if (observe_ || adapted_) seen_.take(m_ * s_.hidden);
    hidden_.fill(next, [&](int64_t row, float* to) {
      take_in(row);
      normalize(row, norm, to);
      note(row, to, s_.hidden);
    });
  }

  // Rows that are made part by part come together for the observer.
  void note(int64_t row, const float* made, int64_t width) {
    if (observe_ || adapted_) std::copy(made, made + width, seen_.data() + row * width);
  }

  // All rows of an input are there.
  void tell(int64_t number, LayerInput input, const float* rows, int64_t width) {
    if (observe_) observe_(number, input, NO_EXPERT, rows, m_, width);
  }

  // ---- adapters ------------------------------------------------------------------------------------------------------

  // Each row of a product takes in what its sequence's adapter adds: x [rows, k], y [rows, n]. A row's numbers do not depend on the others.
  void adapt(int64_t number, AdaptedMatrix which, const float* x, const Matrix& matrix, float* y) {
    if (!adapted_) return;
    const int64_t n = matrix.weights.n, k = matrix.weights.k, whole = k / 16 * 16;
    parallel_for(m_, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) {
        const int adapter = places_[size_t(row)].state->adapter;
        if (adapter < 0) continue;
        const LowRank& added = adapters_[size_t(adapter)].layers[size_t(number)][which];
        for (int64_t r = 0; r < added.rank; r++) {
          const float *own = x + row * k, *down = added.down + r * k;
          float product = kernels_.dot(down, own, whole);
          for (int64_t i = whole; i < k; i++) product += down[i] * own[i];
          kernels_.add_scaled(y + row * n, added.up + r * n, product * added.scale, n);
        }
      }
    });
  }

  // ---- attention -----------------------------------------------------------------------------------------------------

  void mix(const Attention& a, const Norm& norm, int64_t number) {
    const int64_t q_size = a.heads * a.head_size, kv_size = a.kv_heads * a.head_size, head = a.head_size;
    float* gated = a.gated ? gate_.take(m_ * 2 * q_size) : nullptr;  // [rows, heads, q and then the gate]
    float *q = q_.take(m_ * q_size), *k = k_.take(m_ * kv_size), *v = v_.take(m_ * kv_size), *out = out_.take(m_ * q_size);
    std::vector<const Weights*> next;
    std::vector<LinearInto> products;
    next.reserve(3), products.reserve(3);
    next.push_back(&a.q.weights), products.push_back({a.q.weights, a.q.bias, gated ? gated : q});
    if (a.k) next.push_back(&a.k->weights), products.push_back({a.k->weights, a.k->bias, k});
    if (a.v) next.push_back(&a.v->weights), products.push_back({a.v->weights, a.v->bias, v});
    add_and_normalize(norm, next);
    tell(number, INPUT_QKV, seen_.data(), s_.hidden);
    watch_.lap(NORM);
    hidden_.multiply(products);
    adapt(number, ADAPTED_Q, seen_.data(), a.q, gated ? gated : q);
    if (a.k) adapt(number, ADAPTED_K, seen_.data(), *a.k, k);
    if (a.v) adapt(number, ADAPTED_V, seen_.data(), *a.v, v);
    watch_.lap(QKV);
    parallel_for(m_, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) {
        for (int64_t h = row * a.heads; gated && h < (row + 1) * a.heads; h++) std::copy_n(gated + 2 * h * head, head, q + h * head);
        rotate_and_store(a, row, q + row * q_size, k + row * kv_size, v + row * kv_size);
      }
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
    if (gated) parallel_for(m_ * a.heads, [&](int64_t first, int64_t last) {
      for (int64_t h = first; h < last; h++) kernels_.multiply_sigmoid(out + h * head, gated + (2 * h + 1) * head, head);
    });
    tell(number, INPUT_OUTPUT, out, q_size);
    attended_.begin_for(level_, m_, q_size, digits_);
    attended_.take({&a.output.weights}, out);
    watch_.lap(ATTENTION);
    attended_.multiply({{a.output.weights, a.output.bias, added_.data()}});
    adapt(number, ADAPTED_OUTPUT, out, a.output, added_.data());
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
    if (a.bidirectional && slice < 0) return attend_both_ways(a, row, rows, head, heads);
    const Place& place = places_[size_t(row)];
    const int64_t q_size = a.heads * a.head_size, at = row * q_size + head * a.head_size, seen = place.position + 1;
    const bool single = rows == 1;  // whose heads are the rows
    const HeadCache cache = place.state->layer(a.state).head(head / (a.heads / a.kv_heads));
    const Queries queries = single ? Queries{q_.data() + at, heads, a.head_size, 1, 0} : Queries{q_.data() + at, rows, q_size, heads, a.head_size};
    const Sight sight{seen, single ? 0 : 1, a.window > 0 ? seen - a.window : -rows, a.cap, a.sinks ? a.sinks + head : nullptr};
    if (slice < 0) kernels_.attend(queries, cache, sight, a.head_size, out_.data() + at);
    else kernels_.see_slice(queries, cache, sight, slice, a.head_size, slice_of(a, plan.sliced_row(row), slice, head));
  }

  // Of heads that share their keys. A row sees all rows of its passage, or those up to window / 2 away. Where the last of them is the passage's end, rows go alone:
  // each sees to the same position, but not from the same.
  void attend_both_ways(const Attention& a, int64_t row, int64_t rows, int64_t head, int64_t heads) {
    const int64_t q_size = a.heads * a.head_size, reach = a.window / 2;
    for (int64_t first = row, count; first < row + rows; first += count) {
      const Place& place = places_[size_t(first)];
      const int64_t at = first * q_size + head * a.head_size, inside = a.window ? place.end - place.position - reach : 0;
      count = !a.window ? rows : std::clamp<int64_t>(inside, 1, row + rows - first);
      const Sight sight = !a.window ? Sight{place.end, 0, -1, a.cap, nullptr}
                                    : Sight{std::min(place.end, place.position + reach + 1), 1, place.position - reach, a.cap, nullptr};
      const Queries queries{q_.data() + at, count, q_size, heads, a.head_size};
      kernels_.attend(queries, place.state->layer(a.state).head(head / (a.heads / a.kv_heads)), sight, a.head_size, out_.data() + at);
    }
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

  // ---- recurrent mixers ----------------------------------------------------------------------------------------------

  // The products that a mixer begins with.
  void project(const Norm& norm, int64_t number, const std::vector<LinearInto>& products) {
    std::vector<const Weights*> next;
    for (const LinearInto& product : products) next.push_back(&product.weights);
    add_and_normalize(norm, next);
    tell(number, INPUT_QKV, seen_.data(), s_.hidden);
    watch_.lap(NORM);
    hidden_.multiply(products);
    watch_.lap(QKV);
  }

  // out [rows, channels]: the convolution of in [rows, `stride` apart] and of what a sequence has kept of earlier rows, `kept` numbers into its state.
  // Then each sequence keeps its last rows.
  void convolve(const Convolution& c, const float* in, int64_t stride, int64_t kept, int64_t number, bool activate, float* out) {
    const int64_t before = c.taps - 1;
    // Row `offset` of a passage whose first one is `first`; those before it are in `tail`.
    const auto input = [&](const float* first, const float* tail, int64_t offset) {
      return offset < 0 ? tail + (before + offset) * c.channels : first + offset * stride;
    };
    constexpr int64_t SOME_CHANNELS = 1024;  // that one thread computes, of one row
    const int64_t pieces = (c.channels + SOME_CHANNELS - 1) / SOME_CHANNELS;
    parallel_for(m_ * pieces, [&](int64_t from, int64_t to) {
      std::vector<const float*> inputs(size_t(c.taps));
      for (int64_t piece = from; piece < to; piece++) {
        const int64_t row = piece / pieces, begin = piece % pieces * SOME_CHANNELS;
        const Place& place = places_[size_t(row)];
        const float* first = in + (row - place.offset) * stride;
        for (int64_t tap = 0; tap < c.taps; tap++) inputs[size_t(tap)] = input(first, place.state->recurrent(number) + kept, place.offset - before + tap);
        kernels_.convolve(inputs.data(), c.taps, c.weight, c.bias, c.channels, begin, std::min(begin + SOME_CHANNELS, c.channels), activate, out + row * c.channels);
      }
    }, 1);
    const float* first = in;
    for (const Passage& passage : passages_) {
      float* own = passage.state->recurrent(number) + kept;
      // What lies in `own` moves to its beginning, so no row is overwritten before it is copied.
      const auto keep = [&](int64_t rows, float* to) {
        for (int64_t i = 0; i < before; i++) std::copy_n(input(first, own, rows - before + i), c.channels, to + i * c.channels);
      };
      for (const auto& [rows, place] : passage.state->checkpoints(number, passage.start, passage.count)) keep(rows, place + kept);
      keep(passage.count, own);
      first += passage.count * stride;
    }
  }

  // scan(block, head, column block, first row, tokens) for every column block of the state of every head, on several threads. rows x 16 numbers are
  // a block, and `blocks` a head.
  template <class Scan> void scan_states(int64_t heads, int64_t blocks, int64_t rows, int64_t number, Scan scan) {
    std::vector<int64_t> firsts;
    int64_t row = 0;
    for (const Passage& passage : passages_) firsts.push_back(row), row += passage.count;
    parallel_for(int64_t(passages_.size()) * heads * blocks, [&](int64_t from, int64_t to) {
      for (int64_t unit = from; unit < to; unit++) {
        const Passage& passage = passages_[size_t(unit / (heads * blocks))];
        const int64_t first = firsts[size_t(unit / (heads * blocks))], within = unit % (heads * blocks), at = within * rows * 16;
        float* block = passage.state->recurrent(number) + at;
        int64_t done = 0;
        for (const auto& [count, place] : passage.state->checkpoints(number, passage.start, passage.count)) {
          scan(block, within / blocks, within % blocks, first + done, count - done);
          std::copy_n(block, rows * 16, place + at), done = count;
        }
        if (done < passage.count) scan(block, within / blocks, within % blocks, first + done, passage.count - done);
      }
    }, 1);
  }

  // While a layer's states change, nobody can go on behind them.
  void begin_states(int64_t number) {
    for (const Passage& passage : passages_) passage.state->set_position(number, SequenceState::CHANGING);
  }
  void end_states(int64_t number) {
    for (const Passage& passage : passages_) passage.state->set_position(number, passage.start + passage.count);
  }

  // make(row, to) writes a row of what the mixer's last product multiplies.
  template <class Make> void put_out(const Matrix& output, int64_t width, int64_t number, Make make) {
    attended_.begin_for(level_, m_, width, digits_);
    if (observe_) seen_.take(m_ * width);
    attended_.fill({&output.weights}, [&](int64_t row, float* to) {
      make(row, to);
      note(row, to, width);
    });
    tell(number, INPUT_OUTPUT, seen_.data(), width);
    watch_.lap(RECURRENCE);
    attended_.multiply({{output.weights, output.bias, added_.data()}});
    watch_.lap(OUTPUT);
  }

  // ---- gated delta nets ----

  // Rows of one chunk of a sequence, and where the state goes behind them, if it is kept.
  struct ChunkPart {
    int64_t passage, row, first, count;  // first: within the chunk
    float* checkpoint;
    bool last;  // of the passage
  };

  std::vector<ChunkPart> chunk_parts(int64_t number) const {
    std::vector<ChunkPart> parts;
    int64_t row = 0;
    for (size_t p = 0; p < passages_.size(); p++) {
      const Passage& passage = passages_[p];
      const auto checkpoints = passage.state->checkpoints(number, passage.start, passage.count);
      auto next = checkpoints.begin();
      for (int64_t done = 0, count; done < passage.count; done += count) {
        const int64_t first = (passage.start + done) % DELTA_CHUNK;
        count = std::min(DELTA_CHUNK - first, passage.count - done);
        if (next != checkpoints.end()) count = std::min(count, next->first - done);
        float* place = next != checkpoints.end() && next->first == done + count ? (next++)->second : nullptr;
        parts.push_back({int64_t(p), row + done, first, count, place, done + count == passage.count});
      }
      row += passage.count;
    }
    return parts;
  }

  // The key of token i of the chunk in which `row` is token `first`: of this pass, or of an earlier one.
  const float* chunk_key(const GatedDeltaNet& d, int64_t row, int64_t first, int64_t i, int64_t key_head, const float* kq, int64_t number) const {
    const Place& place = places_[size_t(row)];
    if (place.offset >= first - i) return kq + (key_head * m_ + row - first + i) * 2 * d.key_size;
    return place.state->recurrent(number) + d.keys_at() + (i * d.key_heads + key_head) * d.key_size;
  }

  // Fills in inner [heads] of a row. decays: [rows, heads].
  void look_back(const GatedDeltaNet& d, int64_t row, const float* kq, const float* decays, int64_t number, DeltaInner* inner) const {
    const Place& place = places_[size_t(row)];
    const int64_t own = place.position % DELTA_CHUNK, here = std::min(own, place.offset), earlier = own - here, sharing = d.value_heads / d.key_heads;
    const float* left = place.state->recurrent(number) + d.left_at();
    for (int64_t h = 0; h < d.value_heads; h++) {
      DeltaInner& one = inner[h] = {};
      for (int64_t i = 0; i < earlier; i++) one.left[i] = left[h * (DELTA_CHUNK + 1) + i];
      one.decay = earlier ? left[h * (DELTA_CHUNK + 1) + DELTA_CHUNK] : 1.0f;
      for (int64_t token = earlier; token <= own; token++) {
        const float factor = decays[(row - own + token) * d.value_heads + h];
        for (int64_t i = 0; i < token; i++) one.left[i] *= factor;
        one.left[token] = 1, one.decay *= factor;
      }
    }
    for (int64_t key_head = 0; key_head < d.key_heads; key_head++) {
      const float *k = kq + (key_head * m_ + row) * 2 * d.key_size, *q = k + d.key_size;
      for (int64_t i = 0; i <= own; i++) {
        const float* key = chunk_key(d, row, own, i, key_head, kq, number);
        const float by_k = i < own ? kernels_.dot(key, k, d.key_size) : 0, by_q = kernels_.dot(key, q, d.key_size);
        for (int64_t s = 0; s < sharing; s++) {
          DeltaInner& one = inner[d.tiled ? s * d.key_heads + key_head : key_head * sharing + s];
          one.k[i] = one.left[i] * by_k, one.q[i] = one.left[i] * by_q;
        }
      }
    }
  }

  // Behind the part, checkpoints and the sequence keep what a chunk has begun with.
  void keep_chunk(const GatedDeltaNet& d, const ChunkPart& part, const float* kq, const DeltaInner* inner, int64_t number) const {
    const int64_t tokens = (part.first + part.count) % DELTA_CHUNK, row = part.row + part.count - 1;
    const auto keep = [&](float* to) {
      for (int64_t i = 0; i < tokens; i++)
        for (int64_t h = 0; h < d.key_heads; h++) {
          const float* key = chunk_key(d, row, tokens - 1, i, h, kq, number);
          float* place = to + d.keys_at() + (i * d.key_heads + h) * d.key_size;
          if (key != place) std::copy_n(key, d.key_size, place);
        }
      for (int64_t h = 0; h < d.value_heads && tokens; h++) {
        const DeltaInner& one = inner[row * d.value_heads + h];
        float* left = to + d.left_at() + h * (DELTA_CHUNK + 1);
        std::copy_n(one.left, DELTA_CHUNK, left), left[DELTA_CHUNK] = one.decay;
      }
    };
    if (part.checkpoint) keep(part.checkpoint);
    if (part.last) keep(passages_[size_t(part.passage)].state->recurrent(number));
  }

  void mix(const GatedDeltaNet& d, const Norm& norm, int64_t number) {
    const int64_t channels = d.convolution.channels, heads = d.value_heads, width = heads * d.value_size, keys = d.key_heads * d.key_size;
    float *qkv = q_.take(m_ * channels), *z = gate_.take(m_ * width), *beta = k_.take(m_ * heads), *alpha = v_.take(m_ * heads);
    project(norm, number, {{d.qkv.weights, d.qkv.bias, qkv}, {d.z.weights, d.z.bias, z}, {d.beta.weights, d.beta.bias, beta}, {d.alpha.weights, d.alpha.bias, alpha}});
    begin_states(number);
    float* mixed = up_.take(m_ * channels);  // q, k, v
    convolve(d.convolution, qkv, channels, d.state_numbers(), number, true, mixed);
    float *kq = more_.take(m_ * 2 * keys), *out = out_.take(m_ * width);  // kq: [key heads, rows, k and then q]
    parallel_for(m_, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) {
        for (int64_t h = 0; h < d.key_heads; h++) {
          float *k = kq + (h * m_ + row) * 2 * d.key_size, *q = k + d.key_size;
          std::copy_n(mixed + row * channels + h * d.key_size, d.key_size, q);
          std::copy_n(mixed + row * channels + keys + h * d.key_size, d.key_size, k);
          kernels_.normalize_length(q, LENGTH_EPSILON, 1 / std::sqrt(float(d.key_size)), d.key_size);
          kernels_.normalize_length(k, LENGTH_EPSILON, 1, d.key_size);
        }
        for (int64_t i = row * heads, h = 0; h < heads; h++, i++)
          alpha[i] = decay(d.decay[h], softplus(alpha[i] + d.step[h])), beta[i] = float(sigmoid(beta[i]));
      }
    });
    std::vector<DeltaInner> inner(size_t(m_ * heads));
    parallel_for(m_, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) look_back(d, row, kq, alpha, number, inner.data() + row * heads);
    });
    const std::vector<ChunkPart> parts = chunk_parts(number);
    const int64_t blocks = d.value_size / 16, block_numbers = d.key_size * 16;
    parallel_for(int64_t(passages_.size()) * heads * blocks, [&](int64_t from, int64_t to) {
      for (int64_t unit = from; unit < to; unit++) {
        const int64_t passage = unit / (heads * blocks), within = unit % (heads * blocks), head = within / blocks, at = within * 16, key = d.key_head(head);
        float* state = passages_[size_t(passage)].state->recurrent(number);
        for (const ChunkPart& part : parts) {
          if (part.passage != passage) continue;
          const float* keys_of_chunk[DELTA_CHUNK];
          for (int64_t i = 0; i < DELTA_CHUNK && part.first + part.count == DELTA_CHUNK; i++) keys_of_chunk[i] = chunk_key(d, part.row, part.first, i, key, kq, number);
          kernels_.delta_rule({part.first, part.count, d.key_size, kq + (key * m_ + part.row) * 2 * d.key_size, inner.data() + part.row * heads + head,
                               beta + part.row * heads + head, heads, mixed + part.row * channels + 2 * keys + at, channels, out + part.row * width + at, width,
                               state + d.written_at() + at, width, keys_of_chunk},
                              state + within * block_numbers);
          if (!part.checkpoint) continue;
          std::copy_n(state + within * block_numbers, block_numbers, part.checkpoint + within * block_numbers);
          for (int64_t i = 0; i < (part.first + part.count) % DELTA_CHUNK; i++)
            std::copy_n(state + d.written_at() + i * width + at, 16, part.checkpoint + d.written_at() + i * width + at);
        }
      }
    }, 1);
    for (const ChunkPart& part : parts) keep_chunk(d, part, kq, inner.data(), number);
    end_states(number);
    put_out(d.output, width, number, [&](int64_t row, float* to) {
      float* made = out + row * width;
      for (int64_t h = 0; h < heads; h++) kernels_.normalize(made + h * d.value_size, d.norm, s_.epsilon, d.value_size, made + h * d.value_size);
      level_.open_gate(z + row * width, made, Gate::silu, width, to);
    });
  }

  void mix(const ShortConvolution& s, const Norm& norm, int64_t number) {
    const int64_t size = s.convolution.channels;
    float *bcx = q_.take(m_ * 3 * size), *bx = k_.take(m_ * size), *out = out_.take(m_ * size);
    project(norm, number, {{s.projection.weights, s.projection.bias, bcx}});
    begin_states(number);
    parallel_for(m_, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) {
        std::copy_n(bcx + row * 3 * size, size, bx + row * size);
        kernels_.multiply(bx + row * size, bcx + (row * 3 + 2) * size, size);
      }
    });
    convolve(s.convolution, bx, size, 0, number, false, out);
    end_states(number);
    put_out(s.output, size, number, [&](int64_t row, float* to) {
      std::copy_n(out + row * size, size, to);
      kernels_.multiply(to, bcx + (row * 3 + 1) * size, size);
    });
  }

  void mix(const Mamba2& m, const Norm& norm, int64_t number) {
    // The projection's rows are z, then x, b and c, which the convolution takes together, then the steps.
    const int64_t size = m.size(), channels = m.convolution.channels, all = size + channels + m.heads, bs = m.groups * m.state_size;
    float *zxs = q_.take(m_ * all), *mixed = up_.take(m_ * channels), *step = k_.take(m_ * m.heads), *kept = v_.take(m_ * m.heads), *out = out_.take(m_ * size);
    project(norm, number, {{m.projection.weights, m.projection.bias, zxs}});
    begin_states(number);
    convolve(m.convolution, zxs + size, all, m.state_numbers(), number, true, mixed);
    for (int64_t row = 0; row < m_; row++)
      for (int64_t i = row * m.heads, h = 0; h < m.heads; h++, i++) {
        step[i] = softplus(zxs[row * all + size + channels + h] + m.step[h]);
        kept[i] = decay(m.decay[h], step[i]);
      }
    scan_states(m.heads, m.head_size / 16, m.state_size, number, [&](float* block, int64_t head, int64_t column, int64_t row, int64_t tokens) {
      const float* b = mixed + row * channels + size + head / (m.heads / m.groups) * m.state_size;
      const int64_t at = head * m.head_size + column * 16;
      kernels_.mamba_scan({tokens, m.state_size, b, b + bs, channels, kept + row * m.heads + head, step + row * m.heads + head, m.heads,
                           mixed + row * channels + at, channels, m.skip[head], out + row * size + at, size},
                          block);
    });
    end_states(number);
    put_out(m.output, size, number, [&](int64_t row, float* to) {
      level_.open_gate(zxs + row * all, out + row * size, Gate::silu, size, to);
      const int64_t group = size / m.groups;
      for (int64_t at = 0; at < size; at += group) kernels_.normalize(to + at, m.norm + at, s_.epsilon, group, to + at);
    });
  }

  // ---- feed-forward --------------------------------------------------------------------------------------------------

  void feed_forward(const Dense& dense, const Norm& norm, int64_t number) {
    std::vector<LinearInto> products{{dense.gate.weights, dense.gate.bias, gate_.take(m_ * dense.size())}};
    std::vector<const Weights*> next{&dense.gate.weights};
    if (dense.up) {
      next.push_back(&dense.up->weights);
      products.push_back({dense.up->weights, dense.up->bias, up_.take(m_ * dense.size())});
    }
    add_and_normalize(norm, next);
    tell(number, INPUT_GATE_UP, seen_.data(), s_.hidden);
    watch_.lap(NORM);
    hidden_.multiply(products);
    adapt(number, ADAPTED_GATE, seen_.data(), dense.gate, gate_.data());
    if (dense.up) adapt(number, ADAPTED_UP, seen_.data(), *dense.up, up_.data());
    watch_.lap(GATE_UP);
    open_and_close(dense, number, added_.data());
  }

  // The second half of a feed-forward part, from gate and up.
  void open_and_close(const Dense& dense, int64_t number, float* out) {
    const int64_t size = dense.size();
    opened_.begin_for(level_, m_, size, digits_);
    if (observe_ || adapted_) seen_.take(m_ * size);
    if (!dense.up) std::fill_n(up_.take(size), size, 1.0f);
    opened_.fill({&dense.down.weights}, [&](int64_t row, float* to) {
      level_.open_gate(gate_.data() + row * size, up_.data() + (dense.up ? row * size : 0), dense.activation, size, to);
      note(row, to, size);
    });
    tell(number, INPUT_DOWN, seen_.data(), size);
    watch_.lap(GATE);
    opened_.multiply({{dense.down.weights, dense.down.bias, out}});
    adapt(number, ADAPTED_DOWN, seen_.data(), dense.down, out);
    watch_.lap(DOWN);
  }

  void mixture(const Mixture& mixture, const Norm& norm, int64_t number) {
    float *normal = normal_.take(m_ * s_.hidden), *logits = logits_.take(m_ * mixture.gate.experts);
    std::vector<const Weights*> next{&mixture.router.weights};
    std::vector<LinearInto> products{{mixture.router.weights, mixture.router.bias, logits}};
    if (mixture.shared) {
      const Dense& shared = *mixture.shared;
      next.insert(next.end(), {&shared.gate.weights, &shared.up->weights});
      products.push_back({shared.gate.weights, shared.gate.bias, gate_.take(m_ * shared.size())});
      products.push_back({shared.up->weights, shared.up->bias, up_.take(m_ * shared.size())});
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

  void both(const DenseAndMixture& parts, const Norm& norm, int64_t number) {
    const Mixture& mixture = parts.mixture;
    feed_forward(parts.dense, norm, number);  // x has taken in the mixer's output, and `added_` is what the dense part gives
    float *normal = normal_.take(m_ * s_.hidden), *more = more_.take(m_ * s_.hidden), *logits = logits_.take(m_ * mixture.gate.experts);
    if (observe_) seen_.take(m_ * s_.hidden);
    hidden_.fill({&mixture.router.weights}, [&](int64_t row, float* to) {
      normalize(row, {parts.mixture_norm, nullptr, false, false}, normal + row * s_.hidden);
      normalize(row, {parts.router_norm, nullptr, false, false}, to);
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
    add_and_normalize({}, {&input.gate.weights});
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
  const std::deque<Adapter>& adapters_;
  bool adapted_ = false;  // some passage has one
  Scratch seen_;
  Stopwatch watch_;
};

}  // namespace

void Decoder::run(float* x, const float* layer_inputs, const std::vector<Passage>& passages, int digits, int64_t first, int64_t last, const Observe& observe) const {
  Pass pass(level_, kernels_, shape_, ropes_, passages, adapters_, digits, x, seconds_, observe);
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

void Decoder::normalize(const float* x, int64_t m, const Norm& norm, float* out) const {
  for (int64_t row = 0; row < m; row++) apply(kernels_, norm, shape_, x + row * shape_.hidden, out + row * shape_.hidden);
}

void Decoder::finish(const float* x, int64_t m, const Norm& norm, const Matrix& head, int digits, float* out) const {
  Stopwatch watch(seconds_);
  const auto prepare = [&](Rows& rows) {
    rows.fill({&head.weights}, [&](int64_t row, float* to) { apply(kernels_, norm, shape_, x + row * shape_.hidden, to); });
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
