#include "bind/arguments.h"

#include <nanobind/stl/vector.h>

#include "levels.h"  // written by CMake: BILLFISH_LEVELS(X) is X(name) for each level, best first

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace nb = nanobind;
using namespace billfish;

#define DECLARE_LEVEL(name) namespace name { extern const Level level; }
BILLFISH_LEVELS(DECLARE_LEVEL)

namespace {

#if defined(__x86_64__)
// Bit 4 of leaf 7, subleaf 1, for which compilers of 2020 have no name. Asked for once: in a virtual machine, CPUID takes microseconds.
bool has_avx_vnni() {
  static const bool has = [] {
    unsigned features = 0, b, c, d;
    return __get_cpuid_count(7, 1, &features, &b, &c, &d) && (features >> 4 & 1);
  }();
  return has;
}
#endif

bool runs_here(const std::string& name) {
#if defined(__aarch64__) && defined(__linux__)
  const bool dot_products = getauxval(AT_HWCAP) >> 20 & 1, matrices = getauxval(AT_HWCAP2) >> 13 & 1;  // HWCAP_ASIMDDP, HWCAP2_I8MM
  if (name == "neon_dotprod") return dot_products;
  if (name == "neon_i8mm") return dot_products && matrices;
#elif defined(__aarch64__) && defined(__APPLE__)
  if (name == "neon_dotprod") return true;  // every Mac with an Apple processor has it
  if (name == "neon_i8mm") {
    int there = 0;
    size_t size = sizeof(there);
    return sysctlbyname("hw.optional.arm.FEAT_I8MM", &there, &size, nullptr, 0) == 0 && there != 0;
  }
#elif defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");  // and the system's YMM
  if (name == "avx2") return avx2;
  if (name == "avx_vnni") return avx2 && has_avx_vnni();
  if (name == "avx512_vnni")
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#endif
  return name == "portable";
}

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
