// What a sequence keeps between passes, layer by layer. Attention layers keep keys and values: of all positions, or in a ring of those that a window
// still sees. Recurrent layers keep a state of fixed size: that of the last position, and of checkpoints, as it cannot be cut back.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "decoder/kernel_table.h"

namespace billfish {

// Rows of a pass that a ring always has room for beside its window.
constexpr int64_t RING_ROWS = 256;

// A checkpoint is made after each of so many positions, and where a message ends; of those that would take more memory than this, few are kept.
constexpr int64_t CHECKPOINT_EVERY = 64;
constexpr size_t CHECKPOINT_BYTES = size_t(1) << 28;
constexpr size_t LEAST_CHECKPOINTS = 4;

// What a layer keeps. A layer without keys of its own has no heads, and one without a recurrent state no numbers.
struct StateShape {
  int64_t kv_heads, head_size;
  int64_t window;   // positions that a row sees, its own the last; 0: all
  int64_t numbers;  // of a recurrent state: of all heads, then the last inputs of its convolution
};

// Keys and values of one layer, in memory of its SequenceState.
class KeysAndValues {
 public:
  KeysAndValues(const StateShape& shape, CacheType type) : shape_(shape), type_(type) {}

  // [kv_heads, positions / 64, 64 / 16, head_size, 16] keys and [kv_heads, positions / 64, head_size / 16, 64, 16] values where they are floats; int8
  // has [kv_heads, positions / 64] blocks, see decoder/attention_int8.h.
  HeadCache head(int64_t head) const {
    const size_t at = size_t(head) * head_bytes(positions_);
    return {keys_ + at, values_ + at, type_, positions_};
  }
  const StateShape& shape() const { return shape_; }
  int64_t positions() const { return positions_; }
  size_t bytes(int64_t positions) const { return 2 * size_t(shape_.kv_heads) * head_bytes(positions); }
  // Whether a sequence can go on behind its first `length` positions: all that row `length` sees are there.
  bool holds(int64_t length) const { return shape_.window == 0 || std::max<int64_t>(0, length - shape_.window + 1) >= oldest_; }

  // Positions that there must be room for, so that `count` rows can come in one pass, in a sequence of at most `capacity`.
  int64_t room(int64_t count, int64_t capacity) const {
    const int64_t most = shape_.window ? std::min(capacity, shape_.window + std::max(count, RING_ROWS)) : capacity;
    return std::max(positions_, (most + CACHE_BLOCK - 1) / CACHE_BLOCK * CACHE_BLOCK);
  }

  // Rows [start, start + count) are about to come.
  void expect(int64_t start, int64_t count) {
    if (start == 0) oldest_ = 0;
    oldest_ = std::max(oldest_, start + count - positions_);
  }

  // Be at `memory` from now on, with room for `positions`, and hold what `from` holds before `end`.
  void take(char* memory, int64_t positions, const KeysAndValues& from, int64_t end) {
    char *keys = memory, *values = memory + bytes(positions) / 2;
    const size_t block = head_bytes(CACHE_BLOCK);
    const int64_t last = (end + CACHE_BLOCK - 1) / CACHE_BLOCK, first = std::max<int64_t>(0, last - std::min(positions, from.positions_) / CACHE_BLOCK);
    for (int64_t head = 0; head < shape_.kv_heads; head++)
      for (int64_t b = first; b < last; b++) {
        const size_t to = size_t(head) * head_bytes(positions) + size_t(b % (positions / CACHE_BLOCK)) * block;
        const size_t at = size_t(head) * head_bytes(from.positions_) + size_t(b % (from.positions_ / CACHE_BLOCK)) * block;
        std::memcpy(keys + to, from.keys_ + at, block), std::memcpy(values + to, from.values_ + at, block);
      }
    keys_ = keys, values_ = values, positions_ = positions, oldest_ = std::max<int64_t>(from.oldest_, end - positions);
  }

 private:
  size_t head_bytes(int64_t positions) const { return billfish::head_bytes(type_, shape_.head_size, positions); }

  StateShape shape_;
  CacheType type_;
  int64_t positions_ = 0;  // a multiple of CACHE_BLOCK
  int64_t oldest_ = 0;     // the first position that is still there
  char *keys_ = nullptr, *values_ = nullptr;
};

// Zeros, which cost nothing until they are touched, in huge pages where there are many. They begin with a cache line: a vector of 64 bytes that lies in
// two lines takes twice as long to load.
class Zeros {
 public:
  Zeros() = default;
  explicit Zeros(size_t bytes) : made_(static_cast<char*>(std::calloc(bytes + LINE, 1))) {
    if (!made_) throw std::bad_alloc();
    first_ = made_.get() + LINE - reinterpret_cast<uintptr_t>(made_.get()) % LINE;
#if defined(__linux__)
    constexpr size_t PAGE = 4096, LARGE = 1 << 22;
    const size_t offset = PAGE - reinterpret_cast<uintptr_t>(first_) % PAGE;
    if (bytes >= LARGE) madvise(first_ + offset, bytes - offset, MADV_HUGEPAGE);  // only advice: whatever it returns
#endif
  }
  char* data() const { return first_; }

