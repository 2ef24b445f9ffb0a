// Vectors are clang's own: swizzles, arithmetic and indexing come with them. Constructors, which clang has not, are make().
#pragma once

namespace metal {

template <class T, int n> using vec = T __attribute__((ext_vector_type(n)));

template <class V> struct vector_traits {
  static constexpr int size = 0;  // a scalar
  using element = V;
};
template <class T, int n> struct vector_traits<T __attribute__((ext_vector_type(n)))> {
  static constexpr int size = n;
  using element = T;
};
template <class V> constexpr int size_of = vector_traits<V>::size;
template <class V> using element_of = typename vector_traits<V>::element;

// Scalars of any two types; clang has no conversion between the two 16-bit floats.
template <class To, class From> constexpr To convert_scalar(From value) {
  if constexpr (sizeof(From) == 2 && is_floating_point_v<From>) return (To)(float)value;
  else return (To)value;
}

template <class V, class A> constexpr void append(V& out, int& at, A argument) {
  if constexpr (size_of<A> == 0) {
    out[at++] = convert_scalar<element_of<V>>(argument);
  } else {
    for (int i = 0; i < size_of<A>; i++) out[at++] = convert_scalar<element_of<V>>((element_of<A>)argument[i]);
  }
}

// half4(1), half4(float4), half4(x.xy, z, w): Metal's constructors.
template <class V, class... A> constexpr V make(A... arguments) {
  V out = {};
  int at = 0;
  if constexpr (sizeof...(A) == 1 && (... && (size_of<A> == 0))) {
    for (int i = 0; i < size_of<V>; i++) append(out, at, arguments...);
  } else {
    static_assert(sizeof...(A) == 0 || (... + (size_of<A> ? size_of<A> : 1)) == size_of<V>,
                  "a vector is made of as many elements as it has");
    (append(out, at, arguments), ...);
  }
  return out;
}

template <class T> using plain = remove_cv_t<remove_reference_t<T>>;

// static_cast, extended to vectors and to bfloat <-> half.
template <class To, class From> constexpr To cast(From&& value) {
  if constexpr (is_reference_v<To> || is_pointer_v<To>) return static_cast<To>(value);
  else if constexpr (size_of<plain<To>> != 0) return make<plain<To>>((plain<From>)value);
  else if constexpr (is_arithmetic_v<plain<To>> && is_arithmetic_v<plain<From>>)
    return convert_scalar<plain<To>>((plain<From>)value);
  else return static_cast<To>(static_cast<From&&>(value));
}

#define METAL_VECTORS(name, T)                    \
  typedef vec<T, 2> name##2;                      \
  typedef vec<T, 3> name##3;                      \
  typedef vec<T, 4> name##4;                      \
  template <class... A> constexpr name##2 make_##name##2(A... a) { return make<name##2>(a...); } \
  template <class... A> constexpr name##3 make_##name##3(A... a) { return make<name##3>(a...); } \
  template <class... A> constexpr name##4 make_##name##4(A... a) { return make<name##4>(a...); }
#define METAL_ALL_VECTORS(X) \
  X(bool, bool) X(char, signed char) X(uchar, uchar) X(short, short) X(ushort, ushort) X(int, int) X(uint, uint) \
  X(long, long) X(ulong, ulong) X(half, half) X(float, float) X(bfloat, bfloat)
METAL_ALL_VECTORS(METAL_VECTORS)
#undef METAL_VECTORS

// Vectors without padding or alignment, as they lie in memory.
template <class T, int n> struct packed_vec {
  T elements[n];
  packed_vec() = default;
  constexpr packed_vec(vec<T, n> v) {
    for (int i = 0; i < n; i++) elements[i] = v[i];
  }
  template <class... A, class = enable_if_t<sizeof...(A) == n>> constexpr packed_vec(A... a) : elements{(T)a...} {}
  constexpr operator vec<T, n>() const {
    vec<T, n> v = {};
    for (int i = 0; i < n; i++) v[i] = elements[i];
    return v;
  }
  constexpr T& operator[](int i) { return elements[i]; }
  constexpr const T& operator[](int i) const { return elements[i]; }
};
#define METAL_PACKED(name, T)               \
  typedef packed_vec<T, 2> packed_##name##2; \
  typedef packed_vec<T, 3> packed_##name##3; \
  typedef packed_vec<T, 4> packed_##name##4;
METAL_ALL_VECTORS(METAL_PACKED)
#undef METAL_PACKED

}  // namespace metal
