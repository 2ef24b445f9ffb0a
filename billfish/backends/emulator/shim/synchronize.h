// Barriers and fences.
#pragma once

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8,
                       mem_device_and_threadgroup = 3 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((int)a | (int)b); }
constexpr mem_flags operator&(mem_flags a, mem_flags b) { return (mem_flags)((int)a & (int)b); }

enum memory_order { memory_order_relaxed, memory_order_acquire, memory_order_release, memory_order_acq_rel,
                    memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };

EMULATOR_CONVERGENT inline void threadgroup_barrier(mem_flags flags, thread_scope = thread_scope_threadgroup) {
  emulator::threadgroup_barrier((int)flags, EMULATOR_SITE);
}
EMULATOR_CONVERGENT inline void simdgroup_barrier(mem_flags flags, thread_scope = thread_scope_simdgroup) {
  emulator::simdgroup_barrier((int)flags, EMULATOR_SITE);
}

// Only a fence on device memory at device scope says anything to other threadgroups.
inline void atomic_thread_fence(mem_flags flags, memory_order order, thread_scope scope = thread_scope_device) {
  if (!((int)flags & (int)mem_flags::mem_device) || scope != thread_scope_device) return;
  bool acquire = order != memory_order_relaxed && order != memory_order_release;
  bool release = order != memory_order_relaxed && order != memory_order_acquire;
  emulator::device_fence(acquire, release);
}

}  // namespace metal
