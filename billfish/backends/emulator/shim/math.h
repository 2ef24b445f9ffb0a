// <metal_math>, <metal_common>, <metal_relational>, <metal_geometric>. Functions of half and bfloat are computed in float
// and rounded once. Metal promises a few units in the last place for most of them; here they are as good as the C library.
#pragma once

extern "C" {
#define METAL_LIBM1(name) float name##f(float);
METAL_LIBM1(exp) METAL_LIBM1(exp2) METAL_LIBM1(expm1) METAL_LIBM1(log) METAL_LIBM1(log2) METAL_LIBM1(log10)
METAL_LIBM1(sin) METAL_LIBM1(cos) METAL_LIBM1(tan) METAL_LIBM1(asin) METAL_LIBM1(acos) METAL_LIBM1(atan)
METAL_LIBM1(sinh) METAL_LIBM1(cosh) METAL_LIBM1(tanh) METAL_LIBM1(asinh) METAL_LIBM1(acosh) METAL_LIBM1(atanh)
METAL_LIBM1(erf) METAL_LIBM1(cbrt)
#undef METAL_LIBM1
float powf(float, float);
float fmodf(float, float);
float atan2f(float, float);
float ldexpf(float, int);
int ilogbf(float);
float frexpf(float, int*);
}

#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define M_SQRT2_F 1.41421356237309504880f
#define M_PI_H ((half)M_PI_F)
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define HUGE_VALF (__builtin_inff())
#define MAXFLOAT __FLT_MAX__
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX ((half)65504.0f)
#define HALF_MIN ((half)6.103515625e-05f)
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u