 private:
  static constexpr size_t LINE = 64;
  struct Free {
    void operator()(char* bytes) const { std::free(bytes); }
  };
  std::unique_ptr<char[], Free> made_;
  char* first_ = nullptr;
};

// The recurrent states of all layers behind some position, one after the other.
struct Checkpoint {
  Checkpoint(int64_t at, bool end, size_t count) : position(at), message_end(end), memory(count * sizeof(float)) {}
  float* numbers() const { return reinterpret_cast<float*>(memory.data()); }
  int64_t position;
  bool message_end;
  Zeros memory;
};

// One sequence. Layers are those of the decoder. Keys and values of all lie in one piece of memory: large ones are made of huge pages.
class SequenceState {
 public:
  SequenceState(const std::vector<StateShape>& shapes, CacheType type, int64_t capacity) : type_(type) {
    for (const StateShape& shape : shapes) {
      layers_.emplace_back(shape, type);
      offsets_.push_back(int64_t(numbers_.size()));
      numbers_.resize(numbers_.size() + size_t(shape.numbers));
      positions_.push_back(0);
    }
    reserve(0, 0, capacity, {});
  }
  SequenceState(const SequenceState&) = delete;
  SequenceState& operator=(const SequenceState&) = delete;

  // The decoder's adapter whose keys and values these are; less than 0: none.
  int adapter = -1;

  CacheType type() const { return type_; }
  int64_t capacity() const { return capacity_; }
  size_t bytes() const { return bytes_ + numbers_.size() * sizeof(float); }  // without checkpoints
  size_t checkpoints() const { return checkpoints_.size(); }
  const KeysAndValues& layer(int64_t number) const { return layers_[size_t(number)]; }

  // Room for rows [start, start + count), which come in one pass behind those that are there, and for `capacity` positions in all. Recurrent states
  // become those behind `start` positions, and checkpoints are prepared for the rows; message_ends are positions that another message follows. The
  // last `drafted` rows may be taken back, until the next call. What is raised leaves all positions before `start` as they were.
  void reserve(int64_t start, int64_t count, int64_t capacity, const std::vector<int64_t>& message_ends, int64_t drafted = 0) {
    hold(*this, start, count, std::max(capacity, start + count));
    for (KeysAndValues& layer : layers_) layer.expect(start, count);
    if (numbers_.empty()) return;
    if (!is_at(start)) restore(*this, start);
    forget_behind(start);
    keep_drafts(start);
    expect_drafts(start + count - drafted, drafted);
    for (int64_t position = start + 1; position <= start + count; position++) {
      const bool end = std::find(message_ends.begin(), message_ends.end(), position) != message_ends.end();
      const bool has_draft = position >= start + count - drafted && position < start + count;
      if (!has_draft && (end || position % CHECKPOINT_EVERY == 0)) add_checkpoint(std::make_shared<Checkpoint>(position, end, numbers_.size()));
    }
  }

  // The first `length` positions of another sequence, where they are restorable.
  void copy(const SequenceState& other, int64_t length) {
    hold(other, length, 0, length);
    if (numbers_.empty()) return;
    checkpoints_ = other.checkpoints_;
    if (other.is_at(length)) numbers_ = other.numbers_, positions_.assign(positions_.size(), length);
    else restore(other, length);
    forget_behind(length);
  }

  // The longest beginning of the sequence, up to `length` positions, that it can go on behind.
  int64_t restorable(int64_t length) const {
    const auto holds = [&](int64_t position) {
      return std::all_of(layers_.begin(), layers_.end(), [&](const KeysAndValues& layer) { return layer.holds(position); });
    };
    if (numbers_.empty() || is_at(length)) return holds(length) ? length : 0;
    int64_t longest = 0;
    for (const auto* all : {&checkpoints_, &drafts_})
      for (const auto& each : *all)
        if (each->position > longest && each->position <= length && holds(each->position)) longest = each->position;
    return longest;
  }

  // ---- for a pass: the recurrent state of a layer ------------------------------------------------------------------------

  float* recurrent(int64_t layer) const { return const_cast<float*>(numbers_.data()) + offsets_[size_t(layer)]; }

  // Where the layer's state goes behind rows of a pass: (row, place), in their order.
  std::vector<std::pair<int64_t, float*>> checkpoints(int64_t layer, int64_t start, int64_t count) const {
    std::vector<std::pair<int64_t, float*>> places;
    for (const auto* all : {&checkpoints_, &drafts_})
      for (const std::shared_ptr<Checkpoint>& each : *all)
        if (each->position > start && each->position <= start + count) places.push_back({each->position - start, each->numbers() + offsets_[size_t(layer)]});
    std::sort(places.begin(), places.end());
    return places;
  }

  // The layer's state is that behind so many positions; while it changes, behind none.
  static constexpr int64_t CHANGING = -1;
  void set_position(int64_t layer, int64_t position) const { positions_[size_t(layer)] = position; }

