// wgmma with A in registers and B, K-major with the 128-byte swizzle, in shared memory: D [64, WIDTH] += A [64, 16] B.
// The instruction names every register of D, so WGMMA_... and WGMMA_HALF_... are lists that depend on WIDTH, made by plans.py.
#pragma once
#include "device.cuh"

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// What wgmma wants to know of B: its address, rows in groups of eight that are 1024 bytes apart, 128-byte swizzle.
DEVICE u64 wgmma_descriptor(u32 address) { return (u64)((address >> 4) & 0x3fff) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62; }

#define WGMMA_ASM(LISTS, TYPE_NAME)                                                                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " LISTS##_FLAG ", 0;\n"                              \
               "wgmma.mma_async.sync.aligned.m64n" LISTS##_WIDTH "k16.f32." TYPE_NAME "." TYPE_NAME   \
               " {" LISTS##_D "}, " LISTS##_A_B ", p, 1, 1, 0;\n}\n"                                  \
               : LISTS##_OUTPUTS                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

template <class T> DEVICE void wgmma(float (&d)[WIDTH / 2], const u32 (&a)[4], u64 b, int accumulate) {
  if constexpr (T::is_half) WGMMA_ASM(WGMMA, "f16");
  else WGMMA_ASM(WGMMA, "bf16");
}
// With half as many rows of B, into the first half of d.
template <class T> DEVICE void wgmma_half(float (&d)[WIDTH / 2], const u32 (&a)[4], u64 b, int accumulate) {
  if constexpr (T::is_half) WGMMA_ASM(WGMMA_HALF, "f16");
  else WGMMA_ASM(WGMMA_HALF, "bf16");
}
