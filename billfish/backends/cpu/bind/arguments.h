// What the functions of the Python module take: arrays, levels by name, descriptions of weights.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "gemm/experts.h"
#include "layout/problem.h"
#include "threads/float_mode.h"

namespace billfish {

template <class T> using Contiguous = nanobind::ndarray<T, nanobind::c_contig, nanobind::device::cpu>;

// While it lives, this thread computes: other threads may have Python, and floating-point arithmetic is as kernels know it. Every function
// of the module that calls kernels has one.
class Computing {
 public:
  Computing() : python_(PyEval_SaveThread()) {}
  // A daemon thread that asks for Python while the process ends does not come back: up to Python 3.13, pthread_exit unwinds it like
  // an exception, which no destructor lets out, and the process would abort. So it waits here for the end.
  ~Computing() {
    try {
      PyEval_RestoreThread(python_);
    } catch (...) {
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }
  Computing(const Computing&) = delete;
  Computing& operator=(const Computing&) = delete;

 private:
  PyThreadState* python_;
  const KnownFloats known_;
};

// The description of packed weights, as the Python side keeps it.
struct Description {
  int64_t n, k;
  int codes, scales, bias, group;
  float factor;
  std::vector<uint8_t> table;

  Weights weights(const Level& level, const uint8_t* stream) const {
    Weights w{stream, n, k, Codes(codes), Scales(scales), bias, group, factor, {}};
    take_table(w, level, table.data(), std::min(table.size(), sizeof w.table));
    return w;
  }
};

// The level of that name; throws if this machine cannot run it.
const Level& find_level(const std::string& name);
// Those of this machine, best first.
std::vector<std::string> levels_here();

// Storage as the Python side describes it, without scales that are decoded already.
Storage storage_of(const uint8_t* bytes, nanobind::dict about);

// A stack of experts as the Python side keeps it: what one expert is, the stream of all, how many there are, and where they have them, a
// factor for each and biases [experts, n].
using ExpertArrays = std::tuple<Description, Contiguous<const uint8_t>, int64_t, std::optional<Contiguous<const float>>, std::optional<Contiguous<const float>>>;
ExpertStack expert_stack(const Level& level, const ExpertArrays& arrays);

}  // namespace billfish
