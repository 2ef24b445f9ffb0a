#include "bind/arguments.h"

#include <nanobind/stl/vector.h>

#include "bind/machine_levels.h"
#include "levels.h"  // written by CMake: BILLFISH_LEVELS(X) is X(name) for each level, best first

namespace nb = nanobind;
using namespace billfish;

#define DECLARE_LEVEL(name) namespace name { extern const Level level; }
BILLFISH_LEVELS(DECLARE_LEVEL)

namespace {

// Best first. Not in a container that is destroyed at the end of the process, when daemon threads may still look.
#define LEVEL_POINTER(name) &name::level,
const Level* const all_levels[] = {BILLFISH_LEVELS(LEVEL_POINTER)};

}  // namespace

const Level& billfish::find_level(const std::string& name) {
  for (const Level* level : all_levels)
    if (level->name == name && runs_here(name)) return *level;
  throw nb::value_error(("no such level on this machine: " + name).c_str());
}

std::vector<std::string> billfish::levels_here() {
  std::vector<std::string> names;
  for (const Level* level : all_levels)
    if (runs_here(level->name)) names.push_back(level->name);
  return names;
}

Storage billfish::storage_of(const uint8_t* bytes, nb::dict about) {
  auto number = [&](const char* key) { return nb::cast<int64_t>(about[key]); };
  Storage s{};
  s.bytes = bytes;
  s.n = number("n"), s.k = number("k"), s.row_bytes = number("row_bytes");
  s.block = int32_t(number("block")), s.block_bytes = int32_t(number("block_bytes")), s.group = int32_t(number("group"));
  int fields = 0;
  for (const auto& field : nb::cast<std::vector<std::vector<int>>>(about["code_fields"])) s.code_field[fields++] = {field[0], field[1], field[2]};
  const auto table = nb::cast<std::vector<float>>(about["table"]);
  std::copy_n(table.begin(), std::min<size_t>(table.size(), 16), s.table);
  s.bias = int32_t(number("bias")), s.flip = uint8_t(number("flip"));
  s.scales = Storage::Scales(number("scales"));
  s.scale_offset = int32_t(number("scale_offset")), s.minimum_offset = int32_t(number("minimum_offset"));
  s.sub_offset = int32_t(number("sub_offset"));
  return s;
}

ExpertStack billfish::expert_stack(const Level& level, const ExpertArrays& arrays) {
  const auto& [description, stream, experts, factors, biases] = arrays;
  const Weights w = description.weights(level, stream.data());
  return {w, experts, expert_bytes(level, w), factors ? factors->data() : nullptr, biases ? biases->data() : nullptr};
}
