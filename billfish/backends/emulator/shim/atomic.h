// <metal_atomic>. Fibers run one at a time, so plain code is atomic; what matters is what the checker is told.
#pragma once

namespace metal {

template <class T> struct atomic {
  static_assert(sizeof(T) >= 4 || is_same_v<T, bool>, "Metal has atomics of 32 and 64 bits only");
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;

#ifndef EMULATOR_LINT
#define METAL_ATOMIC __attribute__((noinline)) EMULATOR_UNSEEN inline

template <class T> METAL_ATOMIC T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  emulator::atomic_access(object, sizeof(T), true, false, EMULATOR_SITE);
  return object->value;
}
template <class T, class U> METAL_ATOMIC void atomic_store_explicit(volatile atomic<T>* object, U value, memory_order) {
  emulator::atomic_access(object, sizeof(T), false, true, EMULATOR_SITE);
  object->value = (T)value;
}
#define METAL_MODIFY(name, expression)                                                      \
  template <class T, class U> METAL_ATOMIC T name(volatile atomic<T>* object, U operand, memory_order) { \
    emulator::atomic_access(object, sizeof(T), true, true, EMULATOR_SITE);                  \
    T old = object->value, value = (T)operand;                                              \
    object->value = (T)(expression);                                                        \
    return old;                                                                             \
  }
METAL_MODIFY(atomic_exchange_explicit, value)
METAL_MODIFY(atomic_fetch_add_explicit, old + value)
METAL_MODIFY(atomic_fetch_sub_explicit, old - value)
METAL_MODIFY(atomic_fetch_min_explicit, value < old ? value : old)
METAL_MODIFY(atomic_fetch_max_explicit, old < value ? value : old)
METAL_MODIFY(atomic_fetch_and_explicit, old & value)
METAL_MODIFY(atomic_fetch_or_explicit, old | value)
METAL_MODIFY(atomic_fetch_xor_explicit, old ^ value)
#undef METAL_MODIFY

template <class T, class U>
METAL_ATOMIC bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object, T* expected, U desired, memory_order,
                                                        memory_order) {
  emulator::atomic_access(object, sizeof(T), true, true, EMULATOR_SITE);
  if (__builtin_memcmp((const void*)&object->value, expected, sizeof(T)) == 0) {
    object->value = (T)desired;
    return true;
  }
  *expected = object->value;
  return false;
}
#endif

}  // namespace metal
