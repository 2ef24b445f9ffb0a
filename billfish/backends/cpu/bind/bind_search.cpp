// The search for scales, for Python. Arguments have been checked by the Python side, which shares out rows over threads.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <new>

#include "bind/arguments.h"
#include "search/search_problem.h"

namespace nb = nanobind;

namespace billfish {
namespace {

using Numbers = Contiguous<const float>;
using MaybeNumbers = std::optional<Numbers>;

// An element and the tables that it points into.
struct PythonElement {
  SearchElement element{};
  std::vector<uint8_t> codes;
  std::vector<float> cells;

  PythonElement(int kind, int bits, float bias, const std::vector<float>& values, float first_cell, float per_unit, std::vector<uint8_t> code_of_cell,
                std::vector<float> of_cell)
      : codes(std::move(code_of_cell)), cells(std::move(of_cell)) {
    element.kind = SearchElement::Kind(kind), element.bits = bits, element.bias = bias;
    element.cell_count = int32_t(codes.size()), element.first_cell = first_cell, element.per_unit = per_unit;
    std::copy_n(values.begin(), std::min(values.size(), std::size(element.values)), element.values);
    element.low = *std::min_element(values.begin(), values.end(), less), element.high = *std::max_element(values.begin(), values.end(), less);
  }

  SearchElement here() const {
    SearchElement own = element;
    own.code_of_cell = codes.data(), own.of_cell = cells.data();
    return own;
  }

  // NaN is neither the least nor the greatest: values begin with a number.
  static bool less(float a, float b) { return a < b; }
};

const float* maybe(const MaybeNumbers& numbers) { return numbers ? numbers->data() : nullptr; }

// Kind, numbers of the upper level, least and greatest integer, factor.
using PythonRule = std::tuple<int, MaybeNumbers, float, float, float>;

SearchRule rule_of(const PythonRule& rule) {
  const auto& [kind, upper, low, high, factor] = rule;
  return {SearchRule::Kind(kind), maybe(upper), low, high, factor};
}

// found [parts, 1 or 2, rows]: the parts of Search.parts, with a scale and perhaps a minimum each.
void search_scales(const std::string& level, const PythonElement& element, Numbers w, const MaybeNumbers& importance, Numbers scale,
                   const MaybeNumbers& minimum, const PythonRule& scale_rule, const PythonRule& minimum_rule, bool thorough,
                   const std::vector<float>& factors, const std::vector<float>& further, Contiguous<float> found) {
  ScaleSearch s{};
  s.element = element.here();
  s.rows = int64_t(w.shape(0)), s.length = int64_t(w.shape(1));
  s.w = w.data(), s.importance = maybe(importance), s.scale = scale.data(), s.minimum = maybe(minimum);
  s.scale_rule = rule_of(scale_rule), s.minimum_rule = rule_of(minimum_rule);
  s.thorough = thorough;
  s.factors = factors.data(), s.factor_count = int64_t(factors.size());
  s.further = further.data(), s.further_count = int64_t(further.size());
  float* out = found.data();
  const int64_t numbers = minimum ? 2 : 1;
  if (thorough) s.plain_scale = out, s.plain_minimum = out + s.rows, out += numbers * s.rows;
  s.weighted_scale = out, s.weighted_minimum = out + s.rows;
  const SearchKernels& kernels = *find_level(level).search;
  const Computing computing;
  const std::unique_ptr<float[]> room(new float[size_t(2 * (s.length + 16))]);
  kernels.search(s, 0, s.rows, room.get());
}

void encode(const std::string& level, const PythonElement& element, int ties, Numbers w, Numbers scale, const MaybeNumbers& minimum,
            const MaybeNumbers& zero, Contiguous<uint8_t> codes) {
  const Encoding e{element.here(), Ties(ties), int64_t(w.shape(0)), int64_t(w.shape(1)), w.data(), scale.data(), maybe(minimum), maybe(zero), codes.data()};
  const SearchKernels& kernels = *find_level(level).search;
  const Computing computing;
  kernels.encode(e, 0, e.rows);
}

void error_of_codes(const std::string& level, Numbers values, int64_t group, Numbers w, const MaybeNumbers& importance, Contiguous<const uint8_t> codes,
                    Numbers scale, const MaybeNumbers& zero, const MaybeNumbers& minimum, Contiguous<double> error) {
  float table[256] = {};
  std::copy_n(values.data(), std::min<size_t>(values.size(), 256), table);
  const ErrorOfCodes e{table, int64_t(w.shape(0)), int64_t(w.shape(1)), group, w.data(), maybe(importance), codes.data(), scale.data(), maybe(zero), maybe(minimum), error.data()};
  const SearchKernels& kernels = *find_level(level).search;
  const Computing computing;
  kernels.error(e, 0, e.rows);
}

void extremes(const std::string& level, Numbers w, Contiguous<float> least, Contiguous<float> greatest) {
  const SearchKernels& kernels = *find_level(level).search;
  const Computing computing;
  kernels.extremes(w.data(), int64_t(w.shape(0)), int64_t(w.shape(1)), least.data(), greatest.data());
}

void signed_extreme(const std::string& level, Numbers w, Contiguous<float> largest) {
  const SearchKernels& kernels = *find_level(level).search;
  const Computing computing;
  kernels.signed_extreme(w.data(), int64_t(w.shape(0)), int64_t(w.shape(1)), largest.data());
}

void dot(const std::string& level, Numbers a, Numbers b, Contiguous<float> out) {
  const SearchKernels& kernels = *find_level(level).search;
  const Computing computing;
  kernels.dot(a.data(), b.data(), int64_t(a.shape(0)), int64_t(a.shape(1)), out.data());
}

}  // namespace

void bind_search(nb::module_& module) {
  nb::class_<PythonElement>(module, "SearchElement")
      .def(nb::init<int, int, float, const std::vector<float>&, float, float, std::vector<uint8_t>, std::vector<float>>());
  module.def("search_scales", &search_scales, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(),
             nb::arg(), nb::arg(), nb::arg(), nb::arg());
  module.def("encode", &encode, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg());
  module.def("error_of_codes", &error_of_codes, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg().none(),
             nb::arg().none(), nb::arg());
  module.def("extremes", &extremes);
  module.def("signed_extreme", &signed_extreme);
  module.def("dot", &dot);
}

}  // namespace billfish
