// Where each of many strings is.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace billfish {

// SipHash-1-3. Its key is random, so that nobody can write a file whose strings all have the same hash.
class SipHash {
 public:
  SipHash() {
    std::random_device random;
    for (uint64_t& key : keys_) key = uint64_t(random()) << 32 ^ random();
  }
  SipHash(uint64_t first, uint64_t second) : keys_{first, second} {}

  uint64_t operator()(std::string_view string) const {
    uint64_t v[4] = {keys_[0] ^ 0x736f6d6570736575, keys_[1] ^ 0x646f72616e646f6d, keys_[0] ^ 0x6c7967656e657261, keys_[1] ^ 0x7465646279746573};
    size_t i = 0;
    for (; i + 8 <= string.size(); i += 8) take(v, word_of(string.substr(i, 8)));
    take(v, word_of(string.substr(i)) | uint64_t(string.size()) << 56);
    v[2] ^= 0xff;
    for (int round = 0; round < 3; round++) mix(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
  }

 private:
  static uint64_t word_of(std::string_view bytes) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data(), bytes.size());
    return word;
  }
  static uint64_t rotated(uint64_t x, int by) { return x << by | x >> (64 - by); }
  static void mix(uint64_t* v) {
    v[0] += v[1], v[1] = rotated(v[1], 13) ^ v[0], v[0] = rotated(v[0], 32);
    v[2] += v[3], v[3] = rotated(v[3], 16) ^ v[2];
    v[0] += v[3], v[3] = rotated(v[3], 21) ^ v[0];
    v[2] += v[1], v[1] = rotated(v[1], 17) ^ v[2], v[2] = rotated(v[2], 32);
  }
  static void take(uint64_t* v, uint64_t word) {
    v[3] ^= word;
    mix(v);
    v[0] ^= word;
  }

  uint64_t keys_[2];
};

class StringTable {
 public:
  // Of equal strings the last counts. What is no string is never found.
  explicit StringTable(std::vector<std::optional<std::string>> strings) : strings_(std::move(strings)) {
    size_t size = 16;
    while (size < 2 * strings_.size()) size *= 2;
    slots_.resize(size);
    for (size_t i = 0; i < strings_.size(); i++) {
      if (!strings_[i]) continue;
      const uint64_t hash = hash_(*strings_[i]);
      slots_[slot_of(*strings_[i], hash)] = {uint32_t(hash >> 32), int32_t(i)};
    }
  }

  // The number of a string, or -1.
  int32_t find(std::string_view string) const { return slots_[slot_of(string, hash_(string))].at; }
  const std::string& operator[](int32_t at) const { return *strings_[size_t(at)]; }

 private:
  struct Slot {
    uint32_t hash = 0;
    int32_t at = -1;  // nothing is here
  };

  // Where a string is, or the empty slot where it would be.
  size_t slot_of(std::string_view string, uint64_t hash) const {
    for (size_t i = hash;; i++) {
      const Slot& slot = slots_[i & (slots_.size() - 1)];
      if (slot.at < 0 || (slot.hash == uint32_t(hash >> 32) && *strings_[size_t(slot.at)] == string)) return i & (slots_.size() - 1);
    }
  }

  SipHash hash_;
  std::vector<std::optional<std::string>> strings_;
  std::vector<Slot> slots_;
};

}  // namespace billfish
