// MLX's header of this name overloads every operator for each address space; ours has one.
#pragma once
#include <metal_stdlib>

template <class T> struct complex_t {
  using value_type = T;
  T real, imag;

  constexpr complex_t(T real = 0, T imag = 0) : real(real), imag(imag) {}
  constexpr complex_t operator-() const { return {-real, -imag}; }
  constexpr complex_t operator+(complex_t other) const { return {real + other.real, imag + other.imag}; }
  constexpr complex_t operator-(complex_t other) const { return {real - other.real, imag - other.imag}; }
  constexpr complex_t operator*(complex_t other) const {
    return {real * other.real - imag * other.imag, real * other.imag + imag * other.real};
  }
  constexpr complex_t operator/(complex_t other) const {
    T norm = other.real * other.real + other.imag * other.imag;
    return {(real * other.real + imag * other.imag) / norm, (imag * other.real - real * other.imag) / norm};
  }
  constexpr bool operator==(complex_t other) const { return real == other.real && imag == other.imag; }
};
typedef complex_t<float> complex64_t;
