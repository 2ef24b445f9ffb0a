// Which ISA levels this machine can run. CMake runs it, too, to compile for this machine only.
#pragma once
#include <string_view>

#if defined(__x86_64__)
#include "bind/x86_features.h"
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace billfish {

inline bool runs_here(std::string_view name) {
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
  const X86Features& has = X86Features::here();
  if (name == "avx2") return has.avx2;
  if (name == "avx_vnni") return has.avx_vnni;
  if (name == "avx512_vnni") return has.avx512_vnni;
  if (name == "amx") return has.amx;
#endif
  return name == "portable";
}

}  // namespace billfish
