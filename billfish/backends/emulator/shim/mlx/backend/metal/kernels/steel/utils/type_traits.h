// MLX's header of this name specializes pointer_element for each address space; here there is one.
#pragma once
#include <metal_stdlib>

namespace metal {
template <class T> struct is_static : bool_constant<is_empty_v<remove_cv_t<T>>> {};
template <class T> struct pointer_element {};
template <class T> struct pointer_element<T*> { using type = remove_cv_t<T>; };
template <class T> using pointer_element_t = typename pointer_element<remove_cv_t<T>>::type;
}  // namespace metal
