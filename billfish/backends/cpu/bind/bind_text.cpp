// Tokenizing, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "text/byte_pairs.h"

namespace nb = nanobind;

namespace billfish {

void bind_text(nb::module_& module) {
  module.def("sip_hash", [](const std::string& text, uint64_t first, uint64_t second) { return SipHash(first, second)(text); }, "For tests.");
  nb::class_<BytePairs>(module, "BytePairs")
      .def(nb::init<std::vector<std::optional<std::string>>, const std::vector<std::string>&, bool>(), nb::call_guard<nb::gil_scoped_release>())
      .def("merges", &BytePairs::merges)
      .def("token", &BytePairs::token)
      .def("encode", &BytePairs::encode);
}

}  // namespace billfish
