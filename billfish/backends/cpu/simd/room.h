// Room for floats, for which kernels do not use std::vector.
//
// Functions of std::vector that are not inlined are weak symbols with the same name in every level, and of these the linker keeps one for
// all: perhaps that with AVX-512, which then runs on machines without. Hidden visibility does not help inside one library. What is in
// a level's namespace is the level's own; tests/backends/cpu/test_levels.py looks at the object files for anything else.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>

namespace BILLFISH_ISA {

class Room {
 public:
  Room() = default;
  ~Room() { give_back(); }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  // For `count` floats, with anything in them. It stays where it is until more is asked for, or less is to be kept.
  float* take(int64_t count) {
    if (count > count_) {
      give_back();
      floats_ = new (LINE) float[size_t(count)];
      count_ = count;
    }
    return floats_;
  }

  void keep_at_most(size_t bytes) {
    if (size_t(count_) * sizeof(float) > bytes) give_back();
  }

 private:
  // A vector of AVX-512 is a whole line: any other place would put each of them into two.
  static constexpr std::align_val_t LINE{64};

  void give_back() {
    ::operator delete[](floats_, LINE);
    floats_ = nullptr, count_ = 0;
  }

  float* floats_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace BILLFISH_ISA
