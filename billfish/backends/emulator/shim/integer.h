// <metal_integer>
#pragma once

namespace metal {

template <class T> constexpr T popcount(T x) { return (T)__builtin_popcountll((make_unsigned_t<T>)x); }
template <class T> constexpr T clz(T x) {
  constexpr int bits = 8 * sizeof(T);
  return (T)(x ? __builtin_clzll((make_unsigned_t<T>)x) - (64 - bits) : bits);
}
template <class T> constexpr T ctz(T x) { return (T)(x ? __builtin_ctzll(x) : 8 * sizeof(T)); }
template <class T> constexpr T extract_bits(T x, uint offset, uint bits) {
  constexpr uint width = 8 * sizeof(T);
  if (bits == 0) return 0;
  return (T)(x << (width - offset - bits)) >> (width - bits);  // of a signed number, with its sign
}
template <class T> constexpr T insert_bits(T base, T insert, uint offset, uint bits) {
  T mask = bits >= 8 * sizeof(T) ? ~T(0) : (T)((T(1) << bits) - 1);
  return (T)((base & ~(mask << offset)) | ((insert & mask) << offset));
}
template <class T> constexpr T reverse_bits(T x) {
  T out = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); i++) out |= (T)((x >> i & 1) << (8 * sizeof(T) - 1 - i));
  return out;
}
template <class T> constexpr T rotate(T x, T n) {
  using U = make_unsigned_t<T>;
  constexpr unsigned width = 8 * sizeof(T);
  unsigned by = (U)n % width;
  return by ? (T)((U)x << by | (U)x >> (width - by)) : x;
}
inline uint mulhi(uint a, uint b) { return (uint)((ulong)a * b >> 32); }
inline int mulhi(int a, int b) { return (int)((long)a * b >> 32); }
inline uint mul24(uint a, uint b) { return (a & 0xFFFFFF) * (b & 0xFFFFFF); }
inline uint mad24(uint a, uint b, uint c) { return mul24(a, b) + c; }
template <class T> constexpr T addsat(T a, T b) {
  T out = 0;
  if (!__builtin_add_overflow(a, b, &out)) return out;
  return b < 0 ? numeric_limits<T>::min() : numeric_limits<T>::max();
}
template <class T> constexpr T subsat(T a, T b) {
  T out = 0;
  if (!__builtin_sub_overflow(a, b, &out)) return out;
  return b < 0 ? numeric_limits<T>::max() : numeric_limits<T>::min();
}

}  // namespace metal
