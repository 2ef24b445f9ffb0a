// What the machine allows, as `python -m benchmarks.products` measures it.
#include <nanobind/stl/string.h>

#include <atomic>
#include <chrono>

#include "bind/arguments.h"
#include "threads/threads.h"

namespace billfish {
namespace {

// The best of several rounds, on all threads: work() does `units` of something on each of them.
template <class Work> double best_rate(double units, Work work) {
  double best = 0;
  const int64_t count = threads();
  for (int round = 0; round < 7; round++) {
    const auto start = std::chrono::steady_clock::now();
    parallel_for(count, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) work(i);
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, double(count) * units / seconds.count());
  }
  return best;
}

double read_rate(const std::string& name, int megabytes) {
  const Level& level = find_level(name);
  const Computing computing;
  const int64_t each = (int64_t(megabytes) << 20) / threads() / level.vector_bytes * level.vector_bytes;
  std::vector<uint8_t> memory(size_t(each) * threads(), 1);
  std::atomic<int> seen{0};
  return best_rate(double(each), [&](int64_t i) { seen += level.read_all(memory.data() + i * each, each / level.vector_bytes); });
}

double dot_rate(const std::string& name) {
  const Level& level = find_level(name);
  const Computing computing;
  constexpr int64_t rounds = 300000;
  std::atomic<int> seen{0};
  return best_rate(rounds * level.dot_operations, [&](int64_t) { seen += level.dot_rounds(rounds) > 0; });
}

double fma_rate(const std::string& name) {
  const Level& level = find_level(name);
  const Computing computing;
  constexpr int64_t rounds = 300000;
  std::atomic<int> seen{0};
  return best_rate(rounds * level.fma_operations, [&](int64_t) { seen += level.fma_rounds(rounds) > 0; });
}

}  // namespace

void bind_rates(nanobind::module_& module) {
  module.def("read_rate", &read_rate, "Bytes per second that all threads read from memory.");
  module.def("dot_rate", &dot_rate, "Operations (2 for each product) per second of int8 dot products.");
  module.def("fma_rate", &fma_rate, "Operations (2 for each product) per second of float32 multiply-adds.");
}

}  // namespace billfish
