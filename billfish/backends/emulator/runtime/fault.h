// A fault found in a kernel, as the Python side reads it (runtime.py has the same fields).
#pragma once
#include "emulator.h"

namespace emulator {

enum FaultKind {
  no_fault,
  race,                 // two threads of a threadgroup, one of them writing, no barrier between
  cross_threadgroup,    // the same across threadgroups, without release and acquire
  out_of_bounds,
  uninitialised,
  read_only,            // a write to an input
  misaligned,
  divergent_barrier,
  divergent_simdgroup,  // lanes at different simdgroup operations, or some lanes missing
  non_uniform,          // an argument that must be the same in all lanes
  endless,              // waits for what only another threadgroup could do
  stack_overflow,
};

// One of the two parties of a fault.
struct Party {
  int known;
  unsigned thread;       // index in its threadgroup
  unsigned threadgroup;  // linear index in the grid
  int writes;
  const void* site;      // return address in the kernel's code
  const char* operation;  // barrier or simdgroup operation, or null for a memory access
};

struct Fault {
  int kind;
  int range;    // index of the buffer or threadgroup variable, -1 where there is none
  long offset;  // of the first byte concerned, from its start
  unsigned size;
  Party first, second;  // who ran into it; who was there before
  char detail[128];
};

extern Fault fault;

// The running thread as a party.
Party current(const void* site, bool writes, const char* operation = nullptr);
void set_detail(const char* text, long number = 0);  // `text` may hold one %ld

}  // namespace emulator
