// 64 bits that stand for many bytes: whether weights are still those that were packed.
#pragma once
#include <cstdint>

namespace billfish {

// Of `count` bytes, on several threads, as fast as memory is read; the same for any number of threads. Arrays that differ in one word of
// eight bytes have different sums in it, others by overwhelming odds, unless somebody looks for two that have not: it is to tell that
// weights were changed, by anybody but an enemy, in this process.
uint64_t digest(const uint8_t* bytes, int64_t count);

}  // namespace billfish
