// A small pool of threads that callers share, or the threads of torch's OpenMP instead: team.h.
//
// Idle threads wait a moment by spinning, because the next product of a model comes at once, and then sleep. Pieces of the
// work are drawn by whoever is free; no result depends on who drew what, so they are the same for any number of threads.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

namespace billfish {

// OMP_NUM_THREADS, else the cores this process may use: see cores.h. These are looked at when the module loads, in the
// child after a fork, and by set_threads(0); a product does not ask the system for anything.
int default_threads();

// The number of threads to use, from 1 to 1024: what set_threads() said, or by default, and after set_threads(0), the above.
int threads();
void set_threads(int count);

// Calls body(first, last) on pieces that cover [0, count), on several threads; returns when all are done. `least` is how many make a piece that
// takes longer than drawing it, unless there are more threads than pieces. Callers at the
// same time share the threads (with OpenMP, all but one run their loops alone). Of exceptions that leave the body, the first is thrown again here, when no
// thread is in the body any more. The threads of the pool have a known floating-point mode; the caller, who works too, sees to its own (see float_mode.h).
void parallel_for(int64_t count, const std::function<void(int64_t, int64_t)>& body, int64_t least = 4);

// From now on loops run on the threads of the OpenMP that a loaded shared library uses, and the pool ends: see openmp.h. False where there is none.
// A child of this process has a pool again.
bool share_threads_of(const std::string& library);

}  // namespace billfish
