// The threads of an OpenMP library that this process has anyway.
//
// Idle threads of torch's OpenMP spin for a millisecond or so, as ours do, and between the products of a model torch has loops of its own. Two
// sets of threads on the same cores then wait for one another: a matmul of 116 us and a loop of 70 us took 414 us alternately (docs/notes/2026-11-17-torch-threads.md). So a process with
// torch has one set, torch's.
#pragma once
#include <string>

#include "threads/pieces.h"

namespace billfish {

struct OpenMp {
  void (*parallel)(void (*body)(void*), void* argument, unsigned threads, unsigned flags) = nullptr;  // GOMP_parallel: what `omp parallel` calls
  int (*thread_number)() = nullptr;                                                                   // omp_get_thread_num
  int (*usual_threads)() = nullptr;                                                                   // omp_get_max_threads

  // The OpenMP that a shared library uses. Empty where the library is not loaded, or has none that is called so.
  static OpenMp of(const std::string& library);

  explicit operator bool() const { return parallel && thread_number && usual_threads; }
  void run(Pieces& pieces) const;
};

}  // namespace billfish
