// Threads of a kernel as fibers: each has a stack, and runs until it waits for others.
#pragma once
#include "emulator.h"

namespace emulator {

enum class State : unsigned char { ready, at_simdgroup, at_threadgroup, returned };

struct Thread {
  void* stack_pointer;
  State state;
  unsigned awaited;       // the count of operations that ends its wait
  unsigned operations;    // simdgroup operations so far; its parity says which of two buffers is in use
  const char* operation;  // what it waits in
  const void* site;       // and where in the kernel
  Position position;
};

struct Simdgroup {
  unsigned alive, arrived, completed;
  unsigned lanes;  // a bit for each lane that it has; fewer than 32 at the end of a threadgroup
  const char* operation;
  const void* site;
  Exchange buffers[2];
};

struct Threadgroup {
  Thread threads[max_threads];
  Simdgroup simdgroups[max_threads / simd_width];
  unsigned alive, arrived, completed;
  const void* site;
};

extern Threadgroup group;
extern Thread* self;  // null while no kernel code runs

typedef void (*Kernel)(void** arguments);
enum Order { forward, reverse, random_order };

// Runs all threads of the threadgroup that `dispatch` describes; `first` is the position of its first thread in the grid.
void run_threadgroup(Kernel kernel, void** arguments, Uint3 first, Order order);
void seed(unsigned long value);
unsigned random_below(unsigned bound);

// Leaves the running thread for good and makes run_threadgroup return.
[[noreturn]] void abandon();

bool on_stack(unsigned long address);
bool allocate_stacks();

}  // namespace emulator
