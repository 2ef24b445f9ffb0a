// Products with experts, for Python. Arguments have been checked by the Python side.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "bind/arguments.h"

namespace nb = nanobind;
using namespace billfish;

namespace {

using Numbers = Contiguous<const float>;
using Ids = Contiguous<const int32_t>;

// x [tokens, k] or [tokens, chosen, k], ids [tokens, chosen], y [tokens, chosen, n].
void multiply_chosen(const std::string& name, const ExpertArrays& arrays, Numbers x, Ids ids, int digits, Contiguous<float> y) {
  const Level& level = find_level(name);
  const ExpertStack stack = expert_stack(level, arrays);
  const Computing computing;
  multiply_experts(level, x.data(), x.ndim() == 3, int64_t(ids.shape(0)), ids.data(), int64_t(ids.shape(1)), stack, digits, y.data());
}

// x [tokens, hidden], ids and routing [tokens, chosen], y [tokens, hidden].
void run(const std::string& name, Numbers x, Ids ids, Numbers routing, const ExpertArrays& gate, const std::optional<ExpertArrays>& up,
         const ExpertArrays& down, int activation, int digits, Contiguous<float> y) {
  const Level& level = find_level(name);
  const ExpertStack first = expert_stack(level, gate), last = expert_stack(level, down);
  std::optional<ExpertStack> second;
  if (up) second = expert_stack(level, *up);
  const Computing computing;
  run_experts(level, x.data(), int64_t(ids.shape(0)), ids.data(), routing.data(), int64_t(ids.shape(1)), first, second ? &*second : nullptr, last,
              activation, digits, y.data());
}

}  // namespace

namespace billfish {

void bind_experts(nb::module_& module) {
  module.def("multiply_experts", &multiply_chosen);
  module.def("run_experts", &run, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
}

}  // namespace billfish
