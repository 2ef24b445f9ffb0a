// Scalar types, <type_traits> and numeric_limits.
#pragma once
#include "../runtime/emulator.h"

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

namespace metal {

using ::bfloat;
using ::half;
using ::uchar;
using ::uint;
using ::ulong;
using ::ushort;
using ::size_t;
using ::int8_t;
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::uint8_t;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;

template <class T, T v> struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return v; }
  constexpr T operator()() const { return v; }
};
template <bool b> using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool b, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool b, class T = void> using enable_if_t = typename enable_if<b, T>::type;
template <bool b, class T, class F> struct conditional { using type = T; };
template <class T, class F> struct conditional<false, T, F> { using type = F; };
template <bool b, class T, class F> using conditional_t = typename conditional<b, T, F>::type;
template <class...> using void_t = void;
template <class T> T&& declval();

#define METAL_TRANSFORM(name, builtin)                       \
  template <class T> struct name { using type = builtin(T); }; \
  template <class T> using name##_t = builtin(T);
METAL_TRANSFORM(remove_cv, __remove_cv)
METAL_TRANSFORM(remove_const, __remove_const)
METAL_TRANSFORM(remove_volatile, __remove_volatile)
METAL_TRANSFORM(remove_reference, __remove_reference_t)
METAL_TRANSFORM(remove_pointer, __remove_pointer)
METAL_TRANSFORM(remove_extent, __remove_extent)
METAL_TRANSFORM(decay, __decay)
METAL_TRANSFORM(make_signed, __make_signed)
METAL_TRANSFORM(make_unsigned, __make_unsigned)
#undef METAL_TRANSFORM
template <class T> using remove_addrspace_t = T;
template <class T> struct remove_addrspace { using type = T; };

#define METAL_PREDICATE(name, expression)                        \
  template <class T> constexpr bool name##_v = expression;       \
  template <class T> struct name : bool_constant<expression> {};
METAL_PREDICATE(is_integral, __is_integral(T))
METAL_PREDICATE(is_unsigned, __is_unsigned(T))
METAL_PREDICATE(is_signed, __is_signed(T))
METAL_PREDICATE(is_empty, __is_empty(T))
METAL_PREDICATE(is_pointer, __is_pointer(T))
METAL_PREDICATE(is_reference, __is_reference(T))
METAL_PREDICATE(is_enum, __is_enum(T))
METAL_PREDICATE(is_trivially_copyable, __is_trivially_copyable(T))
METAL_PREDICATE(is_const, __is_const(T))
METAL_PREDICATE(is_floating_point,
                __is_floating_point(T) || __is_same(__remove_cv(T), half) || __is_same(__remove_cv(T), bfloat))
METAL_PREDICATE(is_arithmetic, is_integral_v<T> || is_floating_point_v<T>)
#undef METAL_PREDICATE
template <class A, class B> constexpr bool is_same_v = __is_same(A, B);
template <class A, class B> struct is_same : bool_constant<__is_same(A, B)> {};
template <class A, class B> constexpr bool is_convertible_v = __is_convertible(A, B);
template <class A, class B> struct is_convertible : bool_constant<__is_convertible(A, B)> {};
template <class A, class B> constexpr bool is_base_of_v = __is_base_of(A, B);
template <class A, class B> struct is_base_of : bool_constant<__is_base_of(A, B)> {};

template <class T, class U> constexpr T as_type(U value) {
  static_assert(sizeof(T) == sizeof(U), "as_type: the two types have different sizes");
  return __builtin_bit_cast(T, value);
}

template <class T> struct numeric_limits {
  static constexpr bool is_signed = __is_signed(T), is_integer = true;
  static constexpr int digits = 8 * sizeof(T) - is_signed;
  static constexpr T max() { return (T)(~0ull >> (64 - digits)); }
  static constexpr T min() { return is_signed ? (T)(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
};
template <> struct numeric_limits<bool> {
  static constexpr bool max() { return true; }
  static constexpr bool min() { return false; }
};

#define METAL_FLOAT_LIMITS(T, bits, max_bits, min_bits, infinity_bits, nan_bits, epsilon_bits, digits_, max_exponent_) \
  template <> struct numeric_limits<T> {                                                                            \
    static constexpr bool is_signed = true, is_integer = false;                                                     \
    static constexpr int digits = digits_, max_exponent = max_exponent_;                                            \
    static constexpr T max() { return as_type<T>((bits)max_bits); }                                                 \
    static constexpr T lowest() { return -max(); }                                                                  \
    static constexpr T min() { return as_type<T>((bits)min_bits); }                                                 \
    static constexpr T infinity() { return as_type<T>((bits)infinity_bits); }                                       \
    static constexpr T quiet_NaN() { return as_type<T>((bits)nan_bits); }                                           \
    static constexpr T epsilon() { return as_type<T>((bits)epsilon_bits); }                                         \
  };
METAL_FLOAT_LIMITS(float, uint, 0x7F7FFFFF, 0x00800000, 0x7F800000, 0x7FC00000, 0x34000000, 24, 128)
METAL_FLOAT_LIMITS(half, ushort, 0x7BFF, 0x0400, 0x7C00, 0x7E00, 0x1400, 11, 16)
METAL_FLOAT_LIMITS(bfloat, ushort, 0x7F7F, 0x0080, 0x7F80, 0x7FC0, 0x3C00, 8, 128)
#undef METAL_FLOAT_LIMITS

}  // namespace metal
