// A small pool of threads that share one loop at a time.
//
// Idle threads wait a moment by spinning, because the next product of a model comes at once, and then sleep. Pieces of the
// work are drawn by whoever is free; no result depends on who drew what, so they are the same for any number of threads.
#pragma once
#include <cstdint>
#include <functional>

namespace billfish {

// The number of threads to use: what set_threads() said, else OMP_NUM_THREADS, else the cores this process may use.
int threads();
void set_threads(int count);

// Calls body(first, last) on pieces that cover [0, count), on several threads; returns when all are done. A second
// caller at the same time runs its whole loop alone instead of waiting. Exceptions must not leave the body.
void parallel_for(int64_t count, const std::function<void(int64_t, int64_t)>& body);

}  // namespace billfish
