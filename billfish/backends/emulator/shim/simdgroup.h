// Operations across the lanes of a simdgroup. Each is a noinline function, so that its return address is the kernel's line.
#pragma once

namespace metal {

#define METAL_SIMD EMULATOR_CONVERGENT EMULATOR_UNSEEN
#define METAL_EXCHANGE(name) const emulator::Exchange& all = emulator::exchange(name, &v, sizeof v, EMULATOR_SITE)

EMULATOR_UNSEEN inline uint current_lane() { return emulator::position->lane; }

template <class T> EMULATOR_UNSEEN inline T from_lane(const emulator::Exchange& all, uint lane, const char* name, const void* site) {
  if (!all.has(lane)) emulator::report_inactive_lane(name, lane, site);
  return all.get<T>(lane);
}

// `source`: the lane to read from; `inside`: whether Metal defines the result (else v itself is given back).
#define METAL_SHUFFLE(name, source, inside)                                              \
  template <class T> METAL_SIMD T name(T v, ushort a) {                                  \
    METAL_EXCHANGE(#name);                                                               \
    int lane = current_lane(), from = (source);                                          \
    (void)lane;                                                                          \
    return (inside) ? from_lane<T>(all, from, #name, EMULATOR_SITE) : v;                 \
  }
METAL_SHUFFLE(simd_shuffle, a, true)
METAL_SHUFFLE(simd_broadcast, a, true)
METAL_SHUFFLE(simd_shuffle_xor, lane ^ a, true)
METAL_SHUFFLE(simd_shuffle_down, lane + a, from < 32 && all.has(from))
METAL_SHUFFLE(simd_shuffle_up, lane - a, from >= 0)
METAL_SHUFFLE(simd_shuffle_rotate_down, (lane + a) & 31, true)
METAL_SHUFFLE(simd_shuffle_rotate_up, (lane - a) & 31, true)
METAL_SHUFFLE(quad_shuffle, (lane & ~3) + (a & 3), true)
METAL_SHUFFLE(quad_broadcast, (lane & ~3) + (a & 3), true)
METAL_SHUFFLE(quad_shuffle_xor, lane ^ (a & 3), true)
METAL_SHUFFLE(quad_shuffle_down, lane + a, (lane & 3) + a < 4)
METAL_SHUFFLE(quad_shuffle_up, lane - a, (lane & 3) >= a)
#undef METAL_SHUFFLE

template <class T> METAL_SIMD T simd_broadcast_first(T v) {
  METAL_EXCHANGE("simd_broadcast_first");
  return all.get<T>(__builtin_ctz(all.lanes));
}

template <class T> struct Filled {
  T value, filling;
};
template <class T> METAL_SIMD T simd_shuffle_and_fill_up(T value, T filling, ushort delta) {
  Filled<T> v{value, filling};
  METAL_EXCHANGE("simd_shuffle_and_fill_up");
  uint lane = current_lane();
  auto other = from_lane<Filled<T>>(all, (lane - delta) & 31, "simd_shuffle_and_fill_up", EMULATOR_SITE);
  return lane >= delta ? other.value : other.filling;
}
template <class T> METAL_SIMD T simd_shuffle_and_fill_down(T value, T filling, ushort delta) {
  Filled<T> v{value, filling};
  METAL_EXCHANGE("simd_shuffle_and_fill_down");
  uint lane = current_lane();
  auto other = from_lane<Filled<T>>(all, (lane + delta) & 31, "simd_shuffle_and_fill_down", EMULATOR_SITE);
  return lane + delta < 32 ? other.value : other.filling;
}

// By halves, so that the result does not depend on the order in which lanes ran. Lanes that are not there are left out.
template <class T, class F> EMULATOR_UNSEEN inline T reduce(const emulator::Exchange& all, uint first, uint count, F f) {
  T values[32];
  bool there[32];
  for (uint i = 0; i < count; i++) {
    there[i] = all.has(first + i);
    values[i] = there[i] ? all.get<T>(first + i) : T(0);
  }
  for (uint half = count / 2; half; half /= 2) {
    for (uint i = 0; i < half; i++) {
      if (there[i] && there[i + half]) values[i] = f(values[i], values[i + half]);
      else if (there[i + half]) values[i] = values[i + half];
      there[i] |= there[i + half];
    }
  }
  return values[0];
}
#define METAL_REDUCE(name, expression)                                                                      \
  template <class T> METAL_SIMD T simd_##name(T v) {                                                        \
    METAL_EXCHANGE("simd_" #name);                                                                          \
    return reduce<T>(all, 0, 32, [](T a, T b) -> T { return expression; });                                 \
  }                                                                                                         \
  template <class T> METAL_SIMD T quad_##name(T v) {                                                        \
    METAL_EXCHANGE("quad_" #name);                                                                          \
    return reduce<T>(all, current_lane() & ~3u, 4, [](T a, T b) -> T { return expression; });               \
  }
METAL_REDUCE(sum, T(a + b))
METAL_REDUCE(product, T(a * b))
METAL_REDUCE(max, max(a, b))
METAL_REDUCE(min, min(a, b))
METAL_REDUCE(and, T(a & b))
METAL_REDUCE(or, T(a | b))
METAL_REDUCE(xor, T(a ^ b))
#undef METAL_REDUCE

#define METAL_PREFIX(name, start, operation)                                              \
  template <class T> METAL_SIMD T simd_prefix_inclusive_##name(T v) {                     \
    METAL_EXCHANGE("simd_prefix_inclusive_" #name);                                       \
    T out = T(start);                                                                     \
    for (uint i = 0; i <= current_lane(); i++)                                            \
      if (all.has(i)) out = T(out operation all.get<T>(i));                               \
    return out;                                                                           \
  }                                                                                       \
  template <class T> METAL_SIMD T simd_prefix_exclusive_##name(T v) {                     \
    METAL_EXCHANGE("simd_prefix_exclusive_" #name);                                       \
    T out = T(start);                                                                     \
    for (uint i = 0; i < current_lane(); i++)                                             \
      if (all.has(i)) out = T(out operation all.get<T>(i));                               \
    return out;                                                                           \
  }
METAL_PREFIX(sum, 0, +)
METAL_PREFIX(product, 1, *)
#undef METAL_PREFIX

struct simd_vote {
  typedef ulong vote_t;
  vote_t bits;
  explicit constexpr simd_vote(vote_t v = 0) : bits(v) {}
  explicit constexpr operator vote_t() const { return bits; }
  constexpr bool all() const { return bits == 0xFFFFFFFF; }
  constexpr bool any() const { return bits != 0; }
};
METAL_SIMD inline simd_vote simd_ballot(bool v) {
  METAL_EXCHANGE("simd_ballot");
  ulong out = 0;
  for (uint i = 0; i < 32; i++)
    if (all.has(i)) out |= (ulong)all.get<bool>(i) << i;
  return simd_vote(out);
}
METAL_SIMD inline simd_vote simd_active_threads_mask() {
  bool v = true;
  METAL_EXCHANGE("simd_active_threads_mask");
  return simd_vote(all.lanes);
}
METAL_SIMD inline bool simd_any(bool v) {
  METAL_EXCHANGE("simd_any");
  return reduce<bool>(all, 0, 32, [](bool a, bool b) { return a || b; });
}
METAL_SIMD inline bool simd_all(bool v) {
  METAL_EXCHANGE("simd_all");
  return reduce<bool>(all, 0, 32, [](bool a, bool b) { return a && b; });
}
METAL_SIMD inline bool simd_is_first() {
  bool v = true;
  METAL_EXCHANGE("simd_is_first");
  return current_lane() == (uint)__builtin_ctz(all.lanes);
}

}  // namespace metal
