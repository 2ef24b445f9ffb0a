// What a threadgroup may know of the writes of others: release and acquire across threadgroups.
//
// A releasing device fence and then an atomic write publish: the writes that the thread made before the fence, and those
// that the others of its threadgroup made before the last barrier on device memory before the fence. An atomic read of
// that and then an acquiring fence give a thread the right to use them, and its threadgroup after a barrier on device memory.
// Fence and atomic may be in two threads of a threadgroup if there is a barrier between the two.
#pragma once
#include "memory.h"

namespace emulator {

void begin_publication();  // of a launch
void begin_knowledge();    // of a threadgroup
void fence(bool acquire, bool release, unsigned clock, unsigned last_barrier);
void publish_atomic(unsigned long address, bool reads, bool writes);
void share_knowledge(bool device_memory);  // at a barrier
bool known(const Access& access);

}  // namespace emulator