namespace metal {

template <class T> constexpr bool is_half = is_same_v<T, half> || is_same_v<T, bfloat>;

// f(float) for every element; integers give float.
template <class T, class F> constexpr auto each(T x, F f) {
  if constexpr (size_of<T> != 0) {
    T out = {};
    for (int i = 0; i < size_of<T>; i++) out[i] = (element_of<T>)f((float)x[i]);
    return out;
  } else if constexpr (is_half<T>) {
    return (T)f((float)x);
  } else {
    return (float)f((float)x);
  }
}

#define METAL_UNARY(name, expression) \
  template <class T> inline auto name(T x) { return each(x, [](float v) -> float { return expression; }); }
#define METAL_TRANSCENDENTAL                                                                                      \
  METAL_UNARY(exp, expf(v)) METAL_UNARY(exp2, exp2f(v)) METAL_UNARY(exp10, powf(10.0f, v)) METAL_UNARY(log, logf(v)) \
  METAL_UNARY(log2, log2f(v)) METAL_UNARY(log10, log10f(v)) METAL_UNARY(sqrt, __builtin_sqrtf(v))                 \
  METAL_UNARY(rsqrt, 1.0f / __builtin_sqrtf(v)) METAL_UNARY(sin, sinf(v)) METAL_UNARY(cos, cosf(v))               \
  METAL_UNARY(tan, tanf(v)) METAL_UNARY(asin, asinf(v)) METAL_UNARY(acos, acosf(v)) METAL_UNARY(atan, atanf(v))   \
  METAL_UNARY(sinh, sinhf(v)) METAL_UNARY(cosh, coshf(v)) METAL_UNARY(tanh, tanhf(v)) METAL_UNARY(asinh, asinhf(v)) \
  METAL_UNARY(acosh, acoshf(v)) METAL_UNARY(atanh, atanhf(v)) METAL_UNARY(sinpi, sinf(M_PI_F * v))                \
  METAL_UNARY(cospi, cosf(M_PI_F * v)) METAL_UNARY(tanpi, tanf(M_PI_F * v))
namespace precise {
METAL_TRANSCENDENTAL
}
namespace fast {
METAL_TRANSCENDENTAL
}
using namespace precise;
METAL_UNARY(floor, __builtin_floorf(v))
METAL_UNARY(ceil, __builtin_ceilf(v))
METAL_UNARY(trunc, __builtin_truncf(v))
METAL_UNARY(round, __builtin_roundf(v))
METAL_UNARY(rint, __builtin_rintf(v))
METAL_UNARY(fabs, __builtin_fabsf(v))
METAL_UNARY(fract, __builtin_fminf(v - __builtin_floorf(v), 0x1.fffffep-1f))
METAL_UNARY(saturate, __builtin_fminf(__builtin_fmaxf(v, 0.0f), 1.0f))
METAL_UNARY(sign, v > 0 ? 1.0f : v < 0 ? -1.0f : v == 0 ? v : 0.0f)
#undef METAL_UNARY
#undef METAL_TRANSCENDENTAL

// The type of min(a, b): a vector if one is a vector, else what C++ makes of the two.
template <class A, class B> constexpr auto common() {
  if constexpr (size_of<A> != 0) return A{};
  else if constexpr (size_of<B> != 0) return B{};
  else if constexpr (is_same_v<A, B>) return A{};
  else return A{} + B{};
}
template <class V> constexpr auto element(V v, int i) {
  if constexpr (size_of<V> != 0) return (element_of<V>)v[i];
  else return v;
}
template <class A, class B, class F> constexpr auto each_pair(A x, B y, F f) {
  using T = decltype(common<A, B>());
  if constexpr (size_of<T> != 0) {
    T out = {};
    using E = element_of<T>;
    for (int i = 0; i < size_of<T>; i++) out[i] = (E)f((E)element(x, i), (E)element(y, i));
    return out;
  } else {
    return (T)f((T)x, (T)y);
  }
}

#define METAL_BINARY(name, expression) \
  template <class A, class B> constexpr auto name(A x, B y) { return each_pair(x, y, [](auto a, auto b) { return expression; }); }
METAL_BINARY(min, (b < a ? b : a))
METAL_BINARY(max, (a < b ? b : a))
METAL_BINARY(fmin, (b < a || a != a ? b : a))
METAL_BINARY(fmax, (a < b || a != a ? b : a))
METAL_BINARY(pow, powf((float)a, (float)b))
METAL_BINARY(powr, powf((float)a, (float)b))
METAL_BINARY(fmod, fmodf((float)a, (float)b))
METAL_BINARY(atan2, atan2f((float)a, (float)b))
METAL_BINARY(copysign, __builtin_copysignf((float)a, (float)b))
METAL_BINARY(step, (b < a ? 0 : 1))
METAL_BINARY(fdim, (a > b ? a - b : decltype(a)(0)))
METAL_BINARY(absdiff, (a < b ? b - a : a - b))
METAL_BINARY(divide, a / b)
#undef METAL_BINARY
namespace precise {
using metal::divide;
using metal::pow;
}
namespace fast {
using metal::divide;
using metal::pow;
}
template <class A, class B, class C> constexpr auto min3(A a, B b, C c) { return min(a, min(b, c)); }
template <class A, class B, class C> constexpr auto max3(A a, B b, C c) { return max(a, max(b, c)); }
template <class A, class B, class C> constexpr auto clamp(A x, B low, C high) { return min(max(x, (A)low), (A)high); }

// One rounding. A product of two halves is exact in double, and a sum of two doubles that are so short nearly so.
template <class T> inline T fma(T a, T b, T c) {
  if constexpr (size_of<T> != 0) {
    T out = {};
    for (int i = 0; i < size_of<T>; i++) out[i] = fma((element_of<T>)a[i], (element_of<T>)b[i], (element_of<T>)c[i]);
    return out;
  } else if constexpr (is_same_v<T, float>) {
    return __builtin_fmaf(a, b, c);
  } else {
    return (T)((double)(float)a * (double)(float)b + (double)(float)c);
  }
}
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <class T> inline T mad(T a, T b, T c) { return a * b + c; }
template <class A, class B, class C> inline auto mix(A x, B y, C t) { return x + (y - x) * t; }
template <class T> inline T ldexp(T x, int e) { return (T)ldexpf((float)x, e); }
template <class T> inline int ilogb(T x) { return ilogbf((float)x); }
template <class T> inline T frexp(T x, int& e) { return (T)frexpf((float)x, &e); }
template <class T> inline T modf(T x, T& whole) {
  whole = (T)__builtin_truncf((float)x);
  return (T)((float)x - (float)whole);
}
template <class T> inline T sincos(T x, T& cosine) {
  cosine = cos(x);
  return sin(x);
}

template <class T> constexpr T abs(T x) {
  if constexpr (size_of<T> != 0) {
    T out = {};
    for (int i = 0; i < size_of<T>; i++) out[i] = abs((element_of<T>)x[i]);
    return out;
  } else if constexpr (is_floating_point_v<T>) {
    return (T)__builtin_fabsf((float)x);
  } else {
    return x < 0 ? -x : x;
  }
}

#define METAL_CLASSIFY(name, expression)                          \
  template <class T> inline auto name(T x) {                      \
    if constexpr (size_of<T> != 0) {                              \
      vec<bool, size_of<T>> out = {};                             \
      for (int i = 0; i < size_of<T>; i++) out[i] = name(x[i]);   \
      return out;                                                 \
    } else {                                                      \
      float v = (float)x;                                         \
      return (bool)(expression);                                  \
    }                                                             \
  }
METAL_CLASSIFY(isnan, (as_type<uint>(v) & 0x7FFFFFFF) > 0x7F800000)
METAL_CLASSIFY(isinf, (as_type<uint>(v) & 0x7FFFFFFF) == 0x7F800000)
METAL_CLASSIFY(isfinite, (as_type<uint>(v) & 0x7F800000) != 0x7F800000)
METAL_CLASSIFY(signbit, as_type<uint>(v) >> 31)
#undef METAL_CLASSIFY

template <class T, class C> constexpr T select(T otherwise, T chosen, C condition) {
  if constexpr (size_of<T> != 0) {
    T out = {};
    for (int i = 0; i < size_of<T>; i++) out[i] = (bool)element(condition, i) ? chosen[i] : otherwise[i];
    return out;
  } else {
    return condition ? chosen : otherwise;
  }
}
template <class V> constexpr bool any(V v) {
  if constexpr (size_of<V> == 0) return (bool)v;
  else {
    bool out = false;
    for (int i = 0; i < size_of<V>; i++) out |= (bool)v[i];
    return out;
  }
}
template <class V> constexpr bool all(V v) {
  if constexpr (size_of<V> == 0) return (bool)v;
  else {
    bool out = true;
    for (int i = 0; i < size_of<V>; i++) out &= (bool)v[i];
    return out;
  }
}

template <class V> constexpr auto dot(V a, V b) {
  element_of<V> sum = a[0] * b[0];
  for (int i = 1; i < size_of<V>; i++) sum += a[i] * b[i];
  return sum;
}
template <class V> inline auto length_squared(V v) { return dot(v, v); }
template <class V> inline auto length(V v) { return sqrt(dot(v, v)); }
template <class V> inline auto distance(V a, V b) { return length((V)(a - b)); }
template <class V> inline V normalize(V v) { return v / length(v); }

}  // namespace metal
