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

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "decoder/kernel_table.h"

namespace billfish {

// Rows of a pass that a ring always has room for beside its window.
constexpr int64_t RING_ROWS = 256;

// What a layer keeps. A layer without keys of its own has no heads.
struct StateShape {
  int64_t kv_heads, head_size;
  int64_t window;  // positions that a row sees, its own the last; 0: all
};

// Keys and values of one layer, in memory of its SequenceState.
class KeysAndValues {
 public:
  KeysAndValues(const StateShape& shape, bool half) : shape_(shape), half_(half) {}

  // [kv_heads, positions / 64, 64 / 16, head_size, 16] keys and [kv_heads, positions / 64, head_size / 16, 64, 16] values, float32 or float16.
  HeadCache head(int64_t head) const {
    const size_t at = size_t(head) * head_bytes(positions_);
    return {keys_ + at, values_ + at, half_, positions_};
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
  size_t head_bytes(int64_t positions) const { return size_t(positions * shape_.head_size) * (half_ ? 2 : 4); }

  StateShape shape_;
  bool half_;
  int64_t positions_ = 0;  // a multiple of CACHE_BLOCK
  int64_t oldest_ = 0;     // the first position that is still there
  char *keys_ = nullptr, *values_ = nullptr;
};

// One sequence. Layers are those of the decoder. All lie in one piece of memory: large ones are made of huge pages.
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
  size_t bytes() const { return bytes_; }
  const KeysAndValues& layer(int64_t number) const { return layers_[size_t(number)]; }

  // Room for rows [start, start + count), which come in one pass behind those that are there, and for `capacity` positions in all. What is raised
  // leaves all as it was.
  void reserve(int64_t start, int64_t count, int64_t capacity) {
    hold(*this, start, count, std::max(capacity, start + count));
    for (KeysAndValues& layer : layers_) layer.expect(start, count);
  }

  // The first `length` positions of another sequence.
  void copy(const SequenceState& other, int64_t length) { hold(other, length, 0, length); }

  // The longest beginning of the sequence, up to `length` positions, that it can go on behind: all of it, or nothing.
  int64_t restorable(int64_t length) const {
    for (const KeysAndValues& layer : layers_)
      if (!layer.holds(length)) return 0;
    return length;
  }

 private:
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
    Bytes fresh = bytes == bytes_ ? nullptr : zeros(bytes);
    char* at = fresh ? fresh.get() : memory_.get();
    for (size_t i = 0; i < layers_.size(); i++) {
      layers_[i].take(at, rooms[i], from.layers_[i], end);
      at += layers_[i].bytes(rooms[i]);
    }
    if (fresh) memory_ = std::move(fresh);
    bytes_ = bytes, capacity_ = capacity;
  }

  struct Free {
    void operator()(char* bytes) const { std::free(bytes); }
  };
  using Bytes = std::unique_ptr<char[], Free>;

  // Zeros, which cost nothing until they are touched: what lies behind the last position is multiplied with zero.
  static Bytes zeros(size_t bytes) {
    char* made = static_cast<char*>(std::calloc(std::max<size_t>(bytes, 1), 1));
    if (!made) throw std::bad_alloc();
#if defined(__linux__)
    constexpr size_t PAGE = 4096, LARGE = 1 << 22;
    const size_t offset = PAGE - reinterpret_cast<uintptr_t>(made) % PAGE;
    if (bytes >= LARGE) madvise(made + offset, bytes - offset, MADV_HUGEPAGE);  // only advice: whatever it returns
#endif
    return Bytes(made);
  }

  bool half_;
  int64_t capacity_ = 0;
  size_t bytes_ = 0;
  Bytes memory_;
  std::vector<KeysAndValues> layers_;
};

}  // namespace billfish