 private:
  bool is_at(int64_t position) const {
    for (size_t i = 0; i < layers_.size(); i++)
      if (layers_[i].shape().numbers && positions_[i] != position) return false;
    return true;
  }

  void restore(const SequenceState& from, int64_t position) {
    if (position == 0) std::fill(numbers_.begin(), numbers_.end(), 0.0f);
    else {
      const Checkpoint* found = nullptr;
      for (const auto* all : {&from.checkpoints_, &from.drafts_})
        for (const auto& each : *all)
          if (each->position == position) found = each.get();
      if (!found) throw std::invalid_argument("a recurrent state can only go back to a checkpoint");
      std::copy_n(found->numbers(), numbers_.size(), numbers_.begin());
    }
    positions_.assign(positions_.size(), position);
  }

  void forget_behind(int64_t position) {
    checkpoints_.erase(std::remove_if(checkpoints_.begin(), checkpoints_.end(), [&](const auto& each) { return each->position > position; }), checkpoints_.end());
  }

  // Rows up to `end` were right: where there would be a checkpoint, that of a draft becomes one.
  void keep_drafts(int64_t end) {
    for (auto each = drafts_.begin(); each != drafts_.end();) {
      const int64_t position = (*each)->position;
      if (position <= 0 || position > end || position % CHECKPOINT_EVERY) ++each;
      else add_checkpoint(std::move(*each)), each = drafts_.erase(each);
    }
  }

  // Checkpoints behind `first`, `first` + 1, ... positions, in memory that the drafts before had.
  void expect_drafts(int64_t first, int64_t count) {
    while (int64_t(drafts_.size()) < count) drafts_.push_back(std::make_shared<Checkpoint>(NOWHERE, false, numbers_.size()));
    for (int64_t i = 0; i < int64_t(drafts_.size()); i++) drafts_[size_t(i)]->position = i < count ? first + i : NOWHERE;
  }

  // Of too many, one goes whose gap, if it is gone, is small beside its distance from the end: prompts part near their ends, so checkpoints are the
  // denser, the later they are. Ends of messages, where prompts part most often, count four times.
  void add_checkpoint(std::shared_ptr<Checkpoint> made) {
    const size_t most = std::max(LEAST_CHECKPOINTS, CHECKPOINT_BYTES / (numbers_.size() * sizeof(float)));
    const int64_t position = made->position;
    checkpoints_.push_back(std::move(made));
    if (checkpoints_.size() <= most) return;
    size_t worst = 0;
    double least = INFINITY;
    for (size_t i = 0; i + 1 < checkpoints_.size(); i++) {
      const Checkpoint& each = *checkpoints_[i];
      const int64_t gap = checkpoints_[i + 1]->position - (i ? checkpoints_[i - 1]->position : 0);
      const double loss = double(gap * (each.message_end ? 4 : 1)) / double(position - each.position + CHECKPOINT_EVERY);
      if (loss < least) worst = i, least = loss;
    }
    checkpoints_.erase(checkpoints_.begin() + int64_t(worst));
  }

  // Hold what `from` holds before `end`, with room for `count` rows and `capacity` positions.
  void hold(const SequenceState& from, int64_t end, int64_t count, int64_t capacity) {
    capacity = std::max(capacity_, (capacity + CACHE_BLOCK - 1) / CACHE_BLOCK * CACHE_BLOCK);
    std::vector<int64_t> rooms;
    size_t bytes = 0;
    for (size_t i = 0; i < layers_.size(); i++) {
      const int64_t ring = layers_[i].shape().window ? from.layers_[i].positions() : 0;
      rooms.push_back(std::max(layers_[i].room(count, capacity), ring));
      bytes += layers_[i].bytes(rooms.back());
    }
    if (&from == this && bytes == bytes_) {
      capacity_ = capacity;
      return;
    }
    Zeros fresh = bytes == bytes_ ? Zeros() : Zeros(bytes);  // what lies behind the last position is multiplied with zero
    char* at = fresh.data() ? fresh.data() : memory_.data();
    for (size_t i = 0; i < layers_.size(); i++) {
      layers_[i].take(at, rooms[i], from.layers_[i], end);
      at += layers_[i].bytes(rooms[i]);
    }
    if (fresh.data()) memory_ = std::move(fresh);
    bytes_ = bytes, capacity_ = capacity;
  }

  CacheType type_;
  int64_t capacity_ = 0;
  size_t bytes_ = 0;
  Zeros memory_;
  std::vector<KeysAndValues> layers_;
  std::vector<float> numbers_;                 // the recurrent states of all layers
  std::vector<int64_t> offsets_;               // where each begins
  mutable std::vector<int64_t> positions_;     // that each is behind of
  std::vector<std::shared_ptr<Checkpoint>> checkpoints_;  // in order; sequences with a common beginning share them
  static constexpr int64_t NOWHERE = -1;
  std::vector<std::shared_ptr<Checkpoint>> drafts_;  // behind rows of the last pass that may be taken back
};

}  // namespace billfish
