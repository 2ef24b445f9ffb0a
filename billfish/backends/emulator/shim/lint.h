// For the lint: what takes pointers, once for each address space that it takes, and never run.
#pragma once

#define METAL_SPACE(n) __attribute__((address_space(n)))

namespace metal {

#define METAL_LINT_MATRIX(space)                                                                                    \
  template <class T>                                                                                                \
  void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const METAL_SPACE(space) T*, ulong = 8, ulong2 = ulong2{0, 0},    \
                      bool = false);                                                                                \
  template <class T>                                                                                                \
  void simdgroup_store(const simdgroup_matrix<T, 8, 8>&, METAL_SPACE(space) T*, ulong = 8, ulong2 = ulong2{0, 0},   \
                       bool = false);
METAL_LINT_MATRIX(1)
METAL_LINT_MATRIX(3)
#undef METAL_LINT_MATRIX

#define METAL_LINT_MODIFY(space, name) \
  template <class T, class U> T name(volatile METAL_SPACE(space) atomic<T>*, U, memory_order);
#define METAL_LINT_ATOMIC(space)                                                                                     \
  template <class T> T atomic_load_explicit(const volatile METAL_SPACE(space) atomic<T>*, memory_order);             \
  template <class T, class U> void atomic_store_explicit(volatile METAL_SPACE(space) atomic<T>*, U, memory_order);   \
  template <class T, class U>                                                                                        \
  bool atomic_compare_exchange_weak_explicit(volatile METAL_SPACE(space) atomic<T>*, T*, U, memory_order, memory_order); \
  METAL_LINT_MODIFY(space, atomic_exchange_explicit)                                                                 \
  METAL_LINT_MODIFY(space, atomic_fetch_add_explicit)                                                                \
  METAL_LINT_MODIFY(space, atomic_fetch_sub_explicit)                                                                \
  METAL_LINT_MODIFY(space, atomic_fetch_min_explicit)                                                                \
  METAL_LINT_MODIFY(space, atomic_fetch_max_explicit)                                                                \
  METAL_LINT_MODIFY(space, atomic_fetch_and_explicit)                                                                \
  METAL_LINT_MODIFY(space, atomic_fetch_or_explicit)                                                                 \
  METAL_LINT_MODIFY(space, atomic_fetch_xor_explicit)
METAL_LINT_ATOMIC(1)
METAL_LINT_ATOMIC(3)
#undef METAL_LINT_ATOMIC
#undef METAL_LINT_MODIFY

}  // namespace metal

// `(device half4*)p` has been rewritten to `Cast<device half4*>{} ->* p`, and `*(device half4*)p` to `Deref<...>{} ->* p`:
// an operator that binds as tightly as a cast, and only works within one address space.
namespace emulator {

template <class To> struct Cast {};
template <class To> struct Deref {};

template <class T> constexpr int space_of = 0;
template <class T> constexpr int space_of<METAL_SPACE(1) T> = 1;
template <class T> constexpr int space_of<METAL_SPACE(2) T> = 2;
template <class T> constexpr int space_of<METAL_SPACE(3) T> = 3;
template <class To, class From> using same_space = metal::enable_if_t<space_of<To> == space_of<From>>;

template <class To, class From, class = same_space<To, From>> To* operator->*(Cast<To*>, From*);
template <class To, class From, class = same_space<To, From>> To& operator->*(Deref<To*>, From*);
template <class To> To* operator->*(Cast<To*>, decltype(nullptr));
template <class To> To* operator->*(Cast<To*>, unsigned long);
template <class To, class Between> Cast<To> operator->*(Cast<To>, Cast<Between>);
template <class To, class Between> Deref<To> operator->*(Deref<To>, Cast<Between>);

}  // namespace emulator
