// What a compiled kernel sees of the emulator. Kernels are compiled without any system header, so neither this file nor
// the shim may include one; plain C types are used throughout.
#pragma once

#define EMULATOR_CONVERGENT __attribute__((convergent, noinline, nomerge))
#define EMULATOR_UNSEEN __attribute__((no_sanitize("thread")))  // its accesses are reported by hand, not by the compiler
#define EMULATOR_SITE __builtin_return_address(0)               // where in the kernel a function of the shim was called

namespace emulator {

constexpr unsigned simd_width = 32, max_threads = 1024;

struct Uint3 {
  unsigned x, y, z;
};

// Where a thread is.
struct Position {
  Uint3 in_grid, in_threadgroup;
  unsigned index, lane, simdgroup;  // in the threadgroup, in the simdgroup, of the simdgroup
};

// What all threads of a threadgroup have in common.
struct Dispatch {
  Uint3 grid, threadgroups, threads_per_threadgroup;  // the last is smaller at the edge of the grid
  Uint3 threadgroup_position;                         // of the one that runs
  unsigned threads, simdgroups;
};

extern const Position* position;  // of the running thread
extern Dispatch dispatch;

enum MemoryFlags { no_memory = 0, device_memory = 1, threadgroup_memory = 2 };

EMULATOR_CONVERGENT void threadgroup_barrier(int flags, const void* site);
EMULATOR_CONVERGENT void simdgroup_barrier(int flags, const void* site);
void device_fence(bool acquire, bool release);

// The operands that the lanes of a simdgroup brought to one operation.
struct Exchange {
  alignas(16) unsigned char bytes[simd_width][64];
  unsigned lanes;  // a bit for each lane that took part; lanes that have returned from the kernel do not

  template <class T> EMULATOR_UNSEEN T get(unsigned lane) const {
    T value;
    __builtin_memcpy(&value, bytes[lane], sizeof(T));
    return value;
  }
  EMULATOR_UNSEEN bool has(unsigned lane) const { return lane < simd_width && (lanes >> lane & 1); }
};

// Waits until every lane of the simdgroup has come to the same call, and returns what they brought.
EMULATOR_CONVERGENT const Exchange& exchange(const char* operation, const void* value, unsigned size, const void* site);
[[noreturn]] void report_non_uniform(const char* operation, const char* argument, const void* site);
[[noreturn]] void report_inactive_lane(const char* operation, unsigned lane, const void* site);

// Memory accesses that the shim makes itself, in instrumented builds; the others are reported by the compiler.
#if defined(EMULATOR_INSTRUMENTED) || defined(EMULATOR_RUNTIME)
void reading(const void* address, unsigned size, const void* site);
void writing(const void* address, unsigned size, const void* site);
#else
inline void reading(const void*, unsigned, const void*) {}
inline void writing(const void*, unsigned, const void*) {}
#endif
void atomic_access(const volatile void* address, unsigned size, bool reads, bool writes, const void* site);
void count_matrix_multiply();

// A variable in threadgroup memory. The kernel's library holds one record for each, in a section of its own.
struct Variable {
  const char* name;
  void* address;
  unsigned long size;
};

#ifdef EMULATOR_INSTRUMENTED
constexpr unsigned long redzone = 65536;  // more than all of threadgroup memory: no index error reaches the next array
#else
constexpr unsigned long redzone = 16;
#endif

template <class T> struct alignas(32) Storage {
  char before[redzone];
  T value;
  char after[redzone];
};

}  // namespace emulator
