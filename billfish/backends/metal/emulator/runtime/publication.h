// What a threadgroup may know of the writes of others: release and acquire across threadgroups.
//
// A thread that runs a releasing device fence and then an atomic write publishes its own writes so far, and the writes
// that other threads of its threadgroup made before their last barrier on device memory. A thread that reads that atomic
// and then runs an acquiring fence may use them, and so may its threadgroup after a barrier on device memory.
#pragma once
#include "memory.h"

namespace emulator {

void begin_publication();  // of a launch
void begin_knowledge();    // of a threadgroup
void fence(bool acquire, bool release, unsigned clock, unsigned last_barrier);
void publish_atomic(unsigned long address, bool reads, bool writes);
void share_knowledge();    // at a barrier on device memory
bool known(const Access& access);

}  // namespace emulator
