// The floating-point mode of a thread, on which no result may depend.
#pragma once
#include <cstdint>

namespace billfish {

// While it lives, this thread keeps subnormal numbers, rounds to the nearest and traps nothing, whatever it was told to: torch, for one,
// has set_flush_denormal(), and scales of nvfp4 and kernels of NEON are subnormals. Threads inherit the mode of whoever starts them.
// Compilers know nothing of modes: arithmetic belongs into a function that is called, or its numbers must come from memory.
class KnownFloats {
 public:
  KnownFloats() : before_(read()) {
    if ((before_ & ~FLAGS) != KNOWN) write(KNOWN);
  }
  ~KnownFloats() {
    if ((before_ & ~FLAGS) != KNOWN) write(before_);
  }
  KnownFloats(const KnownFloats&) = delete;
  KnownFloats& operator=(const KnownFloats&) = delete;

 private:
#if defined(__x86_64__)
  using Mode = uint32_t;  // MXCSR: what has happened in bits 0..5, what traps nothing in 7..12; flushing in 6 and 15, rounding in 13 and 14
  static constexpr Mode FLAGS = 0x3f, KNOWN = 0x1f80;
  static Mode read() {
    Mode mode;
    asm volatile("stmxcsr %0" : "=m"(mode) : : "memory");
    return mode;
  }
  static void write(Mode mode) { asm volatile("ldmxcsr %0" : : "m"(mode) : "memory"); }
#elif defined(__aarch64__)
  using Mode = uint64_t;  // FPCR: flushing in bits 24, 19 and 0, rounding in 22 and 23, one NaN for all in 25; every bit is 0 by default
  static constexpr Mode FLAGS = 0, KNOWN = 0;
  static Mode read() {
    Mode mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
    return mode;
  }
  static void write(Mode mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
  using Mode = int;
  static constexpr Mode FLAGS = 0, KNOWN = 0;
  static Mode read() { return KNOWN; }
  static void write(Mode) {}
#endif

  const Mode before_;
};

}  // namespace billfish
