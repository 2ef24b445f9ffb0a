// wgmma with A in registers and B, K-major with the 128-byte swizzle, in shared memory: D [64, WIDTH] += A B, 32 bytes of k at a time.
// The instruction names every register of D, so WGMMA_... and WGMMA_HALF_... are lists that depend on WIDTH, made by plans.py.
#pragma once
#include "device.cuh"

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// What wgmma wants to know of B: its address, rows in groups of eight that are 1024 bytes apart, 128-byte swizzle.
DEVICE u64 wgmma_descriptor(u32 address) { return (u64)((address >> 4) & 0x3fff) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62; }

// d += a * b, or d = a * b where `accumulate` is 0. KIND: k and the types; REST: what follows the predicate.
#define WGMMA_ASM(LISTS, KIND, REST)                                                                  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " LISTS##_FLAG ", 0;\n"                              \
               "wgmma.mma_async.sync.aligned.m64n" LISTS##_WIDTH KIND " {" LISTS##_D "}, " LISTS##_A_B  \
               ", p" REST ";\n}\n"                                                                    \
               : LISTS##_OUTPUTS                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
