// Which vector instructions an x86_64 processor has and its system lets programs use.
//
// Asked of the processor itself: __builtin_cpu_supports needs a run-time library that not every compiler brings, and does not know all of them.
#pragma once
#include <cpuid.h>

#include <cstdint>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace billfish {

struct X86Features {
  bool avx2 = false, avx_vnni = false, avx512_vnni = false, amx = false;

  // Looked up once: in a virtual machine, CPUID takes microseconds.
  static const X86Features& here() {
    static const X86Features found;
    return found;
  }

 private:
  X86Features() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool fma = c >> 12 & 1, xsave = c >> 27 & 1, avx = c >> 28 & 1, f16c = c >> 29 & 1;
    if (!xsave) return;
    constexpr uint64_t YMM = 0x6, ZMM = 0xe6, TILES = 0x60000;  // what the system saves when it switches between threads
    const uint64_t saved = saved_registers();
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    avx2 = avx && fma && f16c && (b >> 5 & 1) && (saved & YMM) == YMM;
    const bool f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1, vnni = c >> 11 & 1;
    avx512_vnni = avx2 && f && dq && bw && vl && vnni && (saved & ZMM) == ZMM;
    amx = avx512_vnni && (d >> 24 & 1) && (d >> 25 & 1) && (saved & TILES) == TILES && may_use_tiles();
    avx_vnni = avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
  }

  // Whether Linux lets this process use AMX's tile registers, which take 8 KiB where a thread is saved, and so must be asked for, once.
  static bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
  }

  static uint64_t saved_registers() {
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
  }
};

}  // namespace billfish
