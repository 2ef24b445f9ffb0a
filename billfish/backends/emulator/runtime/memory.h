// Which memory a kernel may touch, how much of it it did touch, and in checked launches whether it may do so just now.
#pragma once
#include "emulator.h"
#include "fibers.h"

namespace emulator {

enum Space { device_space, threadgroup_space };

// The last read or write of a byte. Several reads, or several atomic writes, can be the last together.
struct Access {
  unsigned threadgroup;  // linear index + 1; 0: none yet
  unsigned clock;
  unsigned short thread;
  unsigned char atomic;
  unsigned char threads;  // see Threads
  int site;               // relative to the kernel's code
};

struct Cell {
  Access write, read;
};

// A buffer or a variable in threadgroup memory.
struct Range {
  unsigned long address, size, margin;  // within `margin` before and behind it lies nothing else
  Space space;
  bool initialised, writable;
  unsigned long bytes_read, bytes_written;
  unsigned long reads[5], writes[5];  // accesses of 1, 2, 4, 8 and 16 bytes
  Cell* cells;  // one for each byte, where it can be written and the launch is checked
};

struct Counters {
  unsigned long threadgroup_barriers, simdgroup_barriers, matrix_multiplies, atomics;
};

extern Counters counters;

// Of a launch; false if there is no room for the cells.
bool begin_memory(Range* ranges, unsigned count, bool checked, const void* code);
void end_memory();
// Of a threadgroup.
void begin_threadgroup();

void after_threadgroup_barrier(int flags);
void after_simdgroup_barrier(int flags);
unsigned linear_threadgroup();

}  // namespace emulator
