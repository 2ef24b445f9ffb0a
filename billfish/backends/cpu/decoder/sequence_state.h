// What a sequence keeps between passes, layer by layer. Attention layers keep keys and values: of all positions, or in a ring of those that a window
// still sees. Mixers with a recurrent state will keep it here, too.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "decoder/kernel_table.h"

namespace billfish {

// Rows of a pass that a ring always has room for beside its window.
constexpr int64_t RING_ROWS = 256;

// What a layer keeps. A layer without keys of its own has no heads.
struct StateShape {
  int64_t kv_heads, head_size;
  int64_t window;  // positions that a row sees, its own the last; 0: all
};

class KeysAndValues {
 public:
  KeysAndValues(const StateShape& shape, bool half) : shape_(shape), half_(half) {}

  // [kv_heads, positions / 64, 64 / 16, head_size, 16] keys and [kv_heads, positions / 64, head_size / 16, 64, 16] values, float32 or float16.
  HeadCache head(int64_t head) const {
    const size_t at = size_t(head) * head_bytes(positions_);
    return {keys_.get() + at, values_.get() + at, half_, positions_};
  }
  const StateShape& shape() const { return shape_; }
  int64_t positions() const { return positions_; }
  size_t bytes() const { return 2 * size_t(shape_.kv_heads) * head_bytes(positions_); }
  // Whether a sequence of this layer can go on behind its first `length` positions: all that row `length` sees are there.
  bool holds(int64_t length) const { return shape_.window == 0 || std::max<int64_t>(0, length - shape_.window + 1) >= oldest_; }

  // Room for rows [start, start + count), which come in one pass behind those that are there, in a sequence of at most `capacity` positions.
  void reserve(int64_t start, int64_t count, int64_t capacity) {
    const int64_t wanted = room(count, capacity);
    if (wanted > positions_) move_to(wanted, *this, start);
    if (start == 0) oldest_ = 0;
    oldest_ = std::max(oldest_, start + count - positions_);
  }

  // The first `length` positions of another sequence.
  void copy(const KeysAndValues& other, int64_t length, int64_t capacity) {
    const int64_t wanted = std::max(positions_, shape_.window ? other.positions_ : room(0, std::max(capacity, length)));
    move_to(wanted, other, length);
    oldest_ = std::max<int64_t>(0, std::max(other.oldest_, length - positions_));
  }

 private:
  struct Free {
    void operator()(char* bytes) const { std::free(bytes); }
  };
  using Bytes = std::unique_ptr<char[], Free>;

  int64_t room(int64_t count, int64_t capacity) const {
    const int64_t most = shape_.window ? std::min(capacity, shape_.window + std::max(count, RING_ROWS)) : capacity;
    return (most + CACHE_BLOCK - 1) / CACHE_BLOCK * CACHE_BLOCK;
  }
  size_t head_bytes(int64_t positions) const { return size_t(positions * shape_.head_size) * (half_ ? 2 : 4); }

  // Zeros, which cost nothing until they are touched: what lies behind the last position is multiplied with zero.
  static Bytes zeros(size_t bytes) {
    char* made = static_cast<char*>(std::calloc(std::max<size_t>(bytes, 1), 1));
    if (!made) throw std::bad_alloc();
    return Bytes(made);
  }

  // Memory for `positions`, with the blocks of `from` that hold what comes before `end`.
  void move_to(int64_t positions, const KeysAndValues& from, int64_t end) {
    const size_t bytes = size_t(shape_.kv_heads) * head_bytes(positions), block = head_bytes(CACHE_BLOCK);
    const bool fresh = positions != positions_ || &from == this;
    Bytes keys = fresh ? zeros(bytes) : nullptr, values = fresh ? zeros(bytes) : nullptr;
    char *to_keys = fresh ? keys.get() : keys_.get(), *to_values = fresh ? values.get() : values_.get();
    const int64_t last = (end + CACHE_BLOCK - 1) / CACHE_BLOCK;
    const int64_t first = std::max<int64_t>(0, last - std::min(positions, from.positions_) / CACHE_BLOCK);
    for (int64_t head = 0; head < shape_.kv_heads; head++)
      for (int64_t b = first; b < last; b++) {
        const size_t to = size_t(head) * head_bytes(positions) + size_t(b % (positions / CACHE_BLOCK)) * block;
        const size_t at = size_t(head) * head_bytes(from.positions_) + size_t(b % (from.positions_ / CACHE_BLOCK)) * block;
        std::memcpy(to_keys + to, from.keys_.get() + at, block), std::memcpy(to_values + to, from.values_.get() + at, block);
      }
    if (fresh) keys_ = std::move(keys), values_ = std::move(values), positions_ = positions;
  }

  StateShape shape_;
  bool half_;
  int64_t positions_ = 0;  // a multiple of CACHE_BLOCK
  int64_t oldest_ = 0;     // the first position that is still there
  Bytes keys_, values_;
};

// One sequence. Layers are those of the decoder.
class SequenceState {
 public:
  SequenceState(const std::vector<StateShape>& shapes, bool half, int64_t capacity) : half_(half) {
    for (const StateShape& shape : shapes) layers_.emplace_back(shape, half);
    reserve(0, 0, capacity);
  }
  SequenceState(const SequenceState&) = delete;
  SequenceState& operator=(const SequenceState&) = delete;

  bool half() const { return half_; }
  int64_t capacity() const { return capacity_; }
  const KeysAndValues& layer(int64_t number) const { return layers_[size_t(number)]; }

  size_t bytes() const {
    size_t all = 0;
    for (const KeysAndValues& layer : layers_) all += layer.bytes();
    return all;
  }

  // See KeysAndValues. What is raised leaves all positions before `start` as they were.
  void reserve(int64_t start, int64_t count, int64_t capacity) {
    const int64_t most = std::max(capacity_, (std::max(capacity, start + count) + CACHE_BLOCK - 1) / CACHE_BLOCK * CACHE_BLOCK);
    for (KeysAndValues& layer : layers_) layer.reserve(start, count, most);
    capacity_ = most;
  }

  void copy(const SequenceState& other, int64_t length) {
    const int64_t most = std::max(capacity_, (length + CACHE_BLOCK - 1) / CACHE_BLOCK * CACHE_BLOCK);
    for (size_t i = 0; i < layers_.size(); i++) layers_[i].copy(other.layers_[i], length, most);
    capacity_ = most;
  }

  // The longest beginning of the sequence, up to `length` positions, that it can go on behind: all of it, or nothing.
  int64_t restorable(int64_t length) const {
    for (const KeysAndValues& layer : layers_)
      if (!layer.holds(length)) return 0;
    return length;
  }

 private:
  bool half_;
  int64_t capacity_ = 0;
  std::vector<KeysAndValues> layers_;
};

}  // namespace billfish
